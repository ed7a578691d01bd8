"""`<function_calls>f(a=1)`, a call on each line, `</function_calls>`: OLMo 3.

A call is as Python has it, with literals as arguments, of which `true`, `false` and `null` may be
JSON's. It is JSON where a grammar of Python's values cannot say what parameters ask for. Source:
what vLLM reads of the model.
"""

from __future__ import annotations

from typing import Final

from onnxport.serving.http.tool_formats.base import (
    BREAK,
    PYTHON_LITERALS,
    Block,
    Functions,
    ParsedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.json_calls import call_of
from onnxport.serving.http.tool_formats.pythonic import calls_in
from onnxport.serving.http.tool_formats.sections import ends_behind

OPEN: Final = "<function_calls>"
CLOSE: Final = "</function_calls>"


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`.

    The closing tag may be missing, or cut, at the end of all.
    """
    cursor = Cursor(text, start + len(OPEN), final)
    opened = cursor.at
    calls: tuple[ParsedCall, ...] = ()
    end = opened
    while found := _calls(cursor, functions):
        calls, end = calls + found, cursor.at
    behind = ends_behind(text, end, final, [CLOSE])
    is_closed = behind > end or (final and not text[end:].strip())
    return Block(behind, calls) if calls and is_closed else Block(opened, seen=cursor.seen)


def _calls(cursor: Cursor, functions: Functions) -> tuple[ParsedCall, ...]:
    """Go past a call and return it; none: it is none, or the end."""
    cursor.skip_space()
    if cursor.take(CLOSE):
        return ()
    if cursor.next() == "{":
        found = call_of(cursor.json(), functions)
        return () if found is None else (found,)
    name = cursor.take(*functions)
    if name is None or cursor.next() != "(":
        return ()
    arguments = cursor.brackets(python=True)
    return () if arguments is None else calls_in(f"[{name}{arguments}]", functions)


OLMO3 = ToolFormat(
    "olmo3",
    markers=(OPEN,),
    further=(CLOSE,),
    read=read,
    written=Written(f"{OPEN}{BREAK}", f"{BREAK}{CLOSE}", between_calls="\n"),
    literals=PYTHON_LITERALS,
    recognizes=lambda template: OPEN in template,
)
