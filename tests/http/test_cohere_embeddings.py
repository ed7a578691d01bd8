"""`/v2/embed`: Cohere's form of embeddings."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from onnxport.serving.pooling import Embedder
from tests.serving.pooling import LAST, vector

from .test_embeddings import ANY, Server, serving
from .test_errors import error_of

PATH = "/v2/embed"
TEXTS = ["ab", "the sea"]


def told(answer: httpx.Response, kind: str = "float") -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["embeddings"][kind]


def expected(server: Server, *texts: str) -> list[list[float]]:
    return [vector(server.ids(text)).tolist() for text in texts]


async def test_vectors_of_texts(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        answer = await server.post(PATH, texts=TEXTS, model="model")
        body = answer.json()
        assert told(answer) == expected(server, *TEXTS)
        assert (body["response_type"], body["texts"]) == ("embeddings_by_type", TEXTS)
        assert body["id"].startswith("embd-")
        tokens = sum(len(server.ids(text)) for text in TEXTS)
        assert body["meta"]["billed_units"] == {"input_tokens": tokens, "image_tokens": 0}
        assert body["meta"]["api_version"] == {"version": "2"}
        plain = await server.post("/v1/embeddings", input=TEXTS)
        assert told(answer) == [one["embedding"] for one in plain.json()["data"]]


async def test_types_of_vectors(model_folder: Path) -> None:
    kinds = ["base64", "binary", "ubinary", "float", "float"]
    async with serving(model_folder, ANY) as server:
        answer = await server.post(PATH, texts=TEXTS, embedding_types=kinds, output_dimension=8)
        assert [*answer.json()["embeddings"]] == kinds[:-1]
        floats = np.array(told(answer), np.float32)
        assert floats.shape == (2, 8)
        read = [np.frombuffer(base64.b64decode(one), "<f4") for one in told(answer, "base64")]
        np.testing.assert_array_equal(read, floats)
        bits = [int("".join("01"[number >= 0] for number in one), 2) for one in floats.tolist()]
        assert told(answer, "ubinary") == [[one] for one in bits]
        assert told(answer, "binary") == [[one - 128] for one in bits]
        odd = {"embedding_types": ["binary"], "output_dimension": 7}
        assert "multiple of 8" in error_of(await server.post(PATH, texts=TEXTS, **odd))["message"]


async def test_prompts_by_the_type_of_input(model_folder: Path) -> None:
    prompts = {"query": "q: ", "passage": "p: ", "clustering": "c: "}
    embedder = Embedder(prompts=prompts, default_prompt="query")
    async with serving(model_folder, embedder) as server:
        for kind, ahead in (
            ("search_query", "q: "),
            ("search_document", "p: "),
            ("clustering", "c: "),
            ("passage", "p: "),
            (None, "q: "),
        ):
            answer = await server.post(PATH, texts=["ab"], input_type=kind)
            assert told(answer) == expected(server, f"{ahead}ab")
        error = error_of(await server.post(PATH, texts=["ab"], input_type="classification"))
        assert error["param"] == "input_type"
        assert "'query', 'passage', 'clustering'" in error["message"]
    async with serving(model_folder) as server:
        error = error_of(await server.post(PATH, texts=["ab"], input_type="search_query"))
        assert "it has none" in error["message"]


async def test_texts_that_are_too_long(model_folder: Path) -> None:
    async with serving(model_folder, max_model_len=20) as server:
        for how, left in (
            ({}, "abcd"),
            ({"truncate": "END"}, "abcd"),
            ({"truncate": "START"}, "cdef"),
        ):
            answer = await server.post(PATH, texts=["abcdef"], max_tokens=4, **how)
            assert told(answer) == expected(server, left)
        longest = server.worker.capabilities.max_model_len
        answer = await server.post(PATH, texts=["a" * 2 * longest])
        assert answer.status_code == 200, answer.text
        assert answer.json()["meta"]["billed_units"]["input_tokens"] <= longest
        whole = {"truncate": "NONE"}
        assert told(await server.post(PATH, texts=["abcd"], max_tokens=4, **whole))
        for body in ({"texts": ["abcdef"], "max_tokens": 4}, {"texts": ["a" * 2 * longest]}):
            assert (await server.post(PATH, **body, **whole)).status_code == 400


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"texts": None}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", 1]}, "texts"),
        ({"texts": [""]}, "texts"),
        ({"images": ["data:"]}, "images"),
        ({"inputs": [{"content": []}]}, "inputs"),
        ({"embedding_types": ["int8"]}, "embedding_types"),
        ({"embedding_types": []}, "embedding_types"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"output_dimension": 4}, "output_dimension"),
        ({"texts": ["a"] * 2000}, "texts"),
        ({"frob": 1}, "frob"),
    ],
)
async def test_what_is_refused(model_folder: Path, fields: dict[str, Any], name: str) -> None:
    async with serving(model_folder, LAST) as server:
        error = error_of(await server.post(PATH, **({"texts": ["ab"]} | fields)))
        assert str(error["param"]).startswith(name)
    async with serving(model_folder, None) as server:
        assert "--embeddings" in error_of(await server.post(PATH, texts=["ab"]))["message"]
