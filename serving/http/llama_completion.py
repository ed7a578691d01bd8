"""`POST /completion`: one completion, asked for and told as llama.cpp's server does.

It means what the same does in `/v1/completions`, apart from names. Source of these:
https://github.com/ggml-org/llama.cpp/tree/master/tools/server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from onnxport.errors import RequestError
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http import sse
from onnxport.serving.http.completion_request import CompletionRequest
from onnxport.serving.http.fields import ANY, OF_ENGINES, are_ids, check_json, check_neutral
from onnxport.serving.http.generation import Job, Usage, collect, generate, unless_disconnected
from onnxport.serving.http.generation_fields import GenerationFields, StopStrings
from onnxport.serving.http.intervals import spaced
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.renaming import with_names
from onnxport.serving.http.request_ids import take_id, unique
from onnxport.serving.http.service import Service
from onnxport.serving.params import SamplingParams
from onnxport.serving.structured.spec import StructuredOutputs

PATHS: Final = ("/completion", "/completions")  # llama.cpp has both
NEUTRAL: Final[Mapping[str, Any]] = {
    **OF_ENGINES,
    "penalize_nl": ANY,
    "n_keep": ANY,  # of contexts that are shifted; these are as long as they are
    "n_discard": ANY,
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "image_data": ([],),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "lora": ([],),
}
CALLED: Final = {"max_tokens": "n_predict"}  # for errors
FORMS: Final = {"grammar": "grammar", "json_schema": "json"}


def _prompt(value: Any) -> Any:
    if isinstance(value, str) or are_ids(value):
        return value
    what = "a text, or a list of token ids; several prompts are for /v1/completions"
    raise PydanticCustomError("union", "should be {what}", {"what": what})


def _by_id(biases: list[Any]) -> dict[str, Any]:
    """Return llama.cpp's list of biases as OpenAI's API has them.

    Raises:
        RequestError: it is no list of tokens with numbers, each token once.
    """
    found: dict[str, Any] = {}
    for one in biases:
        match one:
            case [int(token_id), int() | float() as bias] if not isinstance(bias, bool):
                if str(token_id) not in found:
                    found[str(token_id)] = float(bias)
                    continue
        raise RequestError(
            f"logit_bias has {repr(one)[:80]}; give each token once, by its id, with the number "
            "that is added to its logit, as in [[42, -100]]",
            "logit_bias",
        )
    return found


class LlamaRequest(GenerationFields):
    """The body of `/completion`."""

    model: str | None = None
    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    n_predict: Annotated[int, Field(ge=-1)] | None = None  # -1, or none: as the context allows
    stop: StopStrings = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        check_json(body)
        check_neutral(body, NEUTRAL)
        kept = {name: value for name, value in body.items() if name not in NEUTRAL}
        if isinstance(biases := kept.get("logit_bias"), list):
            kept["logit_bias"] = _by_id(biases)
        return kept

    def completion(self) -> CompletionRequest:
        """Return the body of `/v1/completions` that means the same, but for length and form."""
        same = {"model": self.model, "prompt": self.prompt, "stop": self.stop}
        return CompletionRequest.model_validate({**self.generation(), **same})

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the decoding parameters; up to the context length unless told otherwise.

        Raises:
            RequestError: a value is out of its range, or not valid; named as it is here.
        """
        limit = None if self.n_predict == -1 else self.n_predict
        try:
            params = self.completion().sampling(defaults, limit, None)
        except RequestError as error:
            raise with_names(error, CALLED) from error
        form = self._form()
        return params if form is None else replace(params, structured_outputs=form)

    def _form(self) -> StructuredOutputs | None:
        """Return the form of the text by llama.cpp's fields.

        Raises:
            RequestError: more than one is asked for, or one is not valid.
        """
        # Clients send an empty grammar for none; an empty schema is any JSON.
        given = [name for name in FORMS if getattr(self, name) not in (None, "")]
        named = [*given, "structured_outputs"] if self.structured_outputs else given
        if len(named) > 1:
            raise RequestError(
                f"{' and '.join(named)} each ask for a form of the text; send one of them", named[1]
            )
        if not given:
            return None
        [name] = given
        return StructuredOutputs.from_mapping({FORMS[name]: getattr(self, name)}, name)


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
    params = body.sampling_params(service.defaults)
    asked = body.completion()
    options = asked.options(key_tenant(request), service.request_timeout_s, adapter)
    prompt = await asyncio.to_thread(_encoded, service, body.prompt)
    interval = body.stream_interval or service.stream_interval
    job = Job([prompt], params, options, unique(name), interval)
    told = Told(job, adapter or service.model_name, has_tokens=bool(body.return_tokens))
    if body.stream:
        chunks = _chunks(service, told)
        return await sse.respond(request, chunks, service.ping_interval_s, end=b"")

    async def whole() -> dict[str, Any]:
        async with aclosing(generate(service.engine, job)) as deltas:
            [result] = await collect(deltas, told.usage)
        ids = result.token_ids
        return told.last(result.text, ids, result.text, result.finish_reason, result.stop_reason)

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

    def __init__(self, job: Job, model: str, *, has_tokens: bool) -> None:
        self.job, self.usage = job, Usage(job)
        self._model, self._has_tokens = model, has_tokens

    def piece(self, text: str, token_ids: list[int], *, is_last: bool = False) -> dict[str, Any]:
        """Return what every event has."""
        return {
            "index": 0,
            "content": text,
            "tokens": token_ids if self._has_tokens else [],
            "stop": is_last,
            "tokens_predicted": self.usage.completion_tokens,
            "tokens_evaluated": self.usage.prompt_tokens,
        }

    def last(
        self,
        text: str,
        token_ids: list[int],
        all_text: str,
        reason: str | None,
        stop: int | str | None,
    ) -> dict[str, Any]:
        """Return the end, with what is told of a whole answer."""
        word = stop if isinstance(stop, str) and reason == "stop" else ""
        kind = "word" if word else "eos" if reason == "stop" else "limit"
        return {
            **self.piece(text, token_ids, is_last=True),
            "model": self._model,
            "stop_type": kind,
            "stopping_word": word,
            "has_new_line": "\n" in all_text,
            "truncated": False,
            "tokens_cached": sum(self.usage.cached.values()),
        }


async def _chunks(service: Service, told: Told) -> sse.Chunks:
    """Yield pieces of text as they come, and the end, which has none."""
    all_text, reason, stop = "", None, None
    async with aclosing(spaced(service.engine, told.job)) as deltas:
        async for _, delta in deltas:
            told.usage.add(0, delta)
            all_text += delta.text
            if delta.text or delta.token_ids:
                yield told.piece(delta.text, list(delta.token_ids))
            reason, stop = delta.finish_reason, delta.stop_reason
    yield told.last("", [], all_text, reason, stop)
