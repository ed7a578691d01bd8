"""`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`: gpt-oss.

The recipient may stand before the channel, `to=functions.f<|channel|>commentary json`, and the
channel be analysis. `<|call|>` is an end token, so a call ends an answer, unless the model writes
`<|end|>` in its place and another message. Source: OpenAI's description of the harmony format.
"""

from __future__ import annotations

import re
from typing import Final

from onnxport.serving.channels import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    ENDS,
    FINAL,
    HEADER_END,
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
    ParsedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import AwaitedTag, Incomplete, json_value
from onnxport.serving.http.tool_formats.json_calls import call

RECIPIENT: Final = "to=functions."
_BEHIND: Final = re.compile("|".join(map(re.escape, (START, CHANNEL, *ENDS))))  # a body
_STEP: Final = "<|"  # that all marks begin with


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`.

    A header is never told, also where it leads to no call, or is cut.
    """
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
    behind = _BEHIND.search(text, header.end())
    if behind is None and not final:
        raise Incomplete(AwaitedTag(_STEP, text[header.end() :]))
    end = len(text) if behind is None else behind.start()
    found = _call(name, text[header.end() : end], functions)
    if found is None:
        return Block(header.end(), is_told=False)
    if behind is not None and behind[0] in ENDS:
        end = behind.end()
    return Block(end, (found,))


def _call(name: str, body: str, functions: Functions) -> ParsedCall | None:
    """Return a call with the arguments of a body; a function that needs none may get nothing."""
    if not body.strip():
        return None if functions[name].get("required") else call(name, {}, functions)
    return call(name, json_value(body), functions)


HARMONY = ToolFormat(
    "openai",
    markers=(START, CHANNEL),
    begins=lambda functions: (RECIPIENT,),
    further=(MESSAGE, CONSTRAIN, *ENDS),
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
    recognizes=lambda template: f"{CHANNEL}{COMMENTARY}" in template,
)
