"""Hunyuan 3's calls, which are GLM's in tags of other names, with a pair around all of an answer.

    <tool_calls:opensource>
    <tool_call:opensource>f<tool_sep:opensource>
    <arg_key:opensource>a</arg_key:opensource>
    <arg_value:opensource>1</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

Source: the model's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxport.serving.http.tool_formats.base import (
    JSON_CALL,
    Block,
    Functions,
    TaggedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.xml_calls import Tags


def _pair(name: str) -> tuple[str, str]:
    return f"<{name}:opensource>", f"</{name}:opensource>"


CALLS, CALL, KEY, VALUE = map(_pair, ("tool_calls", "tool_call", "arg_key", "arg_value"))
SEPARATOR, _ = _pair("tool_sep")
_TAGS = Tags(CALL, ("", SEPARATOR), KEY, VALUE)


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`."""
    cursor = Cursor(text, start, final)
    cursor.take(CALLS[0])
    none = Block(max(cursor.at, start + 1))
    cursor.skip_space()
    begin = cursor.at
    if not cursor.take(CALL[0]):
        return none
    found = _TAGS(text, begin, final, functions)
    if not found.calls:
        return found
    cursor.at = found.end
    cursor.skip_space()
    return Block(cursor.at if cursor.take(CALLS[1]) else found.end, found.calls)


def _tagged(name: str, parameters: Mapping[str, Any]) -> TaggedCall | None:
    """Return how a call is written, with the tags around it; see `Tags.written`."""
    call = _TAGS.written(name, parameters)
    return call and TaggedCall(
        f"{CALL[0]}{call.before}", call.arguments, f"{call.behind}{CALL[1]}\n"
    )


HY3 = ToolFormat(
    "hy_v3",
    markers=(CALLS[0], CALL[0]),
    further=(CALLS[1], CALL[1], SEPARATOR, *KEY, *VALUE),
    read=read,
    written=Written(
        f"{CALLS[0]}\n", CALLS[1], f"{CALL[0]}\n{JSON_CALL}\n{CALL[1]}\n", between_calls=""
    ),
    tagged=_tagged,
    recognizes=lambda template: "<tool_sep{}>" in template or SEPARATOR in template,
)
