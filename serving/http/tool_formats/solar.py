"""`<|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{…}<|tool_call:end|>`: Solar Open.

The calls of an answer stand in a message of their own, behind `<|tool_calls|>`, and `<|calls|>`
ends it. The id is the model's; the call gets one of ours. Source: the model's chat template.
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

HEADER, HEADER_BEGIN = "<|begin|>assistant", "<|begin|>"  # of a further message
CALLS, CALLS_END = "<|tool_calls|>", "<|calls|>"
BEGIN, FUNCTION = "<|tool_call:begin|>", "<|tool_call:name|>"
ARGS, END = "<|tool_call:args|>", "<|tool_call:end|>"
_ID: Final = re.compile(r"[^<>\s]*")


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`."""
    cursor = Cursor(text, start, final)
    if cursor.take(HEADER):
        return Block(cursor.at, is_told=False)
    cursor.take(CALLS)
    none = Block(max(cursor.at, start + 1))
    cursor.skip_space()
    if not cursor.take(BEGIN):
        return none
    none = Block(cursor.at)
    found_id = _ID.match(text, cursor.at)
    cursor.at = found_id.end() if found_id else cursor.at
    if not cursor.take(FUNCTION):
        return none
    cursor.skip_space()
    name = cursor.take(*functions)
    cursor.skip_space()
    if name is None or not cursor.take(ARGS):
        return none
    cursor.skip_space()
    found = call(name, cursor.json(), functions)
    if found is None:
        return replace(none, seen=cursor.seen)
    end = cursor.at
    for mark in (END, CALLS_END):
        cursor.skip_space()
        end = cursor.at if cursor.take(mark) else end
        cursor.at = end
    return Block(end, (found,))


SOLAR = ToolFormat(
    "solar_open",
    markers=(CALLS, BEGIN, HEADER),
    further=(HEADER_BEGIN, FUNCTION, ARGS, END, CALLS_END),
    read=read,
    written=Written(
        CALLS,
        CALLS_END,
        f"{BEGIN}{ID}{FUNCTION}{NAME}{ARGS}{ARGUMENTS}{END}",
        between_calls="",
        id_pattern="[A-Za-z0-9_.:-]{1,64}",
    ),
    recognizes=lambda template: FUNCTION in template and ARGS in template,
)
