"""What answers of vectors, labels and scores share: prompts that run at once, and lists in JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from fastapi.responses import Response
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.serving.http import chat_turn
from onnxport.serving.http.embedding_request import CutRequest, TextsRequest
from onnxport.serving.http.encodings import Encoding
from onnxport.serving.http.generation import check_number, together
from onnxport.serving.http.prompts import each_of, encode
from onnxport.serving.http.protocol import MOST_TRUNCATED
from onnxport.serving.http.request_ids import unique
from onnxport.serving.http.service import Service
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import PoolingParams
from onnxport.serving.truncation import Around

JSON: Final = "application/json"

Floats = NDArray[np.float32]
Start = Callable[[], AsyncGenerator[CompletionDelta, None]]


@dataclass(frozen=True, slots=True)
class Pooled:
    """What was made of prompts, in their order."""

    vectors: list[Floats]
    num_tokens: int  # of all prompts
    num_cached: int  # of these, whose K/V were not computed

    def usage(self) -> dict[str, Any]:
        """Return what is counted, as OpenAI tells it."""
        return {
            "prompt_tokens": self.num_tokens,
            "total_tokens": self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


def texts(
    service: Service,
    body: TextsRequest,
    *,
    ahead: str | None = None,
    most_tokens: int | None = None,
) -> list[list[int]]:
    """Return the tokens of each text, or of the conversation.

    Args:
        service: whose tokenizer and template it is.
        body: with either.
        ahead: what goes ahead of each text; None: nothing, and tokens are taken as they are.
        most_tokens: that a prompt may have, less than the context; None: as many as that.

    Raises:
        RequestError, CapacityError: they are not valid, or too long.
    """
    if body.messages is None:
        assert body.input is not None, "one of them is there"
        given = each_of(body.input, "input")
        check_number(service.engine, len(given), "input")
        special = body.add_special_tokens is not False
        return texts_of(service, body, given, ahead or "", most_tokens, special=special)
    how = body.model_copy(update={"add_generation_prompt": bool(body.add_generation_prompt)})
    longest = service.engine.capabilities.max_model_len
    most = longest if body.truncate_prompt_tokens is None else MOST_TRUNCATED
    ids = chat_turn.encode(service, body.messages, (), how, most).token_ids
    return [body.truncated(ids, min(longest, most_tokens or longest), Around())]


def texts_of(
    service: Service,
    body: CutRequest,
    given: list[str | list[int]],
    ahead: str,
    most_tokens: int | None,
    *,
    special: bool = True,
) -> list[list[int]]:
    """Return the tokens of each text, which is cut as the request says, behind what is ahead.

    Args:
        service: whose tokenizer it is.
        body: that says how texts are cut.
        given: texts, or tokens, of which nothing goes ahead.
        ahead: what goes ahead of each text.
        most_tokens: see `texts`.
        special: whether texts get special tokens.

    Raises:
        RequestError, CapacityError: see `texts`.
    """
    longest = service.engine.capabilities.max_model_len
    most = longest if body.truncate_prompt_tokens is None else MOST_TRUNCATED
    read = [ahead + one if isinstance(one, str) else one for one in given]
    encoded = encode(service, read, special, most)
    bare = service.tokenizer.encode(ahead, add_special_tokens=special)
    longest = min(longest, most_tokens or longest)
    found = []
    for one, ids in zip(given, encoded, strict=True):
        around = Around.of(ids, bare) if isinstance(one, str) else Around()
        found.append(body.truncated(ids, longest, around))
    return found


async def embed(
    service: Service,
    prompts: Sequence[Sequence[int]],
    params: PoolingParams,
    options: RequestOptions,
    name: str,
    field: str,
) -> Pooled:
    """Return the vector of each prompt.

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
    own = unique(name)
    starts = [
        partial(service.engine.embed, prompt, params, f"{own}-{number}", options)
        for number, prompt in enumerate(prompts)
    ]
    return await _run(starts, prompts, options, field)


async def classify(
    service: Service,
    prompts: Sequence[Sequence[int]],
    options: RequestOptions,
    name: str,
    field: str,
    *,
    activated: bool,
    per_token: bool = False,
) -> Pooled:
    """Return the number of each label for each prompt; the rest is as with `embed`.

    `activated` says whether these are probabilities, and not what the score head gives, and
    `per_token` whether each token has its own.
    """
    own, run = unique(name), service.engine.classify
    starts = [
        partial(run, prompt, f"{own}-{number}", options, activated=activated, per_token=per_token)
        for number, prompt in enumerate(prompts)
    ]
    return await _run(starts, prompts, options, field)


async def _run(
    starts: Sequence[Start],
    prompts: Sequence[Sequence[int]],
    options: RequestOptions,
    field: str,
) -> Pooled:
    vectors: dict[int, Floats] = {}
    num_cached = 0
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
    found = [vectors[number] for number in range(len(prompts))]
    return Pooled(found, sum(map(len, prompts)), num_cached)


async def listed(vectors: Sequence[Floats], told: Callable[[int, Floats], Any]) -> bytes:
    """Return a list, in JSON, of what is told of each vector.

    One after the other, and between them it is everybody else's turn: all at once would keep the
    engine, and other requests, for seconds.
    """
    parts = []
    for index, vector in enumerate(vectors):
        parts.append(dump(told(index, vector)))
        await asyncio.sleep(0)
    return b"".join([b"[", b",".join(parts), b"]"])


async def response(
    fields: dict[str, Any], vectors: Sequence[Floats], encoding: Encoding, kind: str, name: str
) -> Response:
    """Return an answer of vectors.

    Args:
        fields: of the answer, but for `data`.
        vectors: of each input, or a matrix of one for each of its tokens.
        encoding: how they are written.
        kind: what an item of `data` is called.
        name: of the field that its vector is in.

    Raises:
        RequestError: see `Encoding`.
    """
    if not encoding.is_json:
        return await asyncio.to_thread(encoding.response, fields, vectors)
    parts = []
    for index, vector in enumerate(vectors):
        told = await _written(vector, encoding)
        item = {"object": kind, "index": index}
        parts.append(b"".join([dump(item)[:-1], b",", dump(name), b":", told, b"}"]))
        await asyncio.sleep(0)  # see `listed`
    data = b"".join([b"[", b",".join(parts), b"]"])
    return Response(with_data(fields, data), media_type=JSON)


async def _written(vector: Floats, encoding: Encoding) -> bytes:
    """Return a vector, or one for each token, in JSON."""
    if encoding.form != "float":
        return dump(await asyncio.to_thread(encoding.told, vector))
    if vector.ndim == 1:
        return dump(numbers(vector))
    return await listed([*vector], lambda _, row: numbers(row))


def dump(value: Any) -> bytes:
    """Return JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def with_data(fields: dict[str, Any], data: bytes) -> bytes:
    """Return an object of fields, and of `data` that is JSON already."""
    return b"".join([dump(fields)[:-1], b',"data":', data, b"}"])


def numbers(vector: Floats) -> Any:
    """Return a vector as JSON has it."""
    return vector.tolist()
