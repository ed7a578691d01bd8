"""vLLM's `/score`, and `/rerank` as Jina, Cohere, vLLM, llama.cpp and TEI have it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response

from onnxport.errors import RequestError
from onnxport.serving.classifying import check_scores, ranked, similarity
from onnxport.serving.http import pooled
from onnxport.serving.http.generation import Header, check_number, unless_disconnected
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.pooled import JSON, Pooled
from onnxport.serving.http.request_ids import take_id
from onnxport.serving.http.scoring_request import PairsFields, RerankRequest, ScoreRequest
from onnxport.serving.http.service import Service, Tokenizer
from onnxport.serving.pairs import PairEncoder, fitted
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import Embedder, PoolingParams

SCORE_PATHS: Final = ("/score", "/v1/score")
RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
LLAMA_PATHS: Final = ("/reranking", "/v1/reranking")  # llama.cpp's, besides /rerank


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
        body: that asks.
        name: of the request.
        options: how prompts are treated.
        field: that documents came in.
        most_of_document: tokens of a document; None: all.
        sides: names of the model's prompts that go ahead of queries and of documents, where each
            text has a vector.
    """

    service: Service
    body: PairsFields
    name: str
    options: RequestOptions
    field: str
    most_of_document: int | None = None
    sides: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    async def scores(self, pairs: list[tuple[str, str]]) -> tuple[list[float], Pooled]:
        """Return the score of each pair, and what was made of all prompts."""
        embedder, classifier = self.service.engine.embedder, self.service.engine.classifier
        judges = classifier is not None and classifier.scores
        if embedder is not None and not judges:
            return await self._of_vectors(embedder, pairs)
        return await self._of_pairs(pairs)

    async def _of_pairs(self, pairs: list[tuple[str, str]]) -> tuple[list[float], Pooled]:
        """The model reads both texts of a pair at once."""
        engine, body = self.service.engine, self.body
        classifier = check_scores(engine.classifier)
        check_number(engine, len(pairs), self.field)
        longest = engine.capabilities.max_model_len
        encoder = PairEncoder(self.service.tokenizer, classifier.template, longest)

        def encode() -> list[list[int]]:
            return [
                encoder.encode(
                    query,
                    document,
                    body.instruction,
                    most_tokens=body.most_tokens(longest),
                    most_of_document=self.most_of_document,
                )
                for query, document in pairs
            ]

        prompts = await asyncio.to_thread(encode)
        found = await pooled.classify(
            self.service,
            prompts,
            self.options,
            self.name,
            self.field,
            activated=body.activated,
        )
        return [float(vector[0]) for vector in found.vectors], found

    async def _of_vectors(
        self, embedder: Embedder, pairs: list[tuple[str, str]]
    ) -> tuple[list[float], Pooled]:
        """Each text has a vector; texts that are there twice have one."""
        engine, body = self.service.engine, self.body
        if body.instruction is not None:
            raise RequestError(
                "an instruction was given, and this model compares vectors of texts, which have "
                "none; write it ahead of the query, or leave it out",
                "instruction",
            )
        if not body.activated:
            raise RequestError(
                "probabilities were declined, and this model compares vectors, of which none are "
                "made; leave that out",
                "use_activation",
            )
        ahead = [embedder.prompt_of(*names) for names in self.sides]
        texts = dict.fromkeys(
            (side, text) for pair in pairs for side, text in enumerate(pair)
        )  # in their order
        check_number(engine, len(texts), self.field)
        longest = engine.capabilities.max_model_len
        longest = min(longest, embedder.max_tokens or longest)
        most = body.most_tokens(longest)
        tokenizer = self.service.tokenizer

        def encode() -> list[list[int]]:
            prompts = []
            for side, text in texts:
                if most is None:
                    tokenizer.check_length(text, engine.capabilities.max_model_len)
                write = partial(_encode, tokenizer, ahead[side])
                most_of_text = self.most_of_document if side else None
                prompts.append(fitted(tokenizer, text, write, most, most_of_text))
            return prompts

        prompts = await asyncio.to_thread(encode)
        found = await pooled.embed(
            self.service, prompts, PoolingParams(), self.options, self.name, self.field
        )
        vectors = dict(zip(texts, found.vectors, strict=True))
        kind = embedder.similarity
        scores = [
            similarity(kind, vectors[0, query], vectors[1, document]) for query, document in pairs
        ]
        return scores, found


def _encode(tokenizer: Tokenizer, ahead: str, text: str) -> list[int]:
    return tokenizer.encode(ahead + text)


async def respond(service: Service, request: Request, body: ScoreRequest) -> Response:
    """Answer one request for scores of pairs, in their order."""
    name = f"score-{take_id(request, body.request_id)}"
    adapter = service.adapter_of(body.model)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    job = _Job(service, body, name, options, "text_2")
    scores, found = await unless_disconnected(request, job.scores(body.pairs()))
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
    adapter = service.adapter_of(body.model)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    sides = (("query",), ("document", "passage", "corpus"))
    job = _Job(service, body, name, options, body.field, body.max_tokens_per_doc, sides)
    documents = body.listed
    pairs = [(body.query, document) for document in documents]
    scores, found = await unless_disconnected(request, job.scores(pairs))
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
