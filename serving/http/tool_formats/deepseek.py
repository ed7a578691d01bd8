"""Calls in special tokens of DeepSeek's: V3 and R1, V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f     V3, R1, its
    ```json                                                                       distillations
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}     V3.1
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

Either is read where the other one is written. Each call is told as soon as it is whole; what is
around all of them, and the ends, may be missing. Source: the models' chat templates.
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

SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR: Final = "<｜tool▁sep｜>"
KIND, FENCE, FENCE_END = "function", "```json", "```"


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the call that begins at `start`, with what opens or closes all; see `Reader`."""
    cursor = Cursor(text, start, final)
    is_opened, behind = open_call(cursor, SECTION[0], CALL[0])
    if not is_opened:
        return Block(behind)
    name = _name(cursor, functions)
    if name is None:
        return Block(behind)
    cursor.skip_space()
    is_fenced = bool(cursor.take(FENCE, FENCE_END))
    found = call(name, json_before(cursor, FENCE_END if is_fenced else CALL[1]), functions)
    if found is None:
        return Block(behind, seen=cursor.seen)
    ends = (*((FENCE_END,) if is_fenced else ()), CALL[1], SECTION[1])
    return Block(ends_behind(text, cursor.at, final, ends), (found,))


def _name(cursor: Cursor, functions: Functions) -> str | None:
    """Go past the name of an offered function, and the kind of call before it; None: it is none."""
    cursor.skip_space()
    begin = cursor.at
    if cursor.take(f"{KIND}{SEPARATOR}"):
        cursor.skip_space()
        if name := cursor.take(*functions):
            return name
        cursor.at = begin  # a function may have that name
    name = cursor.take(*functions)
    return name if name is not None and cursor.take(SEPARATOR) else None


def _deepseek(name: str, written: Written, sign: str) -> ToolFormat:
    return ToolFormat(
        name,
        markers=(SECTION[0], CALL[0]),
        further=(SECTION[1], CALL[1], SEPARATOR),
        read=read,
        written=written,
        ends_thought=(SECTION[0], CALL[0]),
        recognizes=lambda template: SECTION[0] in template and sign in template,
    )


DEEPSEEK_V3 = _deepseek(
    "deepseek_v3",
    Written(
        *SECTION,
        f"{CALL[0]}{KIND}{SEPARATOR}{NAME}\n{FENCE}\n{ARGUMENTS}\n{FENCE_END}{CALL[1]}",
        between_calls="\n",
    ),
    FENCE,
)
DEEPSEEK_V31 = _deepseek(
    "deepseek_v31",
    Written(*SECTION, f"{CALL[0]}{NAME}{SEPARATOR}{ARGUMENTS}{CALL[1]}", between_calls=""),
    SEPARATOR,
)
