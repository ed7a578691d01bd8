"""Calls that stand in sections, of which each is read by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnxport.serving.http.tool_formats.cursor import Cursor


def json_before(cursor: Cursor, end: str) -> Any:
    """Go past an object of JSON and return it; None: it is none. Nothing before `end` is one."""
    cursor.skip_space()
    if cursor.take(end):
        cursor.at -= len(end)
        return {}
    return cursor.json()


def ends_behind(text: str, at: int, final: bool, ends: Iterable[str]) -> int:
    """Return the place behind texts that may end a call and its section, in their order.

    Each may be missing, space be before it, and the last one be cut at the end of all.

    Args:
        text: what was generated so far.
        at: behind the call.
        final: whether nothing follows `text`.
        ends: the texts.

    Raises:
        Incomplete: what follows `text` decides.
    """
    for end in ends:
        cursor = Cursor(text, at, final)
        cursor.skip_space()
        rest = text[cursor.at :]
        if cursor.take(end):
            at = cursor.at
        elif final and rest and end.startswith(rest):
            return len(text)
    return at
