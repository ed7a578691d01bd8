"""The blocks that messages of `/v1/messages` are made of, and what they are in a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from onnxport.errors import RequestError
from onnxport.serving.channels import BREAK
from onnxport.serving.http.responses_items import Given, by_type, text_or

CALL_ID: Final = "toolu_"  # that ids of calls begin with; behind it is what the template takes
# What Claude Code begins a system prompt with: no text of it, and another one with each request,
# so that no prompt would begin as one before.
BILLING: Final = "x-anthropic-billing-header:"


class TextBlock(Given):
    """A text. What is said of it changes no answer; citations of other texts there are none."""

    type: Literal["text"] = "text"
    text: str
    citations: list[Any] = Field(default=[], max_length=0)
    cache_control: dict[str, Any] | None = None


def _texts(what: str) -> Any:
    """Return the type of a text or a list of blocks that are texts."""
    advice = 'models here read text alone. Send blocks of type "text"'
    block = Annotated[TextBlock, by_type({"text": TextBlock}, f"a block of {what}", advice, what)]
    return Annotated[str | list[block], text_or(list[block], "a text or a list of blocks")]


System = _texts("system")


class ToolUseBlock(Given):
    """A tool that an earlier answer called."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as a chat has it."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": _id(self.id), "type": "function", "function": function}


class ToolResultBlock(Given):
    """What a called tool gave. A chat has no field for errors, so the text says it is one."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: _texts("messages") = ""  # type: ignore[valid-type]
    is_error: bool = False
    cache_control: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message that it is in a chat."""
        texts = [self.content] if isinstance(self.content, str) else _text_of(self.content)
        if self.is_error:
            texts = [f"Error: {texts[0] if texts else ''}".rstrip(), *texts[1:]]
        return {"role": "tool", "tool_call_id": _id(self.tool_use_id), "content": _content(texts)}


class ThinkingBlock(Given):
    """The reasoning of an earlier answer, which is given to the model; nothing is signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Given):
    """Reasoning that another server has encrypted: only that one can read it."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    by_type(
        {
            "text": TextBlock,
            "tool_use": ToolUseBlock,
            "tool_result": ToolResultBlock,
            "thinking": ThinkingBlock,
            "redacted_thinking": RedactedThinkingBlock,
        },
        "a block",
        "models here read text alone, and this server has no tools of its own. Send blocks of the "
        "types text, tool_use, tool_result and thinking",
        "messages",
    ),
]
OF_ROLE: Final = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (TextBlock,),
}


class Message(Given):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], text_or(list[Block], "a text or a list of blocks")]

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.role != "assistant" and not self.content and not isinstance(self.content, str):
            raise RequestError(
                f"a message of role {self.role!r} has no blocks; send one of type text", "messages"
            )
        for block in self.blocks:
            if not isinstance(block, OF_ROLE[self.role]):
                raise RequestError(
                    f"a message of role {self.role!r} has a block of type {block.type!r}; tool_use "
                    "and thinking are of the assistant, and tool_result of the user",
                    "messages",
                )
        return self

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(text=self.content)] if self.content or not self.is_answer else []
        return list(self.content)

    @property
    def is_answer(self) -> bool:
        """Whether it is the assistant's."""
        return self.role == "assistant"


def conversation(
    system: str | list[TextBlock] | None, messages: Sequence[Message], between: str
) -> list[dict[str, Any]]:
    """Return the messages of a chat; those of one role in a row are one.

    Args:
        system: what the model is told before all.
        messages: that follow.
        between: parts what an assistant says before calls and behind them; see `ToolFormat`.
    """
    plain: list[dict[str, Any]] = []
    if isinstance(system, list):
        told = [text for text in _text_of(system) if not text.startswith(BILLING)]
    else:
        told = [system] if system else []
    if told:
        plain.append({"role": "system", "content": _content(told)})
    for role, group in groupby(messages, lambda message: message.role):
        blocks = [block for message in group for block in message.blocks]
        plain += [_answer(blocks, between)] if role == "assistant" else _said(role, blocks)
    return plain


def _said(role: str, blocks: Sequence[Any]) -> Iterable[dict[str, Any]]:
    """Yield messages of texts, and one of each result between them."""
    for is_text, group in groupby(blocks, lambda block: isinstance(block, TextBlock)):
        if is_text:
            yield {"role": role, "content": _content(_text_of(group))}
        else:
            yield from (result.plain() for result in group)


def _answer(blocks: Sequence[Any], between: str) -> dict[str, Any]:
    """Return the message of an assistant, as a chat would have told it."""
    text, thoughts, calls = "", [], []
    joint = ""  # of the text so far and the next one
    for block in blocks:
        match block:
            case TextBlock():
                text += (joint if text else "") + block.text
                joint = "\n"  # as that of the parts of any other message
            case ThinkingBlock() if block.thinking:
                thoughts.append(block.thinking)
                joint = BREAK
            case ToolUseBlock():
                calls.append(block.plain())
                joint = between
    return {
        "role": "assistant",
        "content": text,
        **({"reasoning_content": BREAK.join(thoughts)} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _text_of(blocks: Iterable[TextBlock]) -> list[str]:
    return [block.text for block in blocks]


def _content(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] or ""


def _id(given: str) -> str:
    """Return the id of a call as templates take it: some ask for so many characters."""
    return given.removeprefix(CALL_ID) or given
