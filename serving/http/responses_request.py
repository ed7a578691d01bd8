"""The body of `/v1/responses`, and what it means as a chat.

A response is one turn of a chat: what that can do is said by `chat`, and refused there where it
cannot be done. Nothing is kept between requests, so fields that need that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, PlainValidator, ValidationInfo, model_validator

from onnxport.errors import RequestError
from onnxport.serving.http import responses_tools
from onnxport.serving.http.chat_request import ChatRequest, Effort
from onnxport.serving.http.fields import (
    ANY,
    LABELS,
    OF_ENGINES,
    TIERS,
)
from onnxport.serving.http.generation_fields import GenerationFields, StopStrings, TokenIds
from onnxport.serving.http.protocol import MOST_MESSAGES, MOST_TOOLS
from onnxport.serving.http.renaming import as_chat as chat_of
from onnxport.serving.http.renaming import with_names
from onnxport.serving.http.request_ids import GivenId
from onnxport.serving.http.responses_items import (
    CallItem,
    Given,
    Item,
    MessageItem,
    ReasoningItem,
    ResultItem,
    text_or,
)
from onnxport.serving.http.responses_tools import Tool
from onnxport.serving.template_messages import plain_text

LOGPROBS: Final = "message.output_text.logprobs"
INCLUDED: Final = (LOGPROBS, "reasoning.encrypted_content")  # of the second there is never any

NEUTRAL: Final[Mapping[str, Any]] = {
    **{name: values for name, values in LABELS.items() if name != "metadata"},
    **OF_ENGINES,
    "background": (False,),
    "store": (False,),
    "truncation": ("disabled", "auto"),  # what is too long for the context is refused anyway
    "service_tier": TIERS,
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "client_metadata": ANY,  # of Codex, about itself
    "max_tool_calls": ANY,  # of the server's own tools, of which there are none
    "context_management": (),
    "moderation": (),
    **{"mm_processor_kwargs": ANY, "media_io_kwargs": ANY, "image": ANY},
    "background_options": ANY,
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
    "stream_options": ({}, {"include_obfuscation": False}),
}

# Further fields of a chat that are called the same.
SAME: Final = (
    *("stop", "parallel_tool_calls", "chat_template_kwargs", "user"),
    *("thinking_token_budget", "logprob_token_ids", "include_reasoning"),
)

# What a field of the chat is called here, for errors.
CALLED: Final[Mapping[str, str]] = {
    "messages": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
THOUGHT: Final = {"role", "reasoning_content"}  # what a message has of which no more is known


class TextFormat(Given):
    """The form of the text; whether all of a schema has to be enforced `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    content: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        given = [self.name, self.content, self.description, self.strict]
        whole = None not in given[:2] if self.type == "json_schema" else given == [None] * 4
        if not whole:
            raise RequestError(
                f"text.format has the type {self.type!r}; the type 'json_schema' has a name and a "
                "schema, and the others have nothing",
                "text.format",
            )
        return self

    def plain(self) -> dict[str, Any]:
        """Return it as a chat has it."""
        if self.type != "json_schema":
            return {"type": self.type}
        named = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.type, "json_schema": named}


class TextOptions(Given):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


def _summary(value: Any, info: ValidationInfo) -> None:
    """Refuse a summary that has to be there; "auto" leaves that to the server, which makes none."""
    if value not in (None, "auto"):
        name = f"reasoning.{info.field_name}"
        raise RequestError(
            f"{name} is {repr(value)[:80]}, and there is nothing here that summarizes; send "
            '"auto" or null. The reasoning itself is told, in items of type reasoning',
            name,
        )


Summary = Annotated[None, PlainValidator(_summary)]


class ReasoningOptions(Given):
    """How much is thought. There are no summaries."""

    effort: Effort | None = None
    summary: Summary = None
    generate_summary: Summary = None  # the same by its older name


class ResponsesRequest(GenerationFields):
    """The body of `/v1/responses`."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL

    model: str | None = None  # None: the server's own
    request_id: GivenId | None = None
    input: Annotated[
        str | list[Item],
        text_or(
            Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES)],
            f"a text or a list of items, at most {MOST_MESSAGES}",
        ),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    stop: StopStrings = None
    logprob_token_ids: TokenIds | None = None
    thinking_token_budget: int | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None  # true unless told otherwise
    timings_per_token: bool | None = None  # llama.cpp's
    user: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        if unknown := [one for one in self.include or () if one not in INCLUDED]:
            raise RequestError(
                f"include has {unknown[0][:80]!r}; there is {' and '.join(INCLUDED)}", "include"
            )
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.has_logprobs:
                raise RequestError(
                    f"{name} was given, and include lacks {LOGPROBS!r}; add that", name
                )
        return self

    @property
    def has_logprobs(self) -> bool:
        """Whether log probabilities are told."""
        return LOGPROBS in (self.include or ())

    def chat(self, between: str) -> dict[str, Any]:
        """Return the body of a chat that means the same.

        Args:
            between: see `as_chat`.

        Raises:
            RequestError: what is forced to be called is not named as it should be.
        """
        given = {name: getattr(self, name) for name in SAME}
        asked = self.text.format if self.text else None
        return {
            **self.generation(),
            **{name: value for name, value in given.items() if value is not None},
            "model": self.model,
            "messages": self._messages(between),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": asked.plain() if asked else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "tools": responses_tools.plain(self.tools or ()) or None,
            "tool_choice": responses_tools.choice(self.tool_choice, self.tools or ()),
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
        }

    def _messages(self, between: str) -> list[dict[str, Any]]:
        """Return the conversation.

        What an assistant thinks, and says before, between and behind calls, is one message with
        them. Thoughts in a row are one, each on lines of its own as the parts of one are.

        Args:
            between: see `as_chat`.

        Raises:
            RequestError: there is none.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            last = messages[-1] if messages else {}
            match item:
                case MessageItem():
                    if item.role == "assistant" and last.keys() == THOUGHT:
                        last["content"] = _plain(item.content)
                    elif item.role == "assistant" and "tool_calls" in last:
                        texts = (last.get("content", ""), _plain(item.content))
                        last["content"] = between.join(filter(None, map(plain_text, texts)))
                    else:
                        messages.append({"role": item.role, "content": _plain(item.content)})
                case ReasoningItem() if item.text:
                    if last.keys() == THOUGHT:
                        last["reasoning_content"] += f"\n{item.text}"
                    else:
                        messages.append({"role": "assistant", "reasoning_content": item.text})
                case CallItem():
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                    messages[-1].setdefault("tool_calls", []).append(_call(item))
                case ResultItem():
                    result = {"tool_call_id": item.call_id, "content": _plain(item.output)}
                    messages.append({"role": "tool", **result})
        if not messages:
            raise RequestError("the input has nothing but reasoning without text", "input")
        return messages


def _plain(content: str | list[Any]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.plain() for part in content]


def _call(item: CallItem) -> dict[str, Any]:
    name = responses_tools.in_chat(item.name, item.namespace)
    function = {"name": name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def as_chat(body: ResponsesRequest, between: str) -> ChatRequest:
    """Return the request as a chat.

    Args:
        body: the request.
        between: parts what an assistant says before calls and behind them; see `ToolFormat`.

    Raises:
        RequestError: it cannot be one; names the field as it is called here.
        ApiError: a field that both have is of another type than it should be.
    """
    return chat_of(body.chat(between), renamed)


def renamed(error: RequestError) -> RequestError:
    """Return what a chat refused, with its field called what it is called here."""
    return with_names(error, CALLED)
