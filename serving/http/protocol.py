"""The request bodies: what is supported, what is accepted as neutral, what is refused.

A field is in exactly one of three places: in the model (it is obeyed), in a table of neutral
values (only values that change nothing are accepted), or nowhere (unknown, refused). Nothing is
dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from onnxport.errors import RequestError
from onnxport.serving.chat import RESERVED
from onnxport.serving.http.defaults import DEFAULTED, SamplingDefaults
from onnxport.serving.http.fields import (
    NEUTRAL,
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    check_json,
    check_neutral,
)
from onnxport.serving.http.forms import FormFields, calls
from onnxport.serving.params import MAX_LOGPROBS, RequestOptions, SamplingParams
from onnxport.serving.structured.spec import StructuredOutputs

TOKEN_NAME = re.compile("0|[1-9][0-9]{0,9}")  # one spelling for each token id
MAX_STOP_STRINGS = 64  # each is looked for in every piece of text
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _expect(what: str) -> WrapValidator:
    """Return a validator that tells `what` was expected, instead of one error a union member."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("union", "should be {what}", {"what": what}) from error

    return WrapValidator(validate)


class _Strict(BaseModel):
    """No unknown fields, and no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """How a stream is told."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class _Request(FormFields):
    """What both endpoints share."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None,
        _expect(f"a text or a list of texts, at most {MAX_STOP_STRINGS}"),
    ] = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        check_json(body)
        check_neutral(body, cls.neutral)
        return {name: value for name, value in body.items() if name not in cls.neutral}

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options were given without stream; set stream to true, or remove them",
                "stream_options",
            )
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> _Request:
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n or 1}: which completions are the best "
                "is known at their end. Set stream to false, or leave best_of out.",
                "best_of",
            )
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> _Request:
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs were given with stream; they come with the whole response only. "
                "Set stream to false, or leave them out.",
                "prompt_logprobs",
            )
        return self

    def options(
        self, tenant: str | None, timeout_s: float | None, adapter: str | None
    ) -> RequestOptions:
        """Return how the request is treated.

        Args:
            tenant: of the API key; None leaves it to the field `user`.
            timeout_s: where the request gives none.
            adapter: what its model names; None: the model itself.

        Raises:
            RequestError: a value is out of its range.
        """
        return RequestOptions(
            priority=self.priority or 0,
            tenant=(self.user or "") if tenant is None else tenant,
            cache_salt=self.cache_salt,
            adapter=adapter,
            timeout_s=timeout_s if self.timeout_s is None else self.timeout_s,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(
        self, defaults: SamplingDefaults, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return the decoding parameters; the defaults where nothing was given.

        Raises:
            RequestError: a value is out of its range.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {
            name: getattr(defaults if getattr(self, name) is None else self, name)
            for name in DEFAULTED
        }
        allowed = self.allowed_token_ids
        return SamplingParams(
            **given,
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            max_tokens=max_tokens,
            logprobs=logprobs,
            n=1 if self.n is None else self.n,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_biases(self.logit_bias or {}),
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=None if allowed is None else tuple(allowed),
            min_tokens=self.min_tokens or 0,
            prompt_logprobs=self.prompt_logprobs,
            best_of=self.best_of,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            structured_outputs=self.form(),
        )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return `logit_bias` by token id; JSON has texts as names of members.

    Raises:
        RequestError: a name is no token id.
    """
    if bad := [name for name in given if not TOKEN_NAME.fullmatch(name)]:
        raise RequestError(
            f"logit_bias has a member {bad[0][:40]!r}; name token ids, such as '42'", "logit_bias"
        )
    return {int(name): bias for name, bias in given.items()}


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_COMPLETION

    prompt: Annotated[
        str | list[str] | list[TokenId] | list[list[TokenId]],
        _expect("a text, a list of texts, a list of token ids, or a list of such lists"),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None  # true unless told otherwise

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None and self.stream:
            raise RequestError(
                "echo was given with logprobs and stream; log probabilities of the prompt come "
                "with the whole response only. Set stream to false, or remove one of the others.",
                "echo",
            )
        return self

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is wanted back, with its log probabilities, and nothing after it."""
        return bool(self.echo) and self.max_tokens == 0 and not self.stream

    def prompts(self) -> list[str | list[int]]:
        """Return one entry a prompt, a text or token ids.

        Raises:
            RequestError: there is no prompt, or an empty one.
        """
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        token_ids = [one for one in given if isinstance(one, int)]
        several = [one for one in given if not isinstance(one, int)]
        prompts: list[str | list[int]] = [token_ids] if token_ids else several
        if not prompts or any(isinstance(one, list) and not one for one in prompts):
            raise RequestError(
                "prompt is empty; send a text, token ids, or a list of either", "prompt"
            )
        return prompts

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the decoding parameters; 16 tokens unless told otherwise."""
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        params = self.sampling(defaults, 1 if self.only_prompt else max_tokens, self.logprobs)
        if self.echo and self.logprobs is not None:
            return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
        return params


class ContentPart(_Strict):
    """One part of a message's content; its type is checked when the prompt is rendered."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str
    text: str | None = None
    refusal: str | None = None

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


class FunctionCall(_Strict):
    """The function of an earlier tool call."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """A tool call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(_Strict):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[ContentPart] | None, _expect("a text or a list of content parts")
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise RequestError(
                f"a message of role {self.role!r} has no content; only an assistant message with "
                "tool_calls may be without",
                "messages",
            )
        if self.tool_calls and self.role != "assistant":
            raise RequestError(
                f"a message of role {self.role!r} has tool_calls; only the assistant's may",
                "messages",
            )
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as the chat template takes it."""
        return self.model_dump(exclude_none=True, exclude={"annotations"})


class FunctionDefinition(_Strict):
    """A function: what the model is told of it, and whether its parameters have to be kept."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # forced calls have the form of the parameters whatever it says


class ToolDefinition(_Strict):
    """A tool the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(_Request):
    """The body of `/v1/chat/completions`."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_CHAT

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None  # true unless told otherwise
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "top_logprobs was given without logprobs; set logprobs to true", "top_logprobs"
            )
        self._check_tool_choice()
        if reserved := RESERVED & (self.chat_template_kwargs or {}).keys():
            raise RequestError(
                f"chat_template_kwargs sets {sorted(reserved)}, which the request itself sets; "
                "remove them",
                "chat_template_kwargs",
            )
        both = None not in (self.max_tokens, self.max_completion_tokens)
        if both and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is "
                f"{self.max_completion_tokens}; they mean the same. Send one.",
                "max_completion_tokens",
            )
        return self

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if self._shapes_calls and super().form() is not None:
            raise RequestError(
                "functions that are strict, parallel_tool_calls false, and a tool_choice that "
                "forces a call give the text a form, and another field asks for another one; send "
                "one of them",
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
            return bool(self.tool_choice != "none")
        strict = any(tool.function.strict for tool in self.tools or ())
        return strict or (bool(self.tools) and self.parallel_tool_calls is False)

    @property
    def named_function(self) -> str | None:
        """The function that `tool_choice` names; None: it names none."""
        match self.tool_choice:
            case {"type": "function", "function": {"name": str(name)}, **more} if not more:
                return name
        return None

    def form(self) -> StructuredOutputs | None:
        """Return the form of the text; that of calls where something is said about them."""
        if not self._shapes_calls:
            return super().form()
        name = self.named_function
        tools = [tool.model_dump() for tool in self.tools or ()]
        if name is not None:
            tools = [tool for tool in tools if tool["function"]["name"] == name]
        several = name is None and self.parallel_tool_calls is not False
        return calls(tools, several=several, forced=self.tool_choice not in (None, "auto"))

    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools the model is told of; none when `tool_choice` is "none"."""
        if self.tool_choice == "none":
            return []
        untold = {"function": {"strict"}}
        return [tool.model_dump(exclude_none=True, exclude=untold) for tool in self.tools or ()]

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the decoding parameters; up to the context length unless told otherwise."""
        given = self.max_completion_tokens
        limit = self.max_tokens if given is None else given
        return self.sampling(defaults, limit, (self.top_logprobs or 0) if self.logprobs else None)
