"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes and many others.

Qwen 2.5 and 3, SmolLM3, Granite 4 and the ERNIE 4.5 models that think write it, too. Source: the
chat templates of these models.
"""

from __future__ import annotations

import json
from typing import Final

from onnxport.serving.http.tool_formats.base import (
    BREAK,
    Block,
    Functions,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import (
    AwaitedTag,
    Cursor,
    Incomplete,
    json_value,
    longest_partial,
)
from onnxport.serving.http.tool_formats.json_calls import call_of
from onnxport.serving.thoughts import Enclosed

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_JSON: Final = json.JSONDecoder(strict=False)


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`.

    The closing tag may be missing at the end of all, where the end token came in its place, or cut.
    """
    begin = start + len(OPEN)
    cursor = Cursor(text, begin, final)
    cursor.skip_space()
    if cursor.next() != "{":  # a text that speaks of the tag, say, which is not kept back
        return Block(begin)
    end = _end(text, begin)
    if end is None and not final:
        raise Incomplete(AwaitedTag(CLOSE, text[begin:]))
    last = len(text) - longest_partial(text, (CLOSE,)) if end is None else end
    found = call_of(json_value(text[begin:last]), functions)
    if end is None and found is None and CLOSE in text[begin:]:
        end = text.index(CLOSE, begin)
    return Block(len(text) if end is None else end + len(CLOSE), (found,) if found else ())


def _end(text: str, start: int) -> int | None:
    """Return where a block's closing tag is; None: not there yet.

    A tag in the middle of one of its texts closes nothing, if that leads to a whole block.
    """
    first = text.find(CLOSE, start)
    if first < 0:
        return None
    cursor = Cursor(text, start, final=True)
    cursor.skip_space()
    is_whole = True
    try:
        _, at = _JSON.raw_decode(text, cursor.at)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            return None
        at, is_whole = error.pos, False
    except (ValueError, RecursionError):
        return first
    end = text.find(CLOSE, at)
    if end < 0:
        return None
    return end if is_whole and not text[at:end].strip() else first


HERMES = ToolFormat(
    "hermes",
    markers=(OPEN,),
    further=(CLOSE,),
    read=read,
    written=Written(f"{OPEN}{BREAK}", f"{BREAK}{CLOSE}", between_blocks=BREAK),
    ends_thought_with=(Enclosed(OPEN, "{", CLOSE),),
    recognizes=lambda template: CLOSE in template,
)
