"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes and many others.

Qwen 2.5 and 3, SmolLM3, Granite 4 and the ERNIE 4.5 models that think write it, too. Source: the
chat templates of these models.
"""

from __future__ import annotations

import json

from onnxport.serving.http.tool_formats.base import Block, Functions, ToolFormat, Written
from onnxport.serving.http.tool_formats.cursor import Incomplete, json_value
from onnxport.serving.http.tool_formats.json_calls import call_of

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`.

    The closing tag may be missing at the end of all, where the end token came in its place.
    """
    begin = start + len(OPEN)
    end = _end(text, begin, final)
    if end < 0 and not final:
        raise Incomplete(in_block=True)
    inner = text[begin:end] if end >= 0 else text[begin:]
    found = call_of(json_value(inner), functions)
    return Block(end + len(CLOSE) if end >= 0 else len(text), (found,) if found else ())


def _end(text: str, start: int, final: bool) -> int:
    """Return where a block's closing tag is; -1: not there yet.

    A tag in the middle of one of its texts closes nothing, if that leads to a whole block.
    """
    first = end = text.find(CLOSE, start)
    while end >= 0:
        whole = _is_whole(text[start:end])
        if whole is not None:
            return end if whole else first
        end = text.find(CLOSE, end + 1)
    return first if final else -1


def _is_whole(inner: str) -> bool | None:
    """Whether a text is JSON; None: it ends in the middle of one of the texts in it."""
    try:
        json.loads(inner)
    except json.JSONDecodeError as error:
        return None if error.msg.startswith("Unterminated string") else False
    except (ValueError, RecursionError):
        return False
    return True


HERMES = ToolFormat(
    "hermes",
    markers=(OPEN,),
    further=(CLOSE,),
    read=read,
    written=Written(f"{OPEN}\n", f"\n{CLOSE}", between_blocks="\n"),
    recognizes=lambda template: CLOSE in template,
)
