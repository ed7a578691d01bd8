"""`/v1/embeddings` and llama.cpp's `/embedding`: what they take, tell and refuse."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types import CreateEmbeddingResponse

from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.app import AppOptions, create_app
from onnxport.serving.http.pooled import listed
from onnxport.serving.pooling import Embedder, PoolingParams
from onnxport.serving.tokenizer import Tokenizer
from onnxport.serving.worker import AsyncEngine
from tests.serving.adapting import content
from tests.serving.helpers import null_engine
from tests.serving.pooling import LAST, MEAN, vector

from .test_errors import error_of

ANY = Embedder(dimensions="any")
PATH = "/v1/embeddings"
TEXTS = ["ab", "the sea", "b"]


class Server:
    """An application over an engine that embeds, without a socket."""

    def __init__(self, worker: AsyncEngine, folder: Path, options: AppOptions | None) -> None:
        assert worker.tokenizer is not None
        self.tokenizer = worker.tokenizer
        self.worker = worker
        app = create_app(worker, "model", ChatTemplate.read(folder), options)
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")
        self.openai = AsyncOpenAI(
            base_url="http://test/v1", api_key="key-a", http_client=self.http, max_retries=0
        )

    async def post(
        self, path: str = "/v1/embeddings", key: str = "", **body: Any
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.http.post(path, json=body, headers=headers)

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special)


@asynccontextmanager
async def serving(
    folder: Path,
    embedder: Embedder | None = LAST,
    options: AppOptions | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    tokenizer = Tokenizer.from_folder(folder, frozenset())
    engine = null_engine(embedder=embedder, tokenizer=tokenizer, **settings)
    if settings.get("max_adapters"):
        engine.adapters.load("adapter", content(3))
    async with AsyncEngine(engine) as worker:
        yield Server(worker, folder, options)


def vectors(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


def told(answer: CreateEmbeddingResponse) -> list[list[float]]:
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [one.embedding for one in answer.data]


@pytest.mark.parametrize("embedder", [LAST, MEAN])
async def test_openais_client_gets_the_vectors(model_folder: Path, embedder: Embedder) -> None:
    """By default it asks for base64, and turns that into numbers."""
    async with serving(model_folder, embedder) as server:
        expected = [vector(server.ids(text), embedder).tolist() for text in TEXTS]
        create = server.openai.embeddings.create
        several = await create(model="model", input=TEXTS)
        assert told(several) == expected
        assert several.model == "model"
        assert several.usage.prompt_tokens == sum(len(server.ids(text)) for text in TEXTS)
        assert several.usage.total_tokens == several.usage.prompt_tokens
        assert told(await create(model="model", input=TEXTS[1])) == [expected[1]]
        numbers = await create(model="model", input=TEXTS, encoding_format="float")
        assert told(numbers) == expected
        ids = [server.ids(text) for text in TEXTS]
        assert told(await create(model="model", input=ids)) == expected
        assert told(await create(model="model", input=ids[0])) == [expected[0]]


async def test_base64_is_of_little_endian_float32(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        [text] = vectors(await server.post(input="ab", encoding_format="base64"))
        assert isinstance(text, str)
        own = vector(server.ids("ab"))
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), own)


async def test_special_tokens_are_as_they_are_asked_for(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        answer = await server.post(input="ab", add_special_tokens=False)
        [found] = vectors(answer)
        ids = server.ids("ab", special=False)
        assert found == vector(ids).tolist()
        assert answer.json()["usage"]["prompt_tokens"] == len(ids)


async def test_texts_may_be_objects_beside_tokens(model_folder: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with serving(model_folder) as server:
        own = vector(server.ids("ab")).tolist()
        same = [{"content": parts}, {"prompt_string": "ab"}, "ab", server.ids("ab")]
        assert vectors(await server.post(input=same)) == [own] * 4
        assert vectors(await server.post(input={"content": parts})) == [own]
        told = await server.post("/embedding", content=same)
        assert [one["embedding"] for one in told.json()] == [[own]] * 4
        image = {"content": [*parts, {"type": "image_url", "image_url": {"url": "data:,"}}]}
        error = (await server.post(input=image)).json()["error"]
        assert "text alone" in error["message"]
        assert error["param"] == "input"


async def test_vectors_are_cut_where_the_model_lets_them(model_folder: Path) -> None:
    async with serving(model_folder, ANY) as server:
        answer = await server.openai.embeddings.create(model="model", input="ab", dimensions=3)
        [found] = told(answer)
        ids = server.ids("ab")
        assert found == vector(ids, ANY, params=PoolingParams(3)).tolist()
        assert sum(one * one for one in found) == pytest.approx(1, rel=1e-6)
        error = error_of(await server.post(input="ab", dimensions=9), 400)
        assert error["param"] == "dimensions"
    async with serving(model_folder) as server:
        with pytest.raises(BadRequestError, match="Matryoshka"):
            await server.openai.embeddings.create(model="model", input="ab", dimensions=3)


async def test_lengths_are_left_where_that_is_asked_for(model_folder: Path) -> None:
    plain = Embedder(normalized=False)
    async with serving(model_folder) as server:
        own = vector(server.ids("ab"), plain).tolist()
        assert vectors(await server.post(input="ab", normalize=False)) == [own]
        assert vectors(await server.post(input="ab", use_activation=False)) == [own]
        unit = vector(server.ids("ab")).tolist()
        assert vectors(await server.post(input="ab", normalize=True)) == [unit]
        error = error_of(await server.post(input="ab", normalize=True, use_activation=True), 400)
        assert error["param"] == "use_activation"


async def test_long_texts_are_cut_if_that_is_asked_for(model_folder: Path) -> None:
    async with serving(model_folder, max_model_len=20) as server:
        text = "abcdefghij" * 5
        ids = server.ids(text)
        assert len(ids) > 20
        error = error_of(await server.post(input=ids), 400)
        assert f"{len(ids)} prompt tokens, and the context length is 20" in error["message"]
        assert error["code"] == "context_length_exceeded"
        for given, kept in ((-1, ids[:20]), (5, ids[:5])):  # the end is cut, as vLLM does
            answer = await server.post(input=text, truncate_prompt_tokens=given)
            assert vectors(answer) == [vector(kept).tolist()]
            assert answer.json()["usage"]["prompt_tokens"] == len(kept)
        answer = await server.post(input=ids, truncate_prompt_tokens=5, truncation_side="left")
        assert vectors(answer) == [vector(ids[-5:]).tolist()]
        error = error_of(await server.post(input=ids, truncate_prompt_tokens=0), 400)
        assert error["param"] == "truncate_prompt_tokens"
        assert vectors(await server.post(input=ids[:20])) == [vector(ids[:20]).tolist()]


async def test_a_conversation_is_embedded_as_its_template_writes_it(model_folder: Path) -> None:
    messages = [{"role": "user", "content": "ab"}]
    async with serving(model_folder) as server:
        template = ChatTemplate.read(model_folder)
        text = template.render(messages, (), False)
        [found] = vectors(await server.post(messages=messages))
        assert found == vector(server.ids(text, special=False)).tolist()
        begun = template.render(messages, (), True)
        [found] = vectors(await server.post(messages=messages, add_generation_prompt=True))
        assert found == vector(server.ids(begun, special=False)).tolist()
        for body, words in (
            ({}, "send either input"),
            ({"input": "a", "messages": messages}, "send either input"),
            ({"input": "a", "add_generation_prompt": True}, "goes with messages"),
        ):
            assert words in error_of(await server.post(**body), 400)["message"]


async def test_what_is_cached_is_told(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        for cached in (0, 8):
            answer = await server.post(input=list(range(9)))
            assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_metrics_count_them_as_other_requests(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        await server.post(input=[[1, 2, 3], [4, 5]])
        text = (await server.http.get("/metrics")).text
        found = {
            name: value
            for name, _, value in (line.rpartition(" ") for line in text.splitlines())
            if name.startswith("vllm:")
        }
        labels = 'engine="0",model_name="model"'
        counted = {
            f'vllm:request_success_total{{{labels},finished_reason="stop"}}': 2,
            f"vllm:prompt_tokens_total{{{labels}}}": 5,
            f"vllm:generation_tokens_total{{{labels}}}": 0,
            f"vllm:request_prompt_tokens_sum{{{labels}}}": 5,
            f"vllm:time_to_first_token_seconds_sum{{{labels}}}": 0,
            f"vllm:request_params_max_tokens_sum{{{labels}}}": 0,
        }
        flat = {_sorted(name): float(value) for name, value in found.items()}
        assert {name: flat[_sorted(name)] for name in counted} == counted


def _sorted(sample: str) -> tuple[str, tuple[str, ...]]:
    """A sample's name and labels, in whatever order."""
    name, _, labels = sample.partition("{")
    return name, tuple(sorted(labels.rstrip("}").split(",")))


