"""Hunyuan 3's and 4's calls, which are GLM's in tags of other names, with a pair around all.

    <tool_calls:opensource>
    <tool_call:opensource>f<tool_sep:opensource>
    <arg_key:opensource>a</arg_key:opensource>
    <arg_value:opensource>1</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

The suffix is of the release, and the chat template says it; there may be none. Hunyuan 4 has no
`<tool_sep>`. Source: the chat template of Hunyuan 3, and what vLLM reads of both.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from onnxport.serving.http.tool_formats.base import ToolFormat
from onnxport.serving.http.tool_formats.tag_sections import sectioned
from onnxport.serving.http.tool_formats.xml_calls import Tags
from onnxport.serving.tag_suffix import suffix_of

RELEASE: Final = ":opensource"
NAMES: Final = ("tool_calls", "tool_call", "arg_key", "arg_value")
SEPARATOR: Final = "<tool_sep"
SIGNS: Final = ("<tool_calls", "<arg_key")
_OF_LATER: Final = re.compile(r"<tool_calls[:{>]")


@cache
def _hy(name: str, suffix: str) -> ToolFormat:
    """Return the format of the tags of a release."""
    is_third = name == "hy_v3"
    separator = f"{SEPARATOR}{suffix}>" if is_third else ""
    section, call, key, value = ((f"<{each}{suffix}>", f"</{each}{suffix}>") for each in NAMES)

    def recognizes(template: str) -> bool:
        if is_third:
            return suffix in template and SEPARATOR in template and SIGNS[1] in template
        return all(each in template for each in SIGNS) and _OF_LATER.search(template) is not None

    return sectioned(
        name,
        section,
        Tags(call, ("", separator), key, value),
        recognizes,
        line="\n" if is_third else "",
        of_template=lambda template: _hy(name, suffix_of(template, NAMES[2])),
    )


HY3, HY3_PLAIN, HY4 = _hy("hy_v3", RELEASE), _hy("hy_v3", ""), _hy("hy_v4", "")
