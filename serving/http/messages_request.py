"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and what they mean as a chat.

A message is one turn of a chat: what that can do is said by `as_chat`, and refused there where it
cannot be done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from onnxport.errors import RequestError
from onnxport.serving.effort import known_levels, switched
from onnxport.serving.http import renaming
from onnxport.serving.http.body import Body
from onnxport.serving.http.chat_request import ChatRequest, Effort
from onnxport.serving.http.errors import ApiError
from onnxport.serving.http.fields import ANY, OF_ENGINES
from onnxport.serving.http.generation_fields import MAX_STOP_STRINGS, GenerationFields
from onnxport.serving.http.messages_blocks import Message, System, conversation
from onnxport.serving.http.protocol import MOST_MESSAGES, MOST_TOOLS
from onnxport.serving.http.request_ids import GivenId
from onnxport.serving.http.responses_items import Given
from onnxport.serving.http.service import Service

_KEEPS_ALL: Final = {"type": "clear_thinking_20251015", "keep": "all"}  # of Claude Code

NEUTRAL_COUNT: Final[Mapping[str, Any]] = {
    "cache_control": ANY,
    "context_management": ({}, {"edits": []}, {"edits": [_KEEPS_ALL]}),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
NEUTRAL: Final[Mapping[str, Any]] = {
    **NEUTRAL_COUNT,
    **OF_ENGINES,
    "timings_per_token": (False,),
    "container": (),
    "diagnostics": ANY,
    "inference_geo": (),
    "service_tier": ("auto", "standard_only"),
}

# What Claude Code asks of every model. Source: https://platform.claude.com/docs/en/build-with-claude/effort,
# where it is the same as no effort.
USUAL_EFFORT: Final = "high"

# Source: `ThreadUnsupportedRequestError` of Anthropic's clients, which they recover from.
UNTHREADED: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

# What a field of the chat is called here, for errors.
CALLED: Final[Mapping[str, str]] = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "continue_final_message": "messages",
}
_PARAMETERS: Final = re.compile(r"^(tools\.[0-9]+\.)parameters")


class Tool(Given):
    """A tool that the client runs. Examples would have to be told to the model, and cannot be."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] = Field(default=["direct"], max_length=1)
    input_examples: list[Any] = Field(default=[], max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _refuse_servers_own(cls, body: Any) -> Any:
        kind = body.get("type") if isinstance(body, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise RequestError(
                f"a tool of type {kind[:40]!r} was given, and this server has no tools of its own; "
                "send tools with a name and an input_schema, which the client runs",
                "tools",
            )
        return body

    def plain(self) -> dict[str, Any]:
        """Return it as a chat has it."""
        function = {"name": self.name, "parameters": self.input_schema}
        more = {"description": self.description, "strict": self.strict}
        given = {name: each for name, each in more.items() if each is not None}
        return {"type": "function", "function": function | given}


class ToolChoice(Given):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError(
                f"tool_choice has the type {self.type!r} "
                f"{'without a name' if self.name is None else 'with a name'}; the type 'tool' has "
                "the name of a tool, and the others have none",
                "tool_choice",
            )
        return self


class ThinkingConfig(Given):
    """Whether the model thinks, and whether that is told; nothing here summarizes."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            found = "without" if self.budget_tokens is None else "with"
            raise RequestError(
                f"thinking has the type {self.type!r} {found} budget_tokens; the type 'enabled' "
                "has them, and the others have none",
                "thinking.budget_tokens",
            )
        return self


class OutputFormat(Given):
    """The form of the text; all of the schema is enforced."""

    type: Literal["json_schema"]
    content: dict[str, Any] = Field(alias="schema")

    def plain(self) -> dict[str, Any]:
        """Return it as a chat has it."""
        named = {"name": "output", "schema": self.content, "strict": True}
        return {"type": self.type, "json_schema": named}


