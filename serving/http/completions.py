"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from onnxport.serving.http import sse
from onnxport.serving.http.adapters import scales_of
from onnxport.serving.http.completion_request import CompletionRequest
from onnxport.serving.http.generation import check_number, collect, generate, unless_disconnected
from onnxport.serving.http.infill import filling
from onnxport.serving.http.intervals import spaced
from onnxport.serving.http.job import Collected, Header, Job, Usage, token_logprobs
from onnxport.serving.http.logprobs import (
    CompletionLogprobs,
    extend,
    no_logprobs,
    prompt_entries,
)
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.prompts import encode
from onnxport.serving.http.request_ids import take_id, unique
from onnxport.serving.http.service import Service
from onnxport.serving.http.timings import prompt_progress
from onnxport.serving.infill import Infill
from onnxport.serving.logprob_limits import check_total
from onnxport.serving.outputs import TokenLogprobs


async def respond(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer one request, as a whole or as a stream."""
    name = f"cmpl-{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    body = body.with_usage() if service.forces_usage else body
    limits = service.engine.capabilities
    body = body.with_counts(service.engine.max_logprobs, limits.vocab_size)
    params = body.sampling_params(service.defaults)
    scales = scales_of(service, body.lora, adapter)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter, scales)
    options = replace(options, only_prompt=body.only_prompt)
    given = body.prompts()
    check_number(service.engine, len(given), "prompt")
    special = body.add_special_tokens is not False
    if body.suffix:
        fills = filling(service, "suffix")
        params = fills.ended(params)
        around = partial(_around, service, given, body.suffix, special)
        prompts = await asyncio.to_thread(around, fills)
    else:
        prompts = await asyncio.to_thread(encode, service, given, special, body.most_prompt_tokens)
    if body.truncate_prompt_tokens is not None:
        longest = limits.max_model_len
        encoded = list(zip(given, prompts, strict=True))
        room = 0 if body.only_prompt else params.max_tokens
        prompts = [body.truncated(ids, longest, room) for _, ids in encoded]
        # What is echoed is what is left.
        cut = zip(encoded, prompts, strict=True)
        given = [left if len(left) < len(ids) else one for (one, ids), left in cut]
    num_scored = params.n * sum(len(each) - 1 for each in prompts)  # each choice tells them
    check_total(params, num_scored, (params.max_tokens or 0) * len(prompts))
    header = Header.new(name, "text_completion", adapter or service.model_name, service.fingerprint)
    interval = body.stream_interval or service.stream_interval
    job = Job(prompts, params, options, unique(name), interval)
    echoes = [""] * len(prompts) * params.n
    if body.echo:
        texts = await asyncio.to_thread(_texts, service, given, params.skip_special_tokens)
        echoes = [text for text in texts for _ in range(params.n)]
    if body.stream:
        chunks = _chunks(service, job, header, echoes, body)
        interval_s = body.ping_interval_s(service.ping_interval_s)
        return await sse.respond(request, chunks, interval_s)
    usage = Usage(job)

    async def whole() -> list[dict[str, Any]]:
        async with aclosing(generate(service.engine, job)) as deltas:
            results = await collect(deltas, usage)
        if body.only_prompt:
            usage.completion_tokens = 0
        choices = []
        for index, (echo, result) in enumerate(zip(echoes, results, strict=True)):
            if result.is_missing:
                continue
            choice = _whole(service, index, echo, result, prompts[index // params.n], body)
            choices.append(choice | _details(result, prompts[index // params.n], body))
        return choices

    choices = await unless_disconnected(request, whole())
    more = {"timings": usage.timings()} if body.timings_per_token else {}
    return JSONResponse(header.body(choices, usage=usage.body(), **more))


async def _chunks(
    service: Service, job: Job, header: Header, echoes: list[str], body: CompletionRequest
) -> sse.Chunks:
    """Yield the chunks of a stream: text as it comes, and the usage at the end if asked for."""
    usage = Usage(job)
    more: dict[str, Any] = {"usage": None} if body.include_usage else {}
    untold = set(range(len(echoes))) if body.return_token_ids else set()  # whose prompt is not told
    told = [
        CompletionLogprobs(
            service.tokenizer,
            job.prompts[index // job.params.n],
            skip_special_tokens=job.params.skip_special_tokens,
            by_id=bool(body.return_tokens_as_token_ids),
        )
        for index in range(len(echoes))
    ]
    pending = list(echoes)  # told with the first delta of each choice
    async with aclosing(spaced(service.engine, job)) as deltas:
        async for index, delta in deltas:
            if delta.is_missing:
                continue
            usage.add(index, delta)
            prompt = job.prompts[index // job.params.num_sequences]
            progress = prompt_progress(delta, len(prompt))
            logprobs = None
            if job.params.logprobs is not None:
                logprobs = told[index].body(token_logprobs(delta))
            text, pending[index] = pending[index] + delta.text, ""
            ids: dict[str, Any] = {}
            if body.return_token_ids and delta.token_ids:
                ids["token_ids"] = list(delta.token_ids)
                if index in untold:
                    untold.remove(index)
                    ids["prompt_token_ids"] = list(job.prompts[index // job.params.n])
            is_told = text or delta.finish_reason or ids or (logprobs and logprobs["tokens"])
            if is_told or progress:
                ends = (delta.finish_reason, delta.stop_reason)
                if body.continuous_usage:
                    more["usage"] = usage.so_far()
                if body.timings_per_token:
                    more["timings"] = usage.timings()
                choice = _choice(index, text, logprobs, *ends) | ids
                yield header.body([choice], **more, **progress)
    if body.include_usage:
        yield header.body([], **{**more, "usage": usage.body()})


def _whole(
    service: Service,
    index: int,
    echo: str,
    result: Collected,
    prompt: Sequence[int],
    body: CompletionRequest,
) -> dict[str, Any]:
    """Return a choice that has ended.

    Args:
        service: names tokens.
        index: of the choice.
        echo: the prompt's text, where it is wanted back.
        result: the completion.
        prompt: its tokens.
        body: of the request.
    """
    text, tokens = echo + result.text, result.logprobs
    ends = (result.finish_reason, result.stop_reason)
    if body.only_prompt:  # a token was generated that nobody asked for
        text, tokens, ends = echo, [], ("length", None)
    logprobs = None
    if body.told_logprobs is not None:
        logprobs = no_logprobs()
        lists_of = partial(
            CompletionLogprobs,
            service.tokenizer,
            skip_special_tokens=body.skip_special_tokens is not False,
            by_id=bool(body.return_tokens_as_token_ids),
        )
        if not body.echo:
            lists = lists_of(prompt)
        else:
            lists = lists_of(echo=echo)
            logprobs = lists.first(prompt[0])
            told = zip(prompt[1:], (result.prompt_logprobs or ())[1:], strict=True)
            rest = [(token_id, entry) for token_id, entry in told if entry is not None]
            extend(logprobs, lists.body(_likeliest(rest, body.told_logprobs)))
        extend(logprobs, lists.body(tokens))
    return _choice(index, text, logprobs, *ends)


def _likeliest(
    tokens: Sequence[tuple[int, TokenLogprobs]], count: int
) -> list[tuple[int, TokenLogprobs]]:
    """Return the candidates that `logprobs` asks for, of more that `prompt_logprobs` asked for."""
    return [(token_id, _first(entries, token_id, count)) for token_id, entries in tokens]


def _first(entries: TokenLogprobs, token_id: int, count: int) -> TokenLogprobs:
    """Return the `count` likeliest of a position, and the token that stands there."""
    return {one: entry for one, entry in entries.items() if one == token_id or entry.rank <= count}


def _details(result: Collected, prompt: Sequence[int], body: CompletionRequest) -> dict[str, Any]:
    """Return vLLM's further fields of a choice, null where they were not asked for."""
    most, tells_ids = body.prompt_logprobs, bool(body.return_token_ids)
    return {
        "prompt_logprobs": None if most is None else _prompt_logprobs(result, prompt, most),
        "prompt_token_ids": prompt if tells_ids else None,
        "token_ids": ([] if body.only_prompt else result.token_ids) if tells_ids else None,
    }


def _prompt_logprobs(
    result: Collected, prompt: Sequence[int], count: int
) -> list[dict[str, Any] | None] | None:
    """Return the candidates that `prompt_logprobs` asks for, of more that `logprobs` asked for."""
    told = zip(prompt, result.prompt_logprobs or (), strict=False)
    return prompt_entries(
        [entry if entry is None else _first(entry, token_id, count) for token_id, entry in told]
    )


def _choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def _around(
    service: Service, given: list[str | list[int]], suffix: str, begins: bool, fills: Infill
) -> list[list[int]]:
    """Return the token ids of each prompt with what stands behind its answer."""
    most = service.engine.capabilities.max_model_len
    texts = [one for one in given if isinstance(one, str)]  # all of them
    for text in (*texts, suffix):
        service.tokenizer.check_length(text, most)
    return [fills.around(text, suffix, begins=begins).token_ids for text in texts]


def _texts(service: Service, given: list[str | list[int]], skips: bool) -> list[str]:
    """Return the text of each prompt."""
    decode = partial(service.tokenizer.decode_prompt, skip_special_tokens=skips)
    return [one if isinstance(one, str) else decode(one) for one in given]