async def test_an_adapter_is_picked_by_name(model_folder: Path) -> None:
    async with serving(model_folder, max_adapters=1) as server:
        plain = await server.post(input="ab", model="model")
        other = await server.post(input="ab", model="adapter")
        assert vectors(plain) != vectors(other)
        assert other.json()["model"] == "adapter"
        error = error_of(await server.post(input="ab", model="neither"), 404)
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "at least one token"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [[]]}, "input", "input is empty"),
        ({"input": [["a"]]}, "input", "should be a text"),
        ({"input": 5}, "input", "should be a text"),
        ({"input": [512]}, "input", "tokens are 0 to 511"),
        ({"input": ["a"] * 9}, "input", "9 prompts, and this server lets 8 wait"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float', 'base64', 'bytes'"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": "8"}, "dimensions", "integer"),
        ({"input": "a", "stream": True}, "stream", "unknown field"),
        ({"input": "a", "max_tokens": 3}, "max_tokens", "unknown field"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "goes with encoding_format"),
        ({"input": "a", "endianness": "big"}, "endianness", "goes with encoding_format"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype", "'fp8_e5m2'"),
        ({"input": "a", "priority": 1}, "priority", "serves by arrival"),
        ({"input": "a", "timeout_s": -1}, "timeout_s", "timeout_s"),
        ({"input": "a", "request_id": "\n"}, "request_id", "visible characters"),
    ],
)
async def test_what_means_nothing_is_refused(
    model_folder: Path, body: dict[str, Any], param: str, words: str
) -> None:
    async with serving(model_folder, max_queued_requests=8) as server:
        error = error_of(await server.post(**body), 400)
        assert error["param"] == param
        assert words in error["message"]


