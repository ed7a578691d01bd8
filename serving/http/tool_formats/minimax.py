"""`<tool_calls>`, then a call in JSON on each line, then `</tool_calls>`: MiniMax M1.

Source: the model's chat template.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.serving.http.tool_formats.base import (
    BREAK,
    Block,
    Functions,
    ParsedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor, Incomplete
from onnxport.serving.http.tool_formats.json_calls import call_of
from onnxport.serving.http.tool_formats.sections import ends_behind

OPEN: Final = "<tool_calls>"
CLOSE: Final = "</tool_calls>"
SENTENCE: Final = "<beginning_of_sentence>"  # before each message; others have these tags, too


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`.

    The closing tag may be missing, or cut, at the end of all.
    """
    cursor = Cursor(text, start + len(OPEN), final)
    none = Block(cursor.at)
    cursor.skip_space()
    if cursor.next() != "{":  # a text that speaks of the tag, say, which is not kept back
        return none
    cursor.wait_for(CLOSE)
    calls: tuple[ParsedCall, ...] = ()
    end = cursor.at
    try:
        while found := call_of(cursor.json(), functions):
            calls, end = (*calls, found), cursor.at
            cursor.skip_space()
    except Incomplete as error:  # the tag that came is within a text
        raise cursor.goes_on(error, CLOSE) from None
    behind = ends_behind(text, end, final, [CLOSE])
    is_closed = behind > end or (final and not text[end:].strip())
    return Block(behind, calls) if calls and is_closed else replace(none, seen=cursor.seen)


MINIMAX = ToolFormat(
    "minimax",
    markers=(OPEN,),
    further=(CLOSE,),
    read=read,
    written=Written(f"{OPEN}{BREAK}", f"{BREAK}{CLOSE}", between_calls="\n"),
    recognizes=lambda template: CLOSE in template and SENTENCE in template,
)
