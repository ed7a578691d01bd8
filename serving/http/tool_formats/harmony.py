"""`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`: gpt-oss.

The recipient may stand before the channel, `to=functions.f<|channel|>commentary json`, and the
channel be analysis. `<|call|>` is an end token, so a call ends an answer, unless the model writes
`<|end|>` in its place and another message. Source: OpenAI's description of the harmony format.
"""

from __future__ import annotations

from typing import Final

from onnxport.serving.channels import (
    ANALYSIS,
    BREAK,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    ENDS,
    FINAL,
    HEADER_END,
    MARKS,
    MESSAGE,
    ROLE,
    START,
    called,
)
from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    NAME,
    Block,
    Functions,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import AwaitedTag, Cursor, Incomplete
from onnxport.serving.http.tool_formats.json_calls import call

RECIPIENT: Final = "to=functions."
_STEP: Final = "<|"  # that all marks begin with


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`.

    A header is never told, also where it leads to no call, or is cut; nor is any mark.
    """
    for mark in (MESSAGE, CONSTRAIN, *ENDS):  # that begins no header
        if text.startswith(mark, start):
            return Block(start + len(mark), is_told=False)
    if text.startswith(RECIPIENT, start) and _STEP not in text[start:]:
        if not final:
            raise Incomplete(AwaitedTag(_STEP, text[start:]))
        return Block(len(text))  # a text that looks like a header so far
    header = HEADER_END.search(text, start + text.startswith(START, start))
    if header is None:
        if not final:
            raise Incomplete(AwaitedTag(_STEP, text[start:]))
        return Block(len(text), is_told=False)
    if header[0] != MESSAGE:
        return Block(header.start(), is_told=False)
    name = called(text[start : header.start()], functions)
    if name is None:
        return Block(header.end(), is_told=False)
    cursor = Cursor(text, header.end(), final)
    cursor.skip_space()
    needs_none = not functions[name].get("required")
    is_empty = needs_none and (not cursor.next() or bool(cursor.take(*ENDS)))
    found = call(name, {} if is_empty else cursor.json(), functions)
    if found is None:
        return Block(header.end(), is_told=False, seen=cursor.seen)
    return Block(cursor.at, (found,))


HARMONY = ToolFormat(
    "openai",
    markers=MARKS,
    begins=lambda functions: (RECIPIENT,),
    read=read,
    written=Written(
        "",
        "",
        f"{CHANNEL}{COMMENTARY} {RECIPIENT}{NAME} {CONSTRAIN}json{MESSAGE}{ARGUMENTS}",
        between_blocks=f"{END}{START}{ROLE}",
        other_calls=(
            f" {RECIPIENT}{NAME}{CHANNEL}{COMMENTARY} {CONSTRAIN}json{MESSAGE}{ARGUMENTS}",
            f" {RECIPIENT}{NAME}{CHANNEL}{COMMENTARY} json{MESSAGE}{ARGUMENTS}",
        ),
        told=tuple(f"{CHANNEL}{each}{MESSAGE}" for each in (ANALYSIS, COMMENTARY, FINAL)),
    ),
    between=BREAK,
    recognizes=lambda template: f"{CHANNEL}{COMMENTARY}" in template,
)
