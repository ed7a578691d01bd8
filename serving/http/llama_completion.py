"""`POST /completion`: completions, asked for and told as llama.cpp's server does.

They mean what the same do in `/v1/completions`, apart from names. Source of these:
https://github.com/ggml-org/llama.cpp/tree/master/tools/server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Self

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import PlainValidator

from onnxport.serving.http import sse
from onnxport.serving.http.adapters import scales_of
from onnxport.serving.http.completion_request import CompletionRequest
from onnxport.serving.http.generation import check_number, generate, unless_disconnected
from onnxport.serving.http.intervals import spaced
from onnxport.serving.http.job import Collected, Job, token_logprobs
from onnxport.serving.http.llama_answer import Answer, settings_told
from onnxport.serving.http.llama_prompts import Mixed, Prompted, encoded, prompts
from onnxport.serving.http.llama_request import LlamaBody
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.request_ids import take_id, unique
from onnxport.serving.http.service import Service
from onnxport.serving.logprob_limits import check_total
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams

PATHS: Final = ("/completion", "/completions")  # llama.cpp has both


class LlamaRequest(LlamaBody):
    """The body of `/completion`."""

    prompt: Annotated[list[str | Mixed], PlainValidator(prompts)]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for, apart from its prompts."""

    completion: CompletionRequest
    params: SamplingParams

    @classmethod
    async def of(cls, service: Service, body: LlamaBody) -> Self:
        """Return it.

        Raises:
            RequestError: a field means nothing, contradicts another one, or is out of its range.
        """
        engine = service.engine
        asked = body.completion()
        asked = asked.with_counts(engine.max_logprobs, engine.capabilities.vocab_size)
        return cls(asked, await body.sampling_params(asked, service.defaults, service.tokenizer))


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoint, by both of its names."""

    async def complete(request: Request, body: LlamaRequest) -> Response:
        await service.pick_adapter(body.model)
        asked = await Asked.of(service, body)
        check_number(service.engine, len(body.prompt), "prompt")
        given = await asyncio.to_thread(encoded, service, body.prompt)
        return await respond(service, request, body, asked, given)

    for path in PATHS:
        app.post(path, response_model=None)(complete)


async def respond(
    service: Service, request: Request, body: LlamaBody, asked: Asked, given: Sequence[Prompted]
) -> Response:
    """Answer one request, as a whole or as a stream.

    Args:
        service: that answers.
        request: with the client's key and id.
        body: of the request.
        asked: what it asks for.
        given: its prompts.
    """
    params = asked.params
    name = f"cmpl-{take_id(request, None)}"
    adapter = await service.pick_adapter(body.model)
    scales = scales_of(service, body.lora, adapter)
    tenant = key_tenant(request)
    options = asked.completion.options(tenant, service.request_timeout_s, adapter, scales)
    options = replace(
        options,
        only_prompt=body.only_prompt,
        ends_at_context=True,
        tells_drawn=bool(body.post_sampling_probs),
    )
    most = min(params.max_tokens or 0, service.engine.capabilities.max_model_len)
    check_total(params, 0, most * len(given))
    interval = body.stream_interval or service.stream_interval
    each = [one.token_ids for one in given]
    job = Job(each, params, options, unique(name), interval, body.line_limits)
    settings = settings_told(body, params, job.num_choices)
    answers = [
        Answer(service, job, body, settings, index, given[index // params.n])
        for index in range(job.num_choices)
    ]
    if body.stream:
        chunks = _chunks(spaced(service.engine, job), answers, body)
        interval_s = body.ping_interval_s(service.ping_interval_s)
        return await sse.respond(request, chunks, interval_s, end=b"")

    async def whole() -> dict[str, Any] | list[dict[str, Any]]:
        results = [Collected() for _ in answers]
        async with aclosing(generate(service.engine, job)) as deltas:
            async for choice, delta in deltas:
                answers[choice].add(delta)
                results[choice].add(delta)
        told = [_whole(*one, body) for one in zip(answers, results, strict=True)]
        return told[0] if len(told) == 1 else told

    return JSONResponse(await unless_disconnected(request, whole()))


def _whole(answer: Answer, result: Collected, body: LlamaBody) -> dict[str, Any]:
    """Return an answer that has ended."""
    if body.only_prompt:
        return answer.whole(answer.piece("", [], []))
    return answer.whole(answer.piece(result.text, result.token_ids, result.logprobs))


async def _chunks(
    deltas: AsyncGenerator[tuple[int, CompletionDelta], None],
    answers: Sequence[Answer],
    body: LlamaBody,
) -> sse.Chunks:
    """Yield pieces of text as they come, and behind those of each answer its end."""
    async with aclosing(deltas):
        async for choice, delta in deltas:
            answer = answers[choice]
            answer.add(delta)
            if progress := answer.progress(delta):
                yield answer.piece("", [], []) | progress
            if (delta.text or delta.token_ids) and not body.only_prompt:
                yield answer.piece(delta.text, delta.token_ids, token_logprobs(delta))
            if delta.finish_reason is not None:
                yield answer.whole(answer.piece("", [], []))
