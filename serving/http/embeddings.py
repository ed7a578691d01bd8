"""`POST /v1/embeddings`, as OpenAI and vLLM have it, and llama.cpp's `/embedding`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import Response

from onnxport.errors import RequestError
from onnxport.serving.http import pooled
from onnxport.serving.http.embedding_request import EmbeddingRequest, LlamaEmbeddingRequest
from onnxport.serving.http.generation import check_number, unless_disconnected
from onnxport.serving.http.job import Header
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.pooled import JSON, numbers
from onnxport.serving.http.prompts import each_of
from onnxport.serving.http.request_ids import take_id
from onnxport.serving.http.service import Service
from onnxport.serving.pooling import NO_EMBEDDINGS, Embedder

LLAMA_PATHS: Final = ("/embedding", "/embeddings")  # llama.cpp has both


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
    adapter = await service.pick_adapter(body.model)
    embedder = _embedder(service)
    params = body.params()
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    field = "input" if body.messages is None else "messages"
    ahead = embedder.prompt(body.prompt_name) if body.messages is None else None
    make = partial(pooled.texts, service, body, ahead=ahead, most_tokens=embedder.max_tokens)
    prompts = await asyncio.to_thread(make)
    work = pooled.embed(service, prompts, params, options, name, field)
    found = await unless_disconnected(request, work)
    header = Header.new(name, "list", adapter or service.model_name)
    fields = header.fields(usage=found.usage())
    return await pooled.response(fields, found.vectors, body.encoding, "embedding", "embedding")


async def respond_as_llama_cpp(
    service: Service, request: Request, body: LlamaEmbeddingRequest
) -> Response:
    """Answer one request of llama.cpp's form: a matrix of one row for each text."""
    name = f"embd-{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    embedder = _embedder(service)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    field = "input" if body.content is None else "content"
    content = body.input if body.content is None else body.content
    assert content is not None, "one of them is there"
    ahead = embedder.prompt(body.prompt_name)
    given = each_of(content, field)
    check_number(service.engine, len(given), field)
    make = partial(pooled.texts_of, service, body, given, ahead, embedder.max_tokens)
    prompts = await asyncio.to_thread(make)
    work = pooled.embed(service, prompts, body.params(), options, name, field)
    found = await unless_disconnected(request, work)
    data = await pooled.listed(
        found.vectors, lambda index, vector: {"index": index, "embedding": [numbers(vector)]}
    )
    return Response(data, media_type=JSON)


def _embedder(service: Service) -> Embedder:
    """Return how prompts are embedded; refuse a request before its texts are encoded."""
    embedder = service.engine.embedder
    if embedder is None:
        raise RequestError(NO_EMBEDDINGS)
    return embedder
