"""Messages and tools as a chat template takes them, by what its text speaks of."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from onnxport.errors import RequestError
from onnxport.serving.called_messages import lacks_calls, with_calls
from onnxport.serving.channel_messages import for_channels, with_description
from onnxport.serving.channels import ChannelFormat
from onnxport.serving.text import with_halves_escaped

Message = Mapping[str, Any]  # OpenAI's shape: role, content, and what the role adds
Tool = Mapping[str, Any]  # OpenAI's shape: {"type": "function", "function": {…}}

# What templates call the reasoning of earlier messages. The first one with a text counts.
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_ASKS_FOR_NONE: Final = re.compile(
    r"""(?<!\w)content['"]?\]?\s+is\s+(?:not\s+)?none""", re.IGNORECASE
)
_PARTS_OF_CONTENT: Final = re.compile(
    r"""\bfor\s+\w+\s+in\s+\w+(?:\.content\b|\[['"]content['"]\])"""
)
_ASKS_FOR_TEXT: Final = re.compile(r"\bis\s+(?:not\s+)?string\b")
_DEVELOPER: Final = re.compile(r"""['"]developer['"]""")  # and not a token of such a name
_THOUGHT_PARTS: Final = re.compile(r"""type(?:['"]\])?\s*==\s*['"]thinking['"]""")
_REASONING_NAME: Final = re.compile(r"\breasoning_content\b")


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a template speaks of, and what it is given where it fails without.

    Attributes:
        developer: has messages of that role.
        no_content: asks whether the content is none, as that of tool calls is in OpenAI's API.
        parts_alone: goes through the parts of a content, and does not ask whether it is a text.
        channels: has each message in a channel.
        calls_in_text: gets calls of earlier messages in their text.
        thought_parts: takes the reasoning of earlier messages as a part of their content.
        keeps_parts: gets a user's texts as they are, if there are several.
        text_arguments: takes arguments of calls as JSON text, which most do not.
        lists_tools: goes through the tools, without asking whether there are any.
    """

    developer: bool
    no_content: bool
    parts_alone: bool
    channels: bool
    calls_in_text: bool
    thought_parts: bool
    keeps_parts: bool = False
    text_arguments: bool = False
    lists_tools: bool = False

    @classmethod
    def of(cls, source: str) -> Knowledge:
        """Return what the text of a template speaks of."""
        parts = _PARTS_OF_CONTENT.search(source) is not None
        has_thought_parts = _THOUGHT_PARTS.search(source) is not None
        return cls(
            _DEVELOPER.search(source) is not None,
            _ASKS_FOR_NONE.search(source) is not None,
            parts and not _ASKS_FOR_TEXT.search(source),
            ChannelFormat().is_in(source),
            lacks_calls(source),
            has_thought_parts and not _REASONING_NAME.search(source),
        )

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as the template takes them.

        Raises:
            RequestError: it has no place for one, or a part of a content is not text.
        """
        plain = [_plain_message(message, self) for message in messages]
        return for_channels(plain) if self.channels else plain

    def tools(self, tools: Sequence[Tool] | None) -> list[Tool] | None:
        """Return tools as the template takes them; None, or nothing, where there are none."""
        if not tools:
            return [] if self.lists_tools else None
        return [with_description(tool) for tool in tools] if self.channels else list(tools)


def named_variables(names: Collection[str], tools: Sequence[Tool] | None) -> dict[str, Any]:
    """Return what templates that do not speak of `tools` have in place of it.

    They are `functions`, as JSON text, and `datetime`. Source: the card of firefunction-v2.

    Args:
        names: of the variables that the template reads.
        tools: that were offered.
    """
    if "functions" not in names or "tools" in names:
        return {}
    functions = json.dumps([tool["function"] for tool in tools or ()], indent=4, ensure_ascii=False)
    told = {
        "functions": with_halves_escaped(functions),
        "datetime": datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
    }
    return {name: text for name, text in told.items() if name in names}


def _plain_message(message: Message, knows: Knowledge) -> dict[str, Any]:
    """Return a message as templates expect it: no nulls, text content, arguments as objects.

    Tool calls without text have no content where the template asks for that, and an empty one else.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    if not plain.get("tool_calls"):  # a list without calls says nothing
        plain.pop("tool_calls", None)
    text = plain_text(plain.get("content", ""))
    no_content = knows.no_content and not text and bool(plain.get("tool_calls"))
    plain["content"] = None if no_content else text
    if knows.keeps_parts and (texts := texts_of_user(message)):
        plain["content"] = [_part(text) for text in texts]
    elif knows.parts_alone and plain["content"]:
        plain["content"] = [_part(plain["content"])]
    if plain.get("role") == "developer" and not knows.developer:
        plain["role"] = "system"
    if not knows.channels:
        plain = _with_reasoning(plain, knows)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
        if knows.calls_in_text:
            return with_calls(plain)
        if knows.text_arguments:
            plain["tool_calls"] = [_with_text(call) for call in plain["tool_calls"]]
    return plain


def _with_reasoning(plain: dict[str, Any], knows: Knowledge) -> dict[str, Any]:
    """Return a message with its reasoning by each name that templates have for it."""
    thought = next((plain[name] for name in REASONING if name in plain), None)
    if thought is None:
        return plain
    named = plain | dict.fromkeys(REASONING, thought)
    if knows.thought_parts and thought:
        content = plain["content"] or []
        texts = [_part(content)] if isinstance(content, str) else content
        named["content"] = [{"type": "thinking", "thinking": thought}, *texts]
    return named


def texts_of_user(message: Message) -> list[str]:
    """Return the texts of a user's message that has several parts; none of any other message."""
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, list) or len(content) < 2:
        return []
    return [plain_text([part]) for part in content]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _plain_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object instead of OpenAI's JSON text."""
    function = dict(call["function"])
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise RequestError(
                f"the arguments of the earlier tool call {function.get('name')!r} are not JSON: "
                f"{error}. Send back the arguments of the call as they were given.",
                "messages",
            ) from error
    return {**call, "function": function}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain tool call with its arguments as JSON text."""
    function = dict(call["function"])
    text = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": with_halves_escaped(text)}}


def plain_text(content: Any) -> str:
    """Return the text of a message content: a string, or OpenAI's list of text parts.

    Raises:
        RequestError: a part is not text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise RequestError(
                f"a content part of type {kind!r} was given; this model reads text alone. Send "
                'parts of type "text".',
                "messages",
            )
        texts.append(part.get(kind) or "")
    return "\n".join(texts)
