"""`[TOOL_CALLS][{"name": …, "arguments": {…}}]`, and newer `[TOOL_CALLS]name[ARGS]{…}`: Mistral.

The first is of tokenizers up to version 7, the second, once for each call, of 11 and later; some
put `[CALL_ID]` and an id between. Where special tokens were dropped the object follows the name at
once. Source: mistral-common and the models' chat templates, which ask for ids of nine letters and
digits.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    ID,
    JSON_CALL,
    NAME,
    Block,
    Functions,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.json_calls import JsonReader, call
from onnxport.serving.thoughts import Enclosed

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9
ID_PATTERN = f"[A-Za-z0-9]{{{ID_LENGTH}}}"
_ID: Final = re.compile(r"[^\W_]+")
_read_list = JsonReader((OPEN,))


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`."""
    cursor = Cursor(text, start + len(OPEN), final)
    none = Block(cursor.at)
    cursor.skip_space()
    if cursor.next() in ("[", "{"):
        return _read_list(text, start, final, functions)
    name = cursor.take(*functions)
    if name is None:
        return none
    cursor.skip_space()
    if cursor.take(CALL_ID):
        cursor.go_past(_ID)  # the call gets one of ours
    cursor.take(ARGS)
    cursor.skip_space()
    found = call(name, cursor.json(), functions)
    return Block(cursor.at, (found,)) if found else replace(none, seen=cursor.seen)


def new_id() -> str:
    """Return an id that the templates let pass."""
    return uuid.uuid4().hex[:ID_LENGTH]


def _mistral(written: Written, signs: tuple[str, ...]) -> ToolFormat:
    """Return the format of templates with these signs; all ways are read."""
    return ToolFormat(
        "mistral",
        markers=(OPEN,),
        further=(CALL_ID, ARGS),
        read=read,
        written=written,
        recognizes=lambda template: all(sign in template for sign in signs),
        new_id=new_id,
        ends_thought_with=(Enclosed(OPEN),),
    )


MISTRAL_ID = _mistral(
    Written(
        OPEN,
        "",
        f"{NAME}{CALL_ID}{ID}{ARGS}{ARGUMENTS}",
        between_blocks="",
        other_calls=(f"{NAME}{ARGS}{ARGUMENTS}",),
        id_pattern=ID_PATTERN,
    ),
    (OPEN, CALL_ID, ARGS),
)
MISTRAL_NAME = _mistral(
    Written(OPEN, "", f"{NAME}{ARGS}{ARGUMENTS}", between_blocks=""), (OPEN, ARGS)
)


def _list(space: str) -> ToolFormat:
    """Return the format of templates that write a list, with such space before it."""
    return _mistral(
        Written(
            f"{OPEN}{space}[",
            "]",
            between_calls=", ",
            other_calls=(f'{JSON_CALL[:-1]}, "id": "{ID}"}}',),
            id_pattern=ID_PATTERN,
        ),
        (f"{OPEN}{space}",),
    )


MISTRAL_SPACED, MISTRAL_LIST = _list(" "), _list("")
