"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from onnxport.serving.http import sse
from onnxport.serving.http.generation import (
    Header,
    Job,
    Service,
    Usage,
    collect,
    generate,
    token_logprobs,
    unless_disconnected,
)
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.protocol import CompletionRequest
from onnxport.serving.outputs import TokenLogprobs


async def respond(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer one request, as a whole or as a stream."""
    service.check_model(body.model)
    params = body.sampling_params(service.defaults)
    options = body.options(key_tenant(request), service.request_timeout_s)
    given = body.prompts()
    prompts = await asyncio.to_thread(_encode, service, given, body.add_special_tokens)
    header = Header.new("cmpl", "text_completion", service.model_name)
    job = Job(prompts, params, options, header.id)
    echoes = [""] * job.num_choices
    if body.echo:
        texts = await asyncio.to_thread(_texts, service, given)
        echoes = [text for text in texts for _ in range(params.n)]
    if body.stream:
        return await sse.respond(request, _chunks(service, job, header, echoes, body.include_usage))
    usage = Usage(job)

    async def whole() -> list[dict[str, Any]]:
        async with aclosing(generate(service.engine, job)) as deltas:
            results = await collect(deltas, usage)
        choices = []
        for index, (echo, result) in enumerate(zip(echoes, results, strict=True)):
            offsets = TextOffsets(len(echo))
            logprobs = None if params.logprobs is None else offsets.body(result.logprobs)
            choices.append(_choice(index, echo + result.text, logprobs, result.finish_reason))
        return choices

    choices = await unless_disconnected(request, whole())
    return JSONResponse(header.body(choices, usage=usage.body()))


async def _chunks(
    service: Service, job: Job, header: Header, echoes: list[str], include_usage: bool
) -> sse.Chunks:
    """Yield the chunks of a stream: text as it comes, and the usage at the end if asked for."""
    usage = Usage(job)
    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
    offsets = [TextOffsets(len(echo)) for echo in echoes]
    pending = list(echoes)  # told with the first delta of each choice
    async with aclosing(generate(service.engine, job)) as deltas:
        async for index, delta in deltas:
            usage.add(index, delta)
            logprobs = None
            if job.params.logprobs is not None:
                logprobs = offsets[index].body(token_logprobs(delta))
            text, pending[index] = pending[index] + delta.text, ""
            if text or delta.finish_reason or (logprobs and logprobs["tokens"]):
                choice = _choice(index, text, logprobs, delta.finish_reason)
                yield header.body([choice], **no_usage)
    if include_usage:
        yield header.body([], usage=usage.body())


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _encode(service: Service, given: list[str | list[int]], special: bool) -> list[list[int]]:
    """Return the token ids of each prompt."""
    encode = service.tokenizer.encode
    return [
        encode(one, add_special_tokens=special) if isinstance(one, str) else one for one in given
    ]


def _texts(service: Service, given: list[str | list[int]]) -> list[str]:
    """Return the text of each prompt."""
    decode = service.tokenizer.decode
    return [one if isinstance(one, str) else decode(one) for one in given]


class TextOffsets:
    """Builds the log probabilities of the completions endpoint, which count characters."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def body(self, tokens: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """Return OpenAI's four parallel lists for the next tokens."""
        texts: list[str] = []
        values: list[float] = []
        top: list[dict[str, float]] = []
        offsets: list[int] = []
        for token_id, candidates in tokens:
            sampled = candidates[token_id]
            texts.append(sampled.decoded_token)
            values.append(sampled.logprob)
            top.append({one.decoded_token: one.logprob for one in candidates.values()})
            offsets.append(self._offset)
            self._offset += len(sampled.decoded_token)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }
