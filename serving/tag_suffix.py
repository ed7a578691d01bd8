"""The suffix that a chat template gives to all tags of a release, as Hunyuan's do."""

from __future__ import annotations

import re


def suffix_of(template: str, tag: str) -> str:
    """Return what stands behind the name of a tag, such as `:opensource`; empty: nothing.

    The template has it there, or puts a variable there that it sets itself.
    """
    if found := re.search(rf"<{re.escape(tag)}(:[^\s<>{{}}'\"]+)>", template):
        return found[1]
    put = re.search(rf"""<{re.escape(tag)}\{{\}}>['"]\.format\((\w+)\)""", template)
    if put is None:
        return ""
    held = re.search(rf"""set\s+{put[1]}\s*=\s*(['"])(:[^\s<>'"]*)\1""", template)
    return "" if held is None else held[2]
