"""`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`: Kimi K2.

Calls stand between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`, and each is
told as soon as it is whole; what is around all of them, and the ends, may be missing. What is
before the arguments is the id of the call, by which its result is sent back to the template.
Source: the models' chat templates and their authors' guide to tool calls.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    ID,
    NAME,
    Block,
    Functions,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.json_calls import call
from onnxport.serving.http.tool_formats.sections import ends_behind, json_before, open_call

SECTION: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
CALL: Final = ("<|tool_call_begin|>", "<|tool_call_end|>")
ARGUMENT: Final = "<|tool_call_argument_begin|>"
PREFIX: Final = "functions."
_DIGITS: Final = re.compile("[0-9]+")


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the call that begins at `start`, with what opens or closes all; see `Reader`."""
    cursor = Cursor(text, start, final)
    is_opened, behind = open_call(cursor, SECTION[0], CALL[0])
    if not is_opened:
        return Block(behind)
    cursor.skip_space()
    begin = cursor.at
    cursor.take(PREFIX)
    name = cursor.take(*functions)
    if name is None or not cursor.take(":"):
        return Block(behind)
    cursor.go_past(_DIGITS)
    told = cursor.since(begin)
    cursor.skip_space()
    if told.endswith(":") or not cursor.take(ARGUMENT):
        return Block(behind)
    found = call(name, json_before(cursor, CALL[1]), functions)
    if found is None:
        return Block(behind, seen=cursor.seen)
    end = ends_behind(text, cursor.at, final, (CALL[1], SECTION[1]))
    return Block(end, (replace(found, id=told),))


KIMI_K2 = ToolFormat(
    "kimi_k2",
    markers=(SECTION[0], CALL[0]),
    further=(SECTION[1], CALL[1], ARGUMENT),
    read=read,
    written=Written(
        *SECTION,
        f"{CALL[0]}{PREFIX}{NAME}:{ID}{ARGUMENT}{ARGUMENTS}{CALL[1]}",
        between_calls="",
    ),
    ends_thought=(SECTION[0], CALL[0]),
    recognizes=lambda template: ARGUMENT in template,
)
