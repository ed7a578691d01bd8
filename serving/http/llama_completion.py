"""`POST /completion`: one completion, asked for and told as llama.cpp's server does.

It means what the same does in `/v1/completions`, apart from names. Source of these:
https://github.com/ggml-org/llama.cpp/tree/master/tools/server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from onnxport.errors import RequestError
from onnxport.serving.http import sse
from onnxport.serving.http.completion_request import CompletionRequest
from onnxport.serving.http.fields import ANY, NEUTRAL, are_ids, check_json, check_neutral
from onnxport.serving.http.generation import (
    Job,
    Usage,
    collect,
    generate,
    token_logprobs,
    unless_disconnected,
)
from onnxport.serving.http.generation_fields import MOST_BIASES, StopStrings
from onnxport.serving.http.intervals import spaced
from onnxport.serving.http.llama_cpp import LlamaCppFields
from onnxport.serving.http.llama_settings import choose, generation_settings
from onnxport.serving.http.logprobs import completion_probabilities
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.request_ids import take_id, unique
from onnxport.serving.http.service import Service
from onnxport.serving.outputs import TokenLogprobs

PATHS: Final = ("/completion", "/completions")  # llama.cpp has both
MOST_FIELDS: Final = 64  # of an answer, that a request names
NEUTRAL_LLAMA: Final[Mapping[str, Any]] = {
    **{name: values for name, values in NEUTRAL.items() if name != "return_tokens"},
    "penalize_nl": ANY,
    "n_keep": ANY,  # of contexts that are shifted; these are as long as they are
    "n_discard": ANY,
    "n_indent": (0,),
    "tfs_z": (1,),
    "image_data": ([],),
}


def _prompt(value: Any) -> Any:
    if isinstance(value, str) or are_ids(value):
        return value
    what = "a text, or a list of token ids; several prompts are for /v1/completions"
    raise PydanticCustomError("union", "should be {what}", {"what": what})


def _by_id(biases: list[Any]) -> dict[str, Any]:
    """Return llama.cpp's list of biases as OpenAI's API has them.

    Raises:
        RequestError: it is no list of tokens with numbers, each token once, or too long a one.
    """
    if len(biases) > MOST_BIASES:
        raise RequestError(
            f"logit_bias has {len(biases)} tokens; it may have {MOST_BIASES}", "logit_bias"
        )
    found: dict[str, Any] = {}
    for one in biases:
        match one:
            case [int(token_id), int() | float() as bias] if not isinstance(bias, bool):
                if str(token_id) not in found:
                    found[str(token_id)] = bias
                    continue
        raise RequestError(
            f"logit_bias has {repr(one)[:80]}; give each token once, by its id, with the number "
            "that is added to its logit, as in [[42, -100]]",
            "logit_bias",
        )
    return found


class LlamaRequest(LlamaCppFields):
    """The body of `/completion`."""

    model: str | None = None
    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    max_tokens: int | None = None  # n_predict, of which llama.cpp has both
    stop: StopStrings = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=MOST_FIELDS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        check_json(body)
        check_neutral(body, NEUTRAL_LLAMA)
        kept = {name: value for name, value in body.items() if name not in NEUTRAL_LLAMA}
        if isinstance(biases := kept.get("logit_bias"), list):
            kept["logit_bias"] = _by_id(biases)
        return kept

    def completion(self) -> CompletionRequest:
        """Return the body of `/v1/completions` that means the same.

        Raises:
            RequestError: llama.cpp's fields mean nothing, or contradict others.
        """
        told = {name: getattr(self, name) for name in LlamaRequest.model_fields}
        del told["return_tokens"], told["response_fields"]
        if self.n_predict is None and self.max_tokens is None:
            told["n_predict"] = -1
        given = {name: value for name, value in told.items() if value is not None}
        return CompletionRequest.model_validate(given)


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoint, by both of its names."""

    async def complete(request: Request, body: LlamaRequest) -> Response:
        return await respond(service, request, body)

    for path in PATHS:
        app.post(path, response_model=None)(complete)


