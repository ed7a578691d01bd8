"""What request bodies share: what is supported, what is accepted as neutral, what is refused.

A field is in exactly one of three places: in the model (it is obeyed), in a table of neutral
values (only values that change nothing are accepted), or nowhere (unknown, refused unless it is
null). Nothing is dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from onnxport.errors import RequestError
from onnxport.serving.defaults import DEFAULTED, SamplingDefaults
from onnxport.serving.http.fields import NEUTRAL
from onnxport.serving.http.generation_fields import StopStrings, TokenIds
from onnxport.serving.http.llama_cpp import SAMPLED, LlamaCppFields, told, with_samplers
from onnxport.serving.http.request_ids import GivenId
from onnxport.serving.http.strict import Strict
from onnxport.serving.logprob_limits import counted
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.repetition import RepetitionDetection

TOKEN_NAME = re.compile("0|[1-9][0-9]{0,9}")  # one spelling for each token id
MOST_TRUNCATED = 1 << 20  # tokens of a prompt of which only the end counts
MOST_MESSAGES = 1 << 16  # each takes tokens of the context
MOST_TOOLS = 1 << 12
MOST_DOCUMENTS = 1 << 12


class StreamOptions(Strict):
    """How a stream is told."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: every chunk tells the usage so far
    include_obfuscation: Literal[False] | None = None

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise RequestError(
                "stream_options have continuous_usage_stats without include_usage; set "
                "include_usage to true, or leave it out",
                "stream_options.continuous_usage_stats",
            )
        return self


class RequestBody(LlamaCppFields):
    """What `/v1/completions` and `/v1/chat/completions` share."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL
    counts: ClassVar[tuple[str, ...]] = ("prompt_logprobs",)  # of log probabilities
    is_chat: ClassVar[bool] = False

    model: str | None = None  # None: the server's own
    request_id: GivenId | None = None
    stop: StopStrings = None
    thinking_token_budget: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: TokenIds | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None  # "left", unless told otherwise
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def means(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body in which llama.cpp's fields say what they mean by other names."""
        return told(body, is_chat=cls.is_chat)

    @model_validator(mode="after")
    def _check_stream_options(self) -> RequestBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options were given without stream; set stream to true, or remove them",
                "stream_options",
            )
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> RequestBody:
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n or 1}: which completions are the best "
                "is known at their end. Set stream to false, or leave best_of out.",
                "best_of",
            )
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> RequestBody:
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs were given with stream; they come with the whole response only. "
                "Set stream to false, or leave them out.",
                "prompt_logprobs",
            )
        return self

    def with_counts(self, max_logprobs: int | None, vocab_size: int) -> Self:
        """Return the request with numbers of log probabilities that are those of tokens, not -1.

        Args:
            max_logprobs: the engine's limit; None: there is none.
            vocab_size: of the model.

        Raises:
            RequestError: a number is above the limit; names the field.
        """
        given = {name: getattr(self, name) for name in self.counts}
        if self.n_probs:  # what it was called
            counted("n_probs", self.n_probs, max_logprobs, vocab_size)
        counts = {
            name: counted(name, count, max_logprobs, vocab_size)
            for name, count in given.items()
            if count is not None
        }
        return self.model_copy(update=counts)

    @property
    def most_prompt_tokens(self) -> int | None:
        """Longer prompts than so many tokens are not worth encoding; None: than the context."""
        return None if self.truncate_prompt_tokens is None else MOST_TRUNCATED

    def truncated(self, prompt: list[int], max_model_len: int, max_tokens: int | None) -> list[int]:
        """Return the end of a prompt, or its beginning, as `truncate_prompt_tokens` says.

        Args:
            prompt: token ids.
            max_model_len: of the model.
            max_tokens: that are generated; -1 leaves room for these, None for one.
        """
        most = self.truncate_prompt_tokens
        if most == 0:
            raise RequestError(
                "truncate_prompt_tokens is 0; use 1 or more, or -1 for as many as have room",
                "truncate_prompt_tokens",
            )
        if most == -1:
            most = max(1, max_model_len - (1 if max_tokens is None else max_tokens))
        if most is None:
            return prompt
        return prompt[:most] if self.truncation_side == "right" else prompt[-most:]

    def with_usage(self) -> Self:
        """Return the request with a usage in all chunks, and at the end, if it is a stream."""
        if not self.stream:
            return self
        told = StreamOptions(include_usage=True, continuous_usage_stats=True)
        return self.model_copy(update={"stream_options": told})

    def options(
        self,
        tenant: str | None,
        timeout_s: float | None,
        adapter: str | None,
        scales: Mapping[str, float] | None = None,
    ) -> RequestOptions:
        """Return how the request is treated.

        Args:
            tenant: of the API key; None leaves it to the field `user`.
            timeout_s: where the request gives none.
            adapter: what its model names; None: the model itself.
            scales: of adapters, by name, what `lora` says; None: nothing.

        Raises:
            RequestError: a value is out of its range.
        """
        return RequestOptions(
            priority=self.priority or 0,
            tenant=(self.user or "") if tenant is None else tenant,
            cache_salt=self.cache_salt,
            adapter=adapter,
            adapter_scales=scales,
            timeout_s=timeout_s if self.timeout_s is None else self.timeout_s,
            tells_progress=self.tells_progress,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream tells the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(
        self, defaults: SamplingDefaults, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return the decoding parameters; the defaults where nothing was given.

        Raises:
            RequestError: a value is out of its range, or samplers are asked for in another order.
        """
        try:
            params = self._sampling(defaults, max_tokens, logprobs)
        except RequestError as error:
            called = self.called(error)
            if called is error:
                raise
            raise called from error
        return params if self.samplers is None else with_samplers(self.samplers, params)

    def _sampling(
        self, defaults: SamplingDefaults, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if self.use_beam_search:  # nothing is drawn, whatever the model's authors draw from
            defaults = defaults.for_beams()
        given = {
            name: getattr(defaults if getattr(self, name) is None else self, name)
            for name in DEFAULTED
        }
        given |= {name: getattr(self, name) for name in SAMPLED if getattr(self, name) is not None}
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
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            best_of=self.best_of,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            structured_outputs=self.form(),
            thinking_token_budget=self.thinking_token_budget,
            repetition_detection=self._detection(defaults),
            skip_reading_prefix_cache=bool(self.skip_reading_prefix_cache),
            use_beam_search=bool(self.use_beam_search),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
        )

    def _detection(self, defaults: SamplingDefaults) -> RepetitionDetection | None:
        """Return when an answer is stuck: as was given, be it that nothing is looked for."""
        given = self.repetition_detection
        if given is None:
            return defaults.repetition_detection
        return RepetitionDetection.from_mapping(given)


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
