"""The body of `/v1/completions`; `protocol` says what becomes of each field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import model_validator

from onnxport.errors import RequestError
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.fields import NEUTRAL_COMPLETION
from onnxport.serving.http.prompts import Prompts, each_of
from onnxport.serving.http.protocol import RequestBody
from onnxport.serving.params import SamplingParams


class CompletionRequest(RequestBody):
    """The body of `/v1/completions`."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_COMPLETION
    counts: ClassVar[tuple[str, ...]] = ("logprobs", "prompt_logprobs")

    prompt: Prompts
    suffix: str | None = None  # what stands behind the answer; an empty one is none
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None  # true unless told otherwise

    @model_validator(mode="after")
    def _check_budget(self) -> CompletionRequest:
        if self.thinking_token_budget not in (None, -1):
            raise RequestError(
                f"thinking_token_budget is {self.thinking_token_budget}, and completions know of "
                "no reasoning: their prompts are any text. Leave it out, or send messages to "
                "/v1/chat/completions.",
                "thinking_token_budget",
            )
        return self

    @model_validator(mode="after")
    def _check_suffix(self) -> CompletionRequest:
        if not self.suffix:
            return self
        if not all(isinstance(one, str) for one in self.prompts()):
            raise RequestError(
                "suffix was given with a prompt of token ids; the model reads both in an order of "
                "its own. Send a text, or leave suffix out.",
                "suffix",
            )
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} was given with suffix; the prompt that the model reads is made of "
                    "both. Leave one of them out.",
                    name,
                )
        return self

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.only_prompt and self.logprob_token_ids:
            raise RequestError(
                "logprob_token_ids was given with max_tokens 0; it is about the tokens that are "
                "generated. Set max_tokens to 1 or more, or leave it out.",
                "logprob_token_ids",
            )
        if self.echo and self.told_logprobs is not None and self.stream:
            raise RequestError(
                "echo was given with logprobs and stream; log probabilities of the prompt come "
                "with the whole response only. Set stream to false, or remove one of the others.",
                "echo",
            )
        if self.echo and self.max_tokens == 0 and self.stream:
            raise RequestError(
                "echo was given with max_tokens 0 and stream; a prompt alone comes as a whole. Set "
                "stream to false, or max_tokens to 1 or more.",
                "stream",
            )
        return self

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is wanted back, with its log probabilities, and nothing after it."""
        return bool(self.echo) and self.max_tokens == 0 and not self.stream

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told; None: no log probabilities are."""
        return 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return one entry a prompt, a text or token ids.

        Raises:
            RequestError: there is no prompt, or an empty one.
        """
        return each_of(self.prompt, "prompt")

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the decoding parameters; 16 tokens unless told otherwise."""
        max_tokens = self.max_tokens
        if max_tokens is None and not self.has_no_limit:
            max_tokens = 16
        told = self.told_logprobs
        params = self.sampling(defaults, 1 if self.only_prompt else max_tokens, told)
        if self.echo and told is not None:
            return replace(params, prompt_logprobs=max(told, self.prompt_logprobs or 0))
        return params
