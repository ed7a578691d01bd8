"""PLaMo 3's calls: a name and arguments in JSON, each between marks of its own.

A mark `begin_tool_name`, say, is `<|plamo:begin_tool_name:plamo|>`:

    begin_tool_requests begin_tool_request begin_tool_name f end_tool_name
    begin_tool_arguments <|plamo:constrain|>json<|plamo:msg|> {…} end_tool_arguments
    end_tool_request … end_tool_requests

Marks are made of several tokens. Each call is told as soon as it is whole; what is around all of
them, and the ends, may be missing. Source: what vLLM reads of the model.
"""

from __future__ import annotations

from typing import Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    NAME,
    Block,
    Functions,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.json_calls import call
from onnxport.serving.http.tool_formats.sections import ends_behind, json_before, open_call

BEGIN, CLOSE, END = "<|plamo:begin_", "<|plamo:end_", ":plamo|>"
CONSTRAIN, MESSAGE = "<|plamo:constrain|>", "<|plamo:msg|>"
SECTION, REQUEST, FUNCTION, VALUES = (
    (f"{BEGIN}{name}{END}", f"{CLOSE}{name}{END}")
    for name in ("tool_requests", "tool_request", "tool_name", "tool_arguments")
)
IN_JSON: Final = f"{CONSTRAIN}json{MESSAGE}"


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the call that begins at `start`, with what opens or closes all; see `Reader`."""
    cursor = Cursor(text, start, final)
    is_opened, behind = open_call(cursor, SECTION[0], REQUEST[0])
    if not is_opened or not cursor.take(FUNCTION[0]):
        return Block(behind)
    cursor.skip_space()
    name = cursor.take(*functions)
    cursor.skip_space()
    if name is None or not cursor.take(FUNCTION[1]):
        return Block(behind)
    cursor.skip_space()
    if not cursor.take(VALUES[0]):
        return Block(behind)
    cursor.take(IN_JSON)
    found = call(name, json_before(cursor, VALUES[1]), functions)
    if found is None:
        return Block(behind, seen=cursor.seen)
    ends = (VALUES[1], REQUEST[1], SECTION[1])
    return Block(ends_behind(text, cursor.at, final, ends), (found,))


PLAMO3 = ToolFormat(
    "plamo3",
    markers=(SECTION[0], REQUEST[0]),
    further=(BEGIN, CLOSE, END, CONSTRAIN, MESSAGE),
    read=read,
    written=Written(
        *SECTION,
        f"{REQUEST[0]}{FUNCTION[0]}{NAME}{FUNCTION[1]}{VALUES[0]}{IN_JSON}{ARGUMENTS}{VALUES[1]}"
        f"{REQUEST[1]}",
        between_calls="",
    ),
    ends_thought=SECTION[:1],
    recognizes=lambda template: "begin_tool_requests" in template and "plamo:" in template,
)
