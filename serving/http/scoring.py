"""vLLM's `/score`, and `/rerank` as Jina, Cohere, vLLM, llama.cpp and TEI have it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response

from onnxport.serving.classifying import ranked
from onnxport.serving.http import pooled
from onnxport.serving.http.generation import check_number, unless_disconnected
from onnxport.serving.http.job import Header
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.pooled import JSON, Pooled
from onnxport.serving.http.request_ids import take_id
from onnxport.serving.http.scoring_request import RerankRequest, ScoreRequest
from onnxport.serving.http.service import Service
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import PoolingParams
from onnxport.serving.scoring import Pair, PairParams, PairPlanner

SCORE_PATHS: Final = ("/score", "/v1/score")
RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
LLAMA_PATHS: Final = ("/reranking", "/v1/reranking")  # llama.cpp's, besides /rerank
# Of all prompts of a request: a query is in each pair, so that a small body may be many tokens.
MOST_TOKENS: Final = 1 << 22


def add_routes(app: FastAPI, service: Service) -> None:
    """Add these endpoints."""

    async def score(request: Request, body: ScoreRequest) -> Response:
        return await respond(service, request, body)

    async def rerank(request: Request, body: RerankRequest) -> Response:
        return await respond_ranked(service, request, body, has_documents=True)

    async def rerank_as_llama_cpp(request: Request, body: RerankRequest) -> Response:
        return await respond_ranked(service, request, body, has_documents=False)

    for paths, answer in (
        (SCORE_PATHS, score),
        (RERANK_PATHS, rerank),
        (LLAMA_PATHS, rerank_as_llama_cpp),
    ):
        for path in paths:
            app.post(path, response_model=None)(answer)


@dataclass(frozen=True, slots=True)
class _Job:
    """Pairs that are to be scored.

    Attributes:
        service: that answers.
        name: of the request.
        options: how prompts are treated.
        field: that documents came in.
    """

    service: Service
    name: str
    options: RequestOptions
    field: str

    async def scores(self, pairs: list[Pair], params: PairParams) -> tuple[list[float], Pooled]:
        """Return the score of each pair, and what was made of all prompts."""
        service, engine = self.service, self.service.engine
        longest = engine.capabilities.max_model_len
        planner = PairPlanner(
            service.tokenizer,
            engine.embedder,
            engine.classifier,
            longest,
            max(MOST_TOKENS, 2 * longest),  # one pair may always be as long as the context
        )
        check_number(engine, planner.num_prompts(pairs), self.field)
        stopped = threading.Event()
        try:
            plan = await asyncio.to_thread(planner.plan, pairs, params, stopped.is_set)
        finally:
            stopped.set()  # else the thread would go on when nobody waits for it
        parts = (self.options, self.name, self.field)
        if plan.classifies:
            activated = params.activated
            work = pooled.classify(service, plan.prompts, *parts, activated=activated)
        else:
            work = pooled.embed(service, plan.prompts, PoolingParams(), *parts)
        found = await work
        return plan.scores(found.vectors), found


async def respond(service: Service, request: Request, body: ScoreRequest) -> Response:
    """Answer one request for scores of pairs, in their order."""
    name = f"score-{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    job = _Job(service, name, options, "text_2")
    params = body.params(service.engine.capabilities.max_model_len)
    scores, found = await unless_disconnected(request, job.scores(body.pairs(), params))
    header = Header.new(name, "list", adapter or service.model_name)
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    content = pooled.dump(header.fields(data=data, usage=found.usage()))
    return Response(content, media_type=JSON)


async def respond_ranked(
    service: Service, request: Request, body: RerankRequest, *, has_documents: bool
) -> Response:
    """Answer one request for documents, the best first.

    Args:
        service: that answers.
        request: of the client.
        body: of it.
        has_documents: whether the answer has documents, where the request does not say.
    """
    name = f"rerank-{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    job = _Job(service, name, options, body.field)
    documents = body.listed
    pairs = [(body.query, document) for document in documents]
    params = body.params(service.engine.capabilities.max_model_len)
    scores, found = await unless_disconnected(request, job.scores(pairs, params))
    best = ranked(scores, body.top_n or None)
    if body.is_tei:
        listed: list[dict[str, Any]] = [
            {"index": index, "score": scores[index]}
            | ({"text": documents[index]} if body.return_text else {})
            for index in best
        ]
        return Response(pooled.dump(listed), media_type=JSON)
    tells = has_documents if body.return_documents is None else body.return_documents
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if tells else {})
        for index in best
    ]
    header = Header.new(name, "list", adapter or service.model_name)
    content = pooled.dump(header.fields(results=results, usage=found.usage()))
    return Response(content, media_type=JSON)
