"""A function's name on a line, and its arguments on the next: GLM-4 and GLM-4-0414.

The template puts the name behind `<|assistant|>`, where other answers have an end of a line. A
further call has that token before it. Source: the models' chat templates and their authors'
examples.
"""

from __future__ import annotations

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

NEXT = "<|assistant|>"
SIGN = "请使用 Json 格式表示调用的参数"  # "write the call's parameters in JSON"


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that may begin at `start`; see `Reader`."""
    cursor = Cursor(text, start, final)
    cursor.take(NEXT)
    none = Block(max(cursor.at, start + 1))
    cursor.skip_space()
    name = cursor.take(*functions)
    if name is None or not cursor.take("\n"):
        return none
    cursor.skip_space()
    found = call(name, cursor.json(), functions)
    return Block(cursor.at, (found,)) if found else replace(none, seen=cursor.seen)


GLM4 = ToolFormat(
    "glm4",
    markers=(NEXT,),
    begins=lambda functions: tuple(f"{name}\n" for name in functions),
    read=read,
    written=Written("", "", f"{NAME}\n{ARGUMENTS}", between_blocks=NEXT, optional_marker=NEXT),
    recognizes=lambda template: SIGN in template,
)