async def test_what_changes_nothing_is_taken(model_folder: Path) -> None:
    neutral = {"embed_dtype": "float32", "endianness": "little", "metadata": {"a": "b"}, "x": None}
    async with serving(model_folder, scheduling_policy="priority") as server:
        answer = await server.post(
            input="ab", user="me", priority=2, request_id="mine", cache_salt="s", **neutral
        )
        assert vectors(answer) == [vector(server.ids("ab")).tolist()]
        assert answer.headers["x-request-id"] == "mine"
        assert answer.json()["id"] == "embd-mine"


async def test_who_embeds_nothing_says_how_to_change_that(model_folder: Path) -> None:
    async with serving(model_folder, None) as server:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/embedding", {"content": "a"})):
            error = error_of(await server.post(path, **body), 400)
            assert "start it with --embeddings" in error["message"]


async def test_who_generates_nothing_says_where_to_go(model_folder: Path) -> None:
    async with serving(model_folder, Embedder(generates=False)) as server:
        error = error_of(await server.post("/v1/completions", prompt="a"), 400)
        assert "send the text to /v1/embeddings" in error["message"]


async def test_keys_are_asked_for_and_are_tenants(model_folder: Path) -> None:
    options = AppOptions(api_keys=("key-a", "key-b"))
    async with serving(model_folder, options=options, scheduling_policy="fair") as server:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/embedding", {"content": "a"})):
            assert (await server.post(path, **body)).status_code == 401
            assert (await server.post(path, key="key-b", **body)).status_code == 200
        assert (await server.openai.embeddings.create(model="model", input="a")).data


