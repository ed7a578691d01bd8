"""What `/completion` and `/infill` share of their bodies, by llama.cpp's names.

Source of these: https://github.com/ggml-org/llama.cpp/tree/master/tools/server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, PlainValidator, model_validator

from onnxport.errors import RequestError
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.completion_request import CompletionRequest
from onnxport.serving.http.fields import ANY, NEUTRAL
from onnxport.serving.http.generation_fields import StopStrings
from onnxport.serving.http.line_limits import LineLimits
from onnxport.serving.http.llama_cpp import LlamaCppFields
from onnxport.serving.http.llama_prompts import biases, by_id
from onnxport.serving.http.service import Tokenizer
from onnxport.serving.params import SamplingParams

MOST_FIELDS: Final = 64  # of an answer, that a request names
OBEYED: Final = (
    "return_tokens",
    "t_max_predict_ms",
    "post_sampling_probs",
)  # elsewhere values that change nothing alone
OWN: Final = (  # which no completion knows
    *("return_tokens", "response_fields", "n_cmpl", "n_indent", "t_max_predict_ms", "logit_bias"),
    "post_sampling_probs",
)
NEUTRAL_LLAMA: Final[Mapping[str, Any]] = {
    **{name: values for name, values in NEUTRAL.items() if name not in OBEYED},
    "penalize_nl": ANY,
    "n_keep": ANY,  # of contexts that are shifted; these are as long as they are
    "n_discard": ANY,
    "n_cache_reuse": ANY,  # of speed alone
    "t_max_prompt_ms": ANY,  # llama.cpp does not look at it either
    "tfs_z": (1,),
    "image_data": ([],),
}
UNUSED = [0]  # a prompt, where one is needed and does not matter


class LlamaBody(LlamaCppFields):
    """What both share."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_LLAMA

    model: str | None = None
    max_tokens: int | None = None  # n_predict, of which llama.cpp has both
    n: int | None = None
    n_cmpl: int | None = None  # n
    stop: StopStrings = None
    logit_bias: Annotated[Any, PlainValidator(biases)] = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=MOST_FIELDS)] | None = None
    n_indent: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, lt=2**53)] | None = None
    post_sampling_probs: bool | None = None

    @model_validator(mode="after")
    def _check_number(self) -> LlamaBody:
        if None not in (self.n, self.n_cmpl) and self.n != self.n_cmpl:
            raise RequestError(
                f"n_cmpl is {self.n_cmpl} and n is {self.n}, two names of one field; send one of "
                "them",
                "n_cmpl",
            )
        return self

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is read, to be cached, and nothing is generated."""
        return self.n_predict == 0 and self.max_tokens in (None, 0)

    @property
    def line_limits(self) -> LineLimits | None:
        """Which lines end the answer; None: any may come."""
        milliseconds = self.t_max_predict_ms or 0
        predict_s = milliseconds / 1e3 if milliseconds > 0 else None
        limits = LineLimits(self.n_indent or 0, predict_s)
        return None if limits == LineLimits() else limits

    def completion(self) -> CompletionRequest:
        """Return the body of `/v1/completions` that means the same, but for its prompt and biases.

        Raises:
            RequestError: llama.cpp's fields mean nothing, or contradict others.
        """
        told = {name: getattr(self, name) for name in LlamaBody.model_fields if name not in OWN}
        told["n"] = self.n if self.n_cmpl is None else self.n_cmpl
        if self.only_prompt:
            told["n_predict"], told["max_tokens"] = None, 1
        elif self.n_predict is None and self.max_tokens is None:
            told["n_predict"] = -1
        given = {name: value for name, value in told.items() if value is not None}
        return CompletionRequest.model_validate({**given, "prompt": UNUSED})

    async def sampling_params(
        self, asked: CompletionRequest, defaults: SamplingDefaults, tokenizer: Tokenizer
    ) -> SamplingParams:
        """Return the decoding parameters of what `completion` has returned.

        Raises:
            RequestError: one is out of its range, or a text cannot be encoded.
        """
        params = asked.sampling_params(defaults)
        if self.logit_bias is not None:
            given = await asyncio.to_thread(by_id, self.logit_bias, tokenizer)
            params = replace(params, logit_bias=given)
        return without(tokenizer.eos_token_ids, params) if self.ignore_eos else params


def without(token_ids: Collection[int], params: SamplingParams) -> SamplingParams:
    """Return parameters with which these tokens never come, as llama.cpp has it of end tokens."""
    never = dict.fromkeys(sorted(token_ids), -math.inf)
    return replace(params, logit_bias={**dict(params.logit_bias), **never})