class OutputConfig(Given):
    """How much is thought, and what form the text has."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(Given):
    """Whose request it is."""

    user_id: str | None = None


class CountRequest(Body):
    """The body of `/v1/messages/count_tokens`: what a prompt is made of."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_COUNT

    model: str | None = None  # None: the server's own
    messages: list[Message] = Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
    system: System | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the same by its older name
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> CountRequest:
        names, choice = [tool.name for tool in self.tools or ()], self.tool_choice
        if choice is not None and choice.type == "any" and not names:
            raise RequestError(
                "tool_choice has the type 'any', and there are no tools; send some", "tool_choice"
            )
        if choice is not None and choice.name is not None and choice.name not in names:
            raise RequestError(
                f"tool_choice names {choice.name[:80]!r}, and there is no such tool; name one of "
                "the tools",
                "tool_choice",
            )
        if self.output_format and self.output_config and self.output_config.format:
            raise RequestError(
                "output_format and output_config.format mean the same; send one of them",
                "output_format",
            )
        return self

    @property
    def is_continued(self) -> bool:
        """Whether the answer goes on with the last message; an empty one says nothing."""
        return self.messages[-1].is_answer and bool(self.messages[-1].blocks)

    def chat(self, service: Service) -> dict[str, Any]:
        """Return the body of a chat that means the same.

        Args:
            service: whose model it is.

        Raises:
            RequestError: the last message cannot be gone on with.
        """
        messages = self.messages if self.is_continued else self._asked()
        plain = conversation(self.system, messages, service.tools.format.between)
        if self.is_continued and (not plain[-1]["content"] or "tool_calls" in plain[-1]):
            raise RequestError(
                "the last message is the assistant's, which the answer goes on with, and it has "
                "no text, or tool_use; end it with text, or send a message of the user behind it",
                "messages",
            )
        config, choice = self.output_config, self.tool_choice
        form = self.output_format or (config and config.format)
        return {
            "model": self.model,
            "messages": plain,
            "continue_final_message": self.is_continued,
            "tools": [tool.plain() for tool in self.tools] if self.tools else None,
            "tool_choice": choice and _choice(choice),
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "response_format": form.plain() if form else None,
            **self._thinking(service, config.effort if config else None),
        }

    def _asked(self) -> list[Message]:
        """Return the messages without empty ones of the assistant at the end."""
        last = len(self.messages)
        while last and self.messages[last - 1].is_answer and not self.messages[last - 1].blocks:
            last -= 1
        if not last:
            raise RequestError("the messages have no text; send one of the user", "messages")
        return self.messages[:last]

    def _thinking(self, service: Service, effort: str | None) -> dict[str, Any]:
        """Return what a chat says of reasoning.

        To a model that does not think `thinking` says nothing, nor does the usual effort where
        nothing is known of efforts. One that cannot do without is not
        told to, and what it thinks is not told.
        """
        template, reasoning, asked = service.template, service.reasoning, self.thinking
        given = self.chat_template_kwargs
        knows_switch, knows_effort = switched(template, True, {}), known_levels(template)
        if effort == USUAL_EFFORT and not (knows_switch or knows_effort):
            effort = None
        plain: dict[str, Any] = {"reasoning_effort": effort, "chat_template_kwargs": given}
        if asked is None or not (reasoning or knows_switch or knows_effort):
            return plain
        is_off = asked.type == "disabled"
        if knows_switch:
            plain["chat_template_kwargs"] = switched(template, not is_off, given or {})
        elif is_off and knows_effort and effort is None:
            efforts = None if reasoning is None else reasoning.efforts
            if efforts is None or "none" in efforts:
                plain["reasoning_effort"] = "none"
        if is_off or asked.display == "omitted":
            plain["include_reasoning"] = False
        return {**plain, "thinking_token_budget": asked.budget_tokens}


class MessagesRequest(CountRequest, GenerationFields):
    """The body of `/v1/messages`."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL

    max_tokens: int
    request_id: GivenId | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    metadata: Metadata | None = None

    @classmethod
    def means(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body, if it has the whole conversation.

        Raises:
            ApiError: it asks for a thread. Anthropic's tool runners go on without one.
        """
        if body.get("thread") is not None:
            raise ApiError(
                400,
                "thread was given, and this server keeps no conversations; send all messages, "
                "without thread",
                "thread",
                more={"details": UNTHREADED},
            )
        return body

    def chat(self, service: Service) -> dict[str, Any]:
        """Return the body of a chat that means the same; see `CountRequest.chat`."""
        return {
            **super().chat(service),
            **self.generation(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "user": self.metadata and self.metadata.user_id,
        }


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def as_chat(body: CountRequest, service: Service) -> ChatRequest:
    """Return the request as a chat.

    Raises:
        RequestError: it cannot be one; names the field as it is called here.
        ApiError: a field that both have is of another type than it should be.
    """
    return renaming.as_chat(body.chat(service), renamed)


def renamed(error: RequestError) -> RequestError:
    """Return what a chat refused, with its field called what it is called here."""
    if error.param == "continue_final_message":
        text = str(error).replace(
            "continue_final_message was given", "the last message is the assistant's, to go on with"
        )
        return RequestError(text, "messages")
    known = renaming.with_names(error, CALLED)
    if known.param is None or not _PARAMETERS.match(known.param):
        return known
    schema = _PARAMETERS.sub(r"\1input_schema", known.param)
    return RequestError(str(known).replace(known.param, schema), schema)