async def test_a_request_that_fails_has_an_error(model_folder: Path) -> None:
    async with serving(model_folder, fails=lambda run: True) as server:
        error = error_of(await server.post(input=["ab", "b"]), 500)
        assert error["type"] == "server_error"
    async with serving(model_folder, latency_s=0.05, max_num_batched_tokens=8) as server:
        body = {"input": list(range(100)), "timeout_s": 0.1}
        assert error_of(await server.post(**body), 504)["code"] == "request_timeout"


async def test_llama_cpps_form_is_a_matrix_of_one_row(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        own = [vector(server.ids(text)).tolist() for text in TEXTS]
        for path in ("/embedding", "/embeddings"):
            for name in ("content", "input"):
                answer = await server.post(path, **{name: TEXTS})
                assert answer.json() == [
                    {"index": index, "embedding": [each]} for index, each in enumerate(own)
                ]
        plain = vector(server.ids("ab"), Embedder(normalized=False)).tolist()
        answer = await server.post("/embedding", content="ab", embd_normalize=-1)
        assert answer.json() == [{"index": 0, "embedding": [plain]}]
        for kind, length in (
            (0, max(map(abs, plain)) / 32760),
            (1, sum(map(abs, plain))),
            (2, math.hypot(*plain)),
            (3, sum(abs(each) ** 3 for each in plain) ** (1 / 3)),
            (2**31 - 1, max(map(abs, plain))),  # as good as the largest number
        ):
            answer = await server.post("/embedding", content="ab", embd_normalize=kind)
            wanted = [each / length for each in plain]
            assert answer.json()[0]["embedding"][0] == pytest.approx(wanted, rel=1e-6)
        for body, param in (
            ({}, "content"),
            ({"content": "a", "input": "a"}, "content"),
            ({"content": ""}, "content"),
            ({"content": []}, "content"),
            ({"content": "a", "embd_normalize": -2}, "embd_normalize"),
            ({"content": "a", "embd_normalize": 2**31}, "embd_normalize"),
            ({"content": "a", "embd_normalize": 1.5}, "embd_normalize"),
            ({"content": "a", "encoding_format": "float"}, "encoding_format"),
        ):
            assert error_of(await server.post("/embedding", **body), 400)["param"] == param


async def test_between_two_vectors_it_is_the_turn_of_others() -> None:
    """Of which all are told as one call would tell them."""
    turns: list[int] = []

    async def other() -> None:
        while True:
            turns.append(len(told))
            await asyncio.sleep(0)

    told: list[int] = []

    def tell(index: int, each: Any) -> Any:
        told.append(index)
        return {"index": index, "embedding": each.tolist()}

    given = [np.array([index, 0.1], np.float32) for index in range(5)]
    task = asyncio.create_task(other())
    found = await listed(given, tell)
    task.cancel()
    assert sorted({1, 2, 3, 4} - set(turns)) == []
    assert json.loads(found) == [tell(index, each) for index, each in enumerate(given)]
    assert await listed([], tell) == b"[]"


async def test_a_body_has_its_limit(model_folder: Path) -> None:
    async with serving(model_folder, options=AppOptions(max_body_bytes=100)) as server:
        assert (await server.post(input="a" * 200)).status_code == 413


async def test_clients_that_go_away_leave_nothing(model_folder: Path) -> None:
    async with serving(model_folder, latency_s=0.02, max_num_batched_tokens=8) as server:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.post(input=list(range(200))), 0.25)
        while server.worker.num_unfinished:
            await asyncio.sleep(0.005)
        assert server.worker.stats().finished["abort"] == 1