async def respond(service: Service, request: Request, body: LlamaRequest) -> Response:
    """Answer one request, as a whole or as a stream."""
    name = f"cmpl-{take_id(request, None)}"
    adapter = service.adapter_of(body.model)
    engine = service.engine
    asked = body.completion()
    asked = asked.with_counts(engine.max_logprobs, engine.capabilities.vocab_size)
    params = asked.sampling_params(service.defaults)
    options = asked.options(key_tenant(request), service.request_timeout_s, adapter)
    prompt = await asyncio.to_thread(_encoded, service, body.prompt)
    interval = body.stream_interval or service.stream_interval
    told = Told(service, Job([prompt], params, options, unique(name), interval), body)
    if body.stream:
        return await sse.respond(request, _chunks(told), service.ping_interval_s, end=b"")

    async def whole() -> dict[str, Any]:
        async with aclosing(generate(engine, told.job)) as deltas:
            [result] = await collect(deltas, told.usage)
        piece = told.piece(result.text, result.token_ids, result.logprobs)
        return told.whole(piece, result.text, result.finish_reason, result.stop_reason)

    return JSONResponse(await unless_disconnected(request, whole()))


def _encoded(service: Service, prompt: str | list[int]) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        RequestError: it is empty.
    """
    tokenizer = service.tokenizer
    if isinstance(prompt, str):
        tokenizer.check_length(prompt, service.engine.capabilities.max_model_len)
        prompt = tokenizer.encode(prompt)
    if not prompt:
        raise RequestError("prompt is empty; send a text, or token ids", "prompt")
    return prompt


class Told:
    """What an answer tells."""

    def __init__(self, service: Service, job: Job, body: LlamaRequest) -> None:
        self.service, self.job, self.usage = service, job, Usage(job)
        self._body = body

    def piece(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[tuple[int, TokenLogprobs]]
    ) -> dict[str, Any]:
        """Return what every event has."""
        more: dict[str, Any] = {}
        if logprobs:
            more["completion_probabilities"] = completion_probabilities(
                self.service.tokenizer, logprobs, self.job.params.logprobs or 0
            )
        if self._body.timings_per_token:
            more["timings"] = self.usage.timings()
        return {
            "index": 0,
            "content": text,
            "tokens": list(token_ids) if self._body.return_tokens else [],
            "stop": False,
            "tokens_predicted": self.usage.completion_tokens,
            "tokens_evaluated": self.usage.prompt_tokens,
            **more,
        }

    def whole(
        self, piece: Mapping[str, Any], text: str, reason: str | None, stop: int | str | None
    ) -> dict[str, Any]:
        """Return what is told at the end, or what the request wants of it.

        Args:
            piece: the last one, or all there is.
            text: all of it.
            reason: why it ended, as `finish_reason`.
            stop: by what, as `stop_reason`.
        """
        word = stop if isinstance(stop, str) and reason == "stop" else ""
        kind = "word" if word else "eos" if reason == "stop" else "limit"
        prompt, params = self._body.prompt, self.job.params
        answer = {
            **piece,
            "stop": True,
            "model": self.job.options.adapter or self.service.model_name,
            "prompt": prompt
            if isinstance(prompt, str)
            else self.service.tokenizer.decode(prompt, skip_special_tokens=False),
            "generation_settings": generation_settings(params, stream=bool(self._body.stream)),
            "stop_type": kind,
            "stopping_word": word,
            "has_new_line": "\n" in text,
            "truncated": False,
            "tokens_cached": sum(self.usage.cached.values()),
            "timings": self.usage.timings(),
        }
        return choose(answer, self._body.response_fields or ())


async def _chunks(told: Told) -> sse.Chunks:
    """Yield pieces of text as they come, and the end, which has none."""
    text, reason, stop = "", None, None
    async with aclosing(spaced(told.service.engine, told.job)) as deltas:
        async for _, delta in deltas:
            told.usage.add(0, delta)
            text += delta.text
            if delta.text or delta.token_ids:
                yield told.piece(delta.text, delta.token_ids, token_logprobs(delta))
            reason, stop = delta.finish_reason, delta.stop_reason
    yield told.whole(told.piece("", [], []), text, reason, stop)
