"""`POST /v2/embed`, embeddings as Cohere's API and vLLM have them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from onnxport.errors import CapacityError, RequestError
from onnxport.serving.http import pooled
from onnxport.serving.http.embedding_request import CutRequest, EmbeddingFields
from onnxport.serving.http.encodings import as_base64
from onnxport.serving.http.fields import LABELS
from onnxport.serving.http.generation import check_number, unless_disconnected
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.pooled import JSON, Floats, dump, numbers
from onnxport.serving.http.protocol import MOST_TRUNCATED
from onnxport.serving.http.request_ids import take_id
from onnxport.serving.http.service import Service
from onnxport.serving.pooling import NO_EMBEDDINGS, Embedder, PoolingParams
from onnxport.serving.scoring import OF_DOCUMENTS, OF_QUERIES

# Names of sentence-transformers' prompts that mean the same, where a model has none of that name.
SAME_PROMPTS: Final[Mapping[str, tuple[str, ...]]] = {
    "search_query": OF_QUERIES,
    "search_document": OF_DOCUMENTS,
}
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
SIGNED: Final = 128  # what a byte has less where it has a sign


def _bits(vector: Floats, *, less: int) -> Any:
    """Return a bit for each number, whether it is 0 or more, eight in a byte, the first highest."""
    return (np.packbits(vector >= 0).astype(np.int16) - less).tolist()


TOLD: Final[Mapping[EmbeddingType, Callable[[Floats], Any]]] = {
    "float": numbers,
    "base64": as_base64,
    "binary": partial(_bits, less=SIGNED),
    "ubinary": partial(_bits, less=0),
}


class EmbedRequest(EmbeddingFields):
    """The body of `/v2/embed`."""

    neutral: ClassVar[Mapping[str, Any]] = {**LABELS, "images": ([],), "inputs": ()}

    texts: Annotated[list[str], Field(min_length=1)]
    input_type: str | None = None  # whose prompt of the model goes ahead of each text
    output_dimension: int | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = None  # float
    truncate: Literal["NONE", "START", "END"] | None = None  # END, unless told otherwise
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TRUNCATED)] | None = None  # of each text

    @property
    def cut(self) -> CutRequest:
        """How texts are cut that are too long."""
        if self.truncate == "NONE":
            return CutRequest()
        most = -1 if self.max_tokens is None else self.max_tokens
        side: Literal["left", "right"] = "left" if self.truncate == "START" else "right"
        return CutRequest(truncate_prompt_tokens=most, truncation_side=side)

    def ahead(self, embedder: Embedder) -> str:
        """Return what goes ahead of each text.

        Raises:
            RequestError: the model has no prompt for this type of input.
        """
        name = self.input_type
        if name is None:
            return embedder.prompt(None)
        for one in (name, *SAME_PROMPTS.get(name, ())):
            if one in embedder.prompts:
                return embedder.prompts[one]
        known = ", ".join(map(repr, embedder.prompts)) or "none"
        raise RequestError(
            f"input_type is {name[:80]!r}, for which this model has no prompt; it has {known}. "
            "Leave input_type out, or write ahead of the texts what the model wants there",
            "input_type",
        )

    def check(self, prompts: list[list[int]], embedder: Embedder) -> None:
        """Raise CapacityError where a text that is not to be cut has too many tokens."""
        longest = max(map(len, prompts))
        if self.max_tokens is not None and longest > self.max_tokens:
            raise CapacityError(
                f"a text has {longest} tokens, and max_tokens is {self.max_tokens}; shorten it, or "
                'send truncate "START" or "END"'
            )
        embedder.check_tokens(longest)


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoint."""

    @app.post("/v2/embed", response_model=None)
    async def embed(request: Request, body: EmbedRequest) -> Response:
        return await respond(service, request, body)


async def _listed(vectors: list[Floats], told: Callable[[Floats], Any]) -> bytes:
    return await pooled.listed(vectors, lambda _, vector: told(vector))


async def respond(service: Service, request: Request, body: EmbedRequest) -> Response:
    """Answer one request."""
    name = f"embd-{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    embedder = service.engine.embedder
    if embedder is None:
        raise RequestError(NO_EMBEDDINGS)
    options = body.options(key_tenant(request), service.request_timeout_s, adapter)
    check_number(service.engine, len(body.texts), "texts")
    given: list[str | list[int]] = [*body.texts]
    ahead = body.ahead(embedder)
    make = partial(pooled.texts_of, service, body.cut, given, ahead, embedder.max_tokens)
    prompts = await asyncio.to_thread(make)
    body.check(prompts, embedder)
    params = PoolingParams(body.output_dimension)
    try:
        work = pooled.embed(service, prompts, params, options, name, "texts")
        found = await unless_disconnected(request, work)
    except RequestError as error:
        if type(error) is not RequestError or error.param != "dimensions":
            raise
        text = str(error).replace("dimensions", "output_dimension", 1)
        raise RequestError(text, "output_dimension") from error
    types = list(dict.fromkeys(body.embedding_types or ("float",)))
    width = len(found.vectors[0])
    if width % 8 and {"binary", "ubinary"} & {*types}:
        raise RequestError(
            f"embedding_types has bits, and a vector has {width} numbers, which is no multiple of "
            '8; send "float" or "base64"',
            "embedding_types",
        )
    lists = [dump(kind) + b":" + await _listed(found.vectors, TOLD[kind]) for kind in types]
    fields = {
        "id": name,
        "texts": body.texts,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": found.num_tokens, "image_tokens": 0},
        },
        "response_type": "embeddings_by_type",
    }
    content = b"".join([dump(fields)[:-1], b',"embeddings":{', b",".join(lists), b"}}"])
    return Response(content, media_type=JSON)
