"""`POST /v1/embeddings`, as OpenAI and vLLM have it, and llama.cpp's `/embedding`."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.serving.http import chat_turn
from onnxport.serving.http.embedding_request import EmbeddingRequest, LlamaEmbeddingRequest
from onnxport.serving.http.generation import (
    Header,
    check_number,
    together,
    unless_disconnected,
)
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.prompts import each_of, encode
from onnxport.serving.http.protocol import MOST_TRUNCATED
from onnxport.serving.http.request_ids import take_id, unique
from onnxport.serving.http.service import Service
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import NO_EMBEDDINGS, PoolingParams

JSON: Final = "application/json"
LLAMA_PATHS: Final = ("/embedding", "/embeddings")  # llama.cpp has both

Floats = NDArray[np.float32]


def add_routes(app: FastAPI, service: Service) -> None:
    """Add these endpoints."""

    @app.post("/v1/embeddings", response_model=None)
    async def create_embedding(request: Request, body: EmbeddingRequest) -> Response:
        return await respond(service, request, body)

    async def embed(request: Request, body: LlamaEmbeddingRequest) -> Response:
        return await respond_as_llama_cpp(service, request, body)

    for path in LLAMA_PATHS:
        app.post(path, response_model=None)(embed)


async def respond(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    """Answer one request of OpenAI's form."""
    name = f"embd-{take_id(request, body.request_id)}"
    adapter = service.adapter_of(body.model)
    _check_embeds(service)
    params = body.params()
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    field = "input" if body.messages is None else "messages"
    prompts = await asyncio.to_thread(_prompts, service, body)
    work = _embed(service, prompts, params, options, name, field)
    vectors, num_cached = await unless_disconnected(request, work)
    told = _base64 if body.encoding_format == "base64" else _numbers
    num_tokens = sum(map(len, prompts))
    header = Header.new(name, "list", adapter or service.model_name)
    data = await _listed(
        vectors,
        lambda index, vector: {"object": "embedding", "index": index, "embedding": told(vector)},
    )
    fields = {
        "id": header.id,
        "object": header.object,
        "created": header.created,
        "model": header.model,
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    }
    return Response(b"".join([_json(fields)[:-1], b',"data":', data, b"}"]), media_type=JSON)


async def respond_as_llama_cpp(
    service: Service, request: Request, body: LlamaEmbeddingRequest
) -> Response:
    """Answer one request of llama.cpp's form: a matrix of one row for each text."""
    name = f"embd-{take_id(request, body.request_id)}"
    adapter = service.adapter_of(body.model)
    _check_embeds(service)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    field = "input" if body.content is None else "content"
    content = body.input if body.content is None else body.content
    assert content is not None, "one of them is there"
    given = each_of(content, field)
    check_number(service.engine, len(given), field)
    prompts = await asyncio.to_thread(encode, service, given, True, None)
    work = _embed(service, prompts, body.params(), options, name, field)
    vectors, _ = await unless_disconnected(request, work)
    data = await _listed(
        vectors, lambda index, vector: {"index": index, "embedding": [_numbers(vector)]}
    )
    return Response(data, media_type=JSON)


def _check_embeds(service: Service) -> None:
    """Refuse a request before its texts are encoded."""
    if service.engine.embedder is None:
        raise RequestError(NO_EMBEDDINGS)


def _prompts(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    """Return the tokens of each text, or of the conversation."""
    longest = service.engine.capabilities.max_model_len
    most = longest if body.truncate_prompt_tokens is None else MOST_TRUNCATED
    if body.messages is not None:
        begins = body.add_generation_prompt
        how = body.model_copy(update={"add_generation_prompt": bool(begins)})
        encoded = [chat_turn.encode(service, body.messages, (), how, most).token_ids]
    else:
        assert body.input is not None, "one of them is there"
        given = each_of(body.input, "input")
        check_number(service.engine, len(given), "input")
        encoded = encode(service, given, body.add_special_tokens is not False, most)
    return [body.truncated(ids, longest) for ids in encoded]


async def _embed(
    service: Service,
    prompts: Sequence[Sequence[int]],
    params: PoolingParams,
    options: RequestOptions,
    name: str,
    field: str,
) -> tuple[list[Floats], int]:
    """Return the vector of each prompt, and how many tokens of all were cached.

    Args:
        service: that answers.
        prompts: token ids.
        params: how they are embedded.
        options: how they are treated.
        name: of the request.
        field: that they came in.

    Raises:
        ApiError: see `together`.
        RequestError, CapacityError, OverloadedError: one cannot be embedded.
    """
    vectors: dict[int, Floats] = {}
    num_cached = 0
    own = unique(name)
    starts = [
        partial(service.engine.embed, prompt, params, f"{own}-{number}", options)
        for number, prompt in enumerate(prompts)
    ]
    try:
        async with aclosing(together(starts, options)) as deltas:
            async for number, delta in deltas:
                assert delta.embedding is not None, "what ends well has a vector"
                vectors[number] = delta.embedding
                num_cached += delta.num_cached_tokens
    except RequestError as error:
        if type(error) is RequestError and error.param == "prompt":
            raise RequestError(str(error), field) from error
        raise
    return [vectors[number] for number in range(len(prompts))], num_cached


async def _listed(vectors: Sequence[Floats], told: Callable[[int, Floats], Any]) -> bytes:
    """Return a list, in JSON, of what is told of each vector.

    One after the other, and between them it is everybody else's turn: all at once would keep the
    engine, and other requests, for seconds.
    """
    parts = []
    for index, vector in enumerate(vectors):
        parts.append(_json(told(index, vector)))
        await asyncio.sleep(0)
    return b"".join([b"[", b",".join(parts), b"]"])


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _numbers(vector: Floats) -> Any:
    return vector.tolist()


def _base64(vector: Floats) -> str:
    """Return the bytes of float32, the least significant first, as text."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
