"""`<function=f>{…}</function>` and `>>>f` with arguments on the next line: functionary.

Version 3.1, on Llama 3.1, writes the first, as Meta's own description of that model has it.
Version 3.2 parts an answer into messages: behind `>>>`, with which its prompts end, is a recipient,
and `all` is the user. Source: the models' chat templates.
"""

from __future__ import annotations

import re
from dataclasses import replace

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

OPEN, CLOSE = "<function=", "</function>"
NEXT, USER = ">>>", "all\n"
_EXAMPLE = re.compile(r"<function=\w+>\{")


def read_tag(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`."""
    cursor = Cursor(text, start + len(OPEN), final)
    none = Block(cursor.at)
    name = cursor.take(*functions)
    if name is None or not cursor.take(">"):
        return none
    cursor.skip_space()
    found = call(name, cursor.json(), functions)
    end = cursor.at
    cursor.skip_space()
    if found is None:
        return replace(none, seen=cursor.seen)
    return Block(cursor.at if cursor.take(CLOSE) else end, (found,))


def read_message(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that may begin at `start`, a message or its header; see `Reader`."""
    cursor = Cursor(text, start, final)
    cursor.take(NEXT)
    none = Block(max(cursor.at, start + 1))
    begin = cursor.at
    if cursor.take(USER):
        return Block(cursor.at, is_told=False)
    cursor.at = begin
    name = cursor.take(*functions)
    if name is None or not cursor.take("\n"):
        return none
    cursor.skip_space()
    found = call(name, cursor.json(), functions)
    return Block(cursor.at, (found,)) if found else replace(none, seen=cursor.seen)


FUNCTIONARY_TAG = ToolFormat(
    "functionary_v3_1",
    markers=(OPEN,),
    further=(CLOSE,),
    read=read_tag,
    written=Written(OPEN, CLOSE, f"{NAME}>{ARGUMENTS}", between_blocks=""),
    recognizes=lambda template: _EXAMPLE.search(template) is not None,
)
FUNCTIONARY_MESSAGE = ToolFormat(
    "functionary_v3_2",
    markers=(NEXT,),
    begins=lambda functions: tuple(f"{name}\n" for name in functions),
    headers=(USER,),
    read=read_message,
    written=Written("", "", f"{NAME}\n{ARGUMENTS}", between_blocks=NEXT, optional_marker=NEXT),
    recognizes=lambda template: ">>>${recipient}" in template,
)
