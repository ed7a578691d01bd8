"""vLLM's `/classify` and `/pooling`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.serving.classifying import NO_CLASSES, Classifier
from onnxport.serving.http import pooled
from onnxport.serving.http.generation import unless_disconnected
from onnxport.serving.http.job import Header
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.pooled import JSON, Pooled, numbers
from onnxport.serving.http.request_ids import take_id
from onnxport.serving.http.scoring_request import ClassifyRequest, PoolingRequest, Task
from onnxport.serving.http.service import Service
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import NO_EMBEDDINGS

MOST_NUMBERS: Final = 1 << 24  # of an answer that has a vector for each token


def add_routes(app: FastAPI, service: Service) -> None:
    """Add these endpoints."""

    @app.post("/classify", response_model=None)
    async def classify(request: Request, body: ClassifyRequest) -> Response:
        return await respond(service, request, body)

    @app.post("/pooling", response_model=None)
    async def pool(request: Request, body: PoolingRequest) -> Response:
        return await respond_pooled(service, request, body)


async def respond(service: Service, request: Request, body: ClassifyRequest) -> Response:
    """Answer one request for labels."""
    name = f"classify-{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    classifier = _classifier(service)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    field = "input" if body.messages is None else "messages"
    prompts = await asyncio.to_thread(pooled.texts, service, body)
    activated = body.activated
    work = pooled.classify(service, prompts, options, name, field, activated=activated)
    found = await unless_disconnected(request, work)

    def told(index: int, vector: NDArray[np.float32]) -> dict[str, Any]:
        return {
            "index": index,
            "label": classifier.labels[int(vector.argmax())],
            "probs": numbers(vector),
            "num_classes": len(vector),
        }

    header = Header.new(name, "list", adapter or service.model_name)
    data = await pooled.listed(found.vectors, told)
    content = pooled.with_data(header.fields(usage=found.usage()), data)
    return Response(content, media_type=JSON)


async def respond_pooled(service: Service, request: Request, body: PoolingRequest) -> Response:
    """Answer one request for whatever the model makes of a text."""
    name = f"pool-{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    task = body.task or ("embed" if service.engine.classifier is None else "classify")
    found = await unless_disconnected(request, _pool(service, body, options, name, task))
    header = Header.new(name, "list", adapter or service.model_name)
    fields = header.fields(usage=found.usage())
    return await pooled.response(fields, found.vectors, body.encoding, "pooling", "data")


async def _pool(
    service: Service, body: PoolingRequest, options: RequestOptions, name: str, task: Task
) -> Pooled:
    field = "input" if body.messages is None else "messages"
    per_token = task in ("token_embed", "token_classify")
    if task in ("classify", "token_classify"):
        classifier = _classifier(service)
        for alone in ("dimensions", "normalize", "prompt_name"):
            if getattr(body, alone) is not None:
                raise RequestError(
                    f"{alone} goes with vectors, and this model's labels are asked for; leave it "
                    "out, or send the task embed or token_embed",
                    alone,
                )
        prompts = await asyncio.to_thread(pooled.texts, service, body)
        if per_token:
            _check_numbers(service, prompts, len(classifier.labels), field)
        how = {"activated": body.use_activation is not False, "per_token": per_token}
        return await pooled.classify(service, prompts, options, name, field, **how)
    embedder = service.engine.embedder
    if embedder is None:
        raise RequestError(NO_EMBEDDINGS)
    params = replace(body.params(), per_token=per_token)
    ahead = embedder.prompt(body.prompt_name) if body.messages is None else None
    make = partial(pooled.texts, service, body, ahead=ahead, most_tokens=embedder.max_tokens)
    prompts = await asyncio.to_thread(make)
    if per_token:
        width = params.dimensions or service.engine.capabilities.final_features
        _check_numbers(service, prompts, width, field)
    return await pooled.embed(service, prompts, params, options, name, field)


def _check_numbers(
    service: Service, prompts: Sequence[Sequence[int]], width: int, field: str
) -> None:
    """Raise RequestError where the vectors of all tokens would be too much for one answer."""
    num_tokens = sum(map(len, prompts))
    longest = service.engine.capabilities.max_model_len
    most = max(MOST_NUMBERS // width, longest)  # one input may always be as long as the context
    if num_tokens > most:
        raise RequestError(
            f"{field} has {num_tokens} tokens, each of which would have {width} numbers in the "
            f"answer; {most} tokens may be in one request, so send several",
            field,
        )


def _classifier(service: Service) -> Classifier:
    """Return how prompts are classified; refuse a request before its texts are encoded."""
    classifier = service.engine.classifier
    if classifier is None:
        raise RequestError(NO_CLASSES)
    return classifier
