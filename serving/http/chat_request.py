"""The body of `/v1/chat/completions`; `protocol` says what becomes of each field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate, check_variables
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.effort import effort_variables, is_switched_on
from onnxport.serving.http.chat_messages import (
    ChatMessage,
    FunctionDefinition,
    ToolDefinition,
    told,
)
from onnxport.serving.http.fields import NEUTRAL_CHAT
from onnxport.serving.http.protocol import MOST_DOCUMENTS, MOST_MESSAGES, MOST_TOOLS, RequestBody
from onnxport.serving.http.tool_formats.syntax import ToolSyntax
from onnxport.serving.params import SamplingParams
from onnxport.serving.reasoning import AnyFormat
from onnxport.serving.template_messages import plain_text

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(RequestBody):
    """The body of `/v1/chat/completions`."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_CHAT
    counts: ClassVar[tuple[str, ...]] = ("top_logprobs", "prompt_logprobs")
    is_chat: ClassVar[bool] = True

    messages: list[ChatMessage] = Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None  # true, if the last message is not continued
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MOST_DOCUMENTS)] | None = None
    include_reasoning: bool | None = None  # true unless told otherwise
    return_prompt_text: bool | None = None
    echo: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None  # llama.cpp's, as these
    reasoning_control: bool | None = None  # whether `controls` may close a thought
    thinking_budget_tokens: int | None = None  # `told` makes thinking_token_budget of both
    reasoning_budget_tokens: int | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "top_logprobs was given without logprobs; set logprobs to true", "top_logprobs"
            )
        if self.logprob_token_ids and self.logprobs is False:
            raise RequestError(
                "logprob_token_ids was given, and logprobs is false; set logprobs to true, or "
                "leave it out",
                "logprobs",
            )
        self._check_names()
        self._check_tool_choice()
        self._check_reasoning_format()
        check_variables(self.chat_template_kwargs)
        both = None not in (self.max_tokens, self.max_completion_tokens)
        if both and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is "
                f"{self.max_completion_tokens}; they mean the same. Send one.",
                "max_completion_tokens",
            )
        return self

    def _check_names(self) -> None:
        """Refuse functions that are not told apart: a call says no more than the name."""
        known: dict[str, FunctionDefinition] = {}
        for index, tool in enumerate(self.tools or ()):
            name = tool.function.name
            if known.setdefault(name, tool.function) != tool.function:
                raise RequestError(
                    f"tools has several functions called {name[:80]!r}, which are not the same; "
                    "give each a name of its own",
                    f"tools.{index}.function.name",
                )

    def _check_reasoning_format(self) -> None:
        if self.include_reasoning is False and self.reasoning_format == "none":
            raise RequestError(
                'reasoning_format is "none", which leaves thoughts in the content, and '
                "include_reasoning is false, which leaves them out; send one of them",
                "reasoning_format",
            )

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if self._shapes_calls and not self._is_of_answers and self.form() is not None:
            raise RequestError(
                "functions that are strict, parallel_tool_calls false, and a tool_choice that "
                "forces a call give the text a form, and another field asks for another one; send "
                "one of them, or the form of answers as response_format",
                "tools" if choice in (None, "auto") else "tool_choice",
            )
        if choice in (None, "auto", "none"):
            return
        names = [tool.function.name for tool in self.tools or ()]
        if choice != "required" and self.named_function not in names:
            raise RequestError(
                f'tool_choice is {repr(choice)[:80]}; use "auto", "none", "required", or '
                '{"type": "function", "function": {"name": …}} with the name of one of the tools',
                "tool_choice",
            )
        if not names:
            raise RequestError(
                'tool_choice is "required", and there are no tools; send some', "tool_choice"
            )

    @property
    def _shapes_calls(self) -> bool:
        """Whether the form of the text says how tools are called."""
        if self.tool_choice not in (None, "auto"):
            return self._forces_calls
        strict = any(tool.function.strict for tool in self.tools or ())
        return strict or (bool(self.tools) and self.parallel_tool_calls is False)

    @property
    def _forces_calls(self) -> bool:
        """Whether the text is calls and nothing else."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def _is_of_answers(self) -> bool:
        """Whether the form that is asked for is that of answers alone, and not of calls."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def _shapes_answers(self) -> bool:
        """Whether the text either calls tools or has the form that `response_format` asks for."""
        may_call = bool(self.tools) and self.tool_choice in (None, "auto")
        return may_call and self._is_of_answers

    @property
    def named_function(self) -> str | None:
        """The function that `tool_choice` names; None: it names none."""
        match self.tool_choice:
            case {"type": "function", "function": {"name": str(name)}, **more} if not more:
                return name
        return None

    def _with_calls(self, params: SamplingParams, syntax: ToolSyntax) -> SamplingParams:
        """Return parameters with what finding calls takes, and with their form if they have one."""
        if not self.offered_tools():
            return params
        answer = params.structured_outputs if self._shapes_answers else None
        if not self._shapes_calls and answer is None:
            return replace(params, spelled_token_ids=syntax.spelled)
        name = self.named_function
        form = syntax.form(
            [tool.model_dump() for tool in self.tools or ()],
            several=name is None and self.parallel_tool_calls is not False,
            forced=self._forces_calls,
            alone=answer is not None,
            name=name,
        )
        if answer is not None:
            form = replace(answer, calls=form)
        return replace(params, spelled_token_ids=syntax.spelled, structured_outputs=form)

    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools the model is told of; none when `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else told(self.tools)

    @property
    def tells_reasoning(self) -> bool:
        """Whether the reasoning is wanted: not with no effort, unless thoughts are asked for."""
        asked = is_switched_on(self.chat_template_kwargs or {})
        return self.include_reasoning is not False and (self.reasoning_effort != "none" or asked)

    def with_effort(self, template: ChatTemplate, reasoning: AnyFormat | None) -> ChatRequest:
        """Return the request with `reasoning_effort` as variables of the template.

        Args:
            template: of the model.
            reasoning: how the model writes it, where that is known.

        Raises:
            RequestError: the template knows none of them, or the model not this effort.
        """
        effort = self.reasoning_effort
        if effort is None:
            return self
        efforts = None if reasoning is None else reasoning.efforts
        if efforts is not None and effort not in efforts:
            raise RequestError(
                f"reasoning_effort is {effort!r}, and this model knows {', '.join(efforts)}; send "
                "one of them, or leave it out",
                "reasoning_effort",
            )
        given = self.chat_template_kwargs or {}
        variables = effort_variables(template, reasoning, effort, given)
        return self.model_copy(update={"chat_template_kwargs": variables})

    @property
    def echoed(self) -> str:
        """The text that answers begin with: of the assistant's last message, if `echo` is true."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant":
            return ""
        return plain_text(last.plain().get("content") or "")

    def functions(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of the offered functions, by their names."""
        offered = (tool["function"] for tool in self.offered_tools())
        return {each["name"]: each.get("parameters") or {} for each in offered}

    def sampling_params(self, defaults: SamplingDefaults, syntax: ToolSyntax) -> SamplingParams:
        """Return the decoding parameters; up to the context length unless told otherwise.

        Args:
            defaults: where the request does not say.
            syntax: how the model calls tools.
        """
        given = self.max_completion_tokens
        if self.has_no_limit and given is not None:
            raise RequestError(
                f"n_predict is -1, which sets no limit, and max_completion_tokens is {given}; send "
                "one of them",
                "n_predict",
            )
        limit = self.max_tokens if given is None else given
        asked = self.logprobs or self.logprob_token_ids
        top = (self.top_logprobs or 0) if asked else None
        try:
            return self._with_calls(self.sampling(defaults, limit, top), syntax)
        except RequestError as error:
            if given is None or error.param != "max_tokens":
                raise
            name = "max_completion_tokens"  # is what the client called it
            raise RequestError(str(error).replace("max_tokens", name), name) from error
