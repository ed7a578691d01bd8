"""What a chat is made of: its messages, and the tools that the model may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import ConfigDict, Field, model_validator

from onnxport.errors import RequestError
from onnxport.serving.http.strict import Strict, expect
from onnxport.serving.reasoning import REASONING_NAMES


class ContentPart(Strict):
    """One part of a message's content; its type is checked when the prompt is rendered."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str
    text: str | None = None
    refusal: str | None = None
    # Anthropic's word on what to keep for later prompts, which changes no answer.
    cache_control: Annotated[dict[str, Any] | None, Field(exclude=True)] = None

    @model_validator(mode="after")
    def _check(self) -> ContentPart:
        if self.type == "text" and self.text is None:
            raise RequestError("a content part of type 'text' has no text", "messages")
        if self.type == "text" and self.model_extra:
            raise RequestError(
                f"a content part of type 'text' has unknown fields {sorted(self.model_extra)}; "
                "remove them",
                "messages",
            )
        return self


class FunctionCall(Strict):
    """The function of an earlier tool call."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A tool call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Strict):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # What some clients say of each message; it says nothing.
    type: Annotated[Literal["text", "message"] | None, Field(exclude=True)] = None
    content: Annotated[
        str | list[ContentPart] | None, expect("a text or a list of content parts")
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by vLLM's newer name
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        thoughts = {each for each in (self.reasoning, self.reasoning_content) if each is not None}
        if len(thoughts) > 1:
            raise RequestError(
                "a message has reasoning and reasoning_content, which mean the same, with other "
                "texts; send one of them",
                "messages",
            )
        may_lack = self.role == "assistant" and (self.tool_calls or thoughts)
        if self.content is None and not may_lack:
            raise RequestError(
                f"a message of role {self.role!r} has no content; only an assistant message with "
                "tool_calls or reasoning_content may be without",
                "messages",
            )
        if self.tool_calls and self.role != "assistant":
            raise RequestError(
                f"a message of role {self.role!r} has tool_calls; only the assistant's may",
                "messages",
            )
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as the chat template takes it, reasoning by both of its names."""
        plain = self.model_dump(exclude_none=True, exclude={"annotations"})
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        return plain if thought is None else plain | dict.fromkeys(REASONING_NAMES, thought)


class FunctionDefinition(Strict):
    """A function: what the model is told of it, and whether its parameters have to be kept."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # forced calls have the form of the parameters whatever it says


class ToolDefinition(Strict):
    """A tool the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class Rendering(Protocol):
    """How a prompt is made of a conversation."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether it ends with the start of an assistant message; None: it does."""
        ...

    @property
    def continue_final_message(self) -> bool | None:
        """Whether it ends in the middle of the last message; None: no."""
        ...

    @property
    def add_special_tokens(self) -> bool | None:
        """Whether tokens are put around it that the template does not write; None: no."""
        ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Further variables of the template."""
        ...

    @property
    def documents(self) -> list[dict[str, Any]] | None:
        """What the answer may draw on."""
        ...


def told(tools: Sequence[ToolDefinition] | None) -> list[dict[str, Any]]:
    """Return what the model is told of tools."""
    return [
        tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools or ()
    ]
