"""`/pooling` with a vector, or numbers of labels, for each token."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.serving.http import classification
from onnxport.serving.pooling import Embedder
from tests.serving.classifying import ONE, THREE
from tests.serving.pooling import LAST, MEAN, states

from .test_errors import error_of
from .test_scoring import serving

TEXTS = ["ab", "the sea is wide and blue"]


def units(rows: Any) -> Any:
    rows = np.asarray(rows, np.float64)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("embedder", [LAST, MEAN])
async def test_each_token_has_a_vector(model_folder: Path, embedder: Embedder) -> None:
    """In chunks of 7 tokens, and whether its prefix is cached or not."""
    async with serving(
        model_folder, None, embedder, max_num_batched_tokens=7, max_num_seqs=4
    ) as server:
        expected = [units(states(server.ids(text))) for text in TEXTS]
        for _ in range(2):
            found = await server.answer("/pooling", input=TEXTS, task="token_embed")
            assert [one["object"] for one in found["data"]] == ["pooling"] * 2
            for one, own in zip(found["data"], expected, strict=True):
                np.testing.assert_array_equal(np.float32(one["data"]), own)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            await server.answer("/pooling", input=TEXTS)  # which caches, and reads the last alone
        raw = await server.answer("/pooling", input="ab", task="token_embed", use_activation=False)
        np.testing.assert_array_equal(
            np.float32(raw["data"][0]["data"]), states(server.ids("ab")).astype(np.float32)
        )


async def test_they_are_cut_and_written_as_others(model_folder: Path) -> None:
    async with serving(model_folder, None, Embedder(dimensions="any")) as server:
        how = {"input": "the sea", "task": "token_embed", "dimensions": 3}
        own = units(states(server.ids("the sea"))[:, :3])
        found = await server.answer("/pooling", **how)
        np.testing.assert_array_equal(np.float32(found["data"][0]["data"]), own)
        found = await server.answer("/pooling", **how, encoding_format="base64")
        octets = base64.b64decode(found["data"][0]["data"])
        np.testing.assert_array_equal(np.frombuffer(octets, "<f4").reshape(-1, 3), own)
        answer = await server.post("/pooling", **how, encoding_format="bytes")
        [one] = json.loads(answer.headers["metadata"])["data"]
        assert one["shape"] == list(own.shape)
        assert answer.content == own.tobytes()


@pytest.mark.parametrize("activated", [True, False])
async def test_each_token_has_labels(model_folder: Path, activated: bool) -> None:
    for classifier in (THREE, ONE):
        async with serving(
            model_folder, classifier, LAST, max_num_batched_tokens=7, max_num_seqs=4
        ) as server:
            how = {"task": "token_classify", "use_activation": activated}
            found = await server.answer("/pooling", input=TEXTS, **how)
            for text, one in zip(TEXTS, found["data"], strict=True):
                expected = [
                    classifier.judge(row, activated=activated) for row in states(server.ids(text))
                ]
                np.testing.assert_array_equal(np.float32(one["data"]), expected)


async def test_an_answer_has_its_limit(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "MOST_NUMBERS", 8 * 20)
    async with serving(model_folder, THREE, LAST, max_model_len=20) as server:
        ids = server.ids("abcdefgjkl")[:10]
        assert (
            await server.post("/pooling", input=[ids] * 2, task="token_embed")
        ).status_code == 200
        error = error_of(await server.post("/pooling", input=[ids] * 3, task="token_embed"), 400)
        assert "has 30 tokens, each of which would have 8 numbers" in error["message"]
        assert "20 tokens may be" in error["message"]
        await server.answer("/pooling", input=[ids] * 5, task="token_classify")
        await server.answer("/pooling", input=[ids] * 3)
        error = error_of(
            await server.post("/pooling", input="a", task="token_classify", dimensions=3), 400
        )
        assert error["param"] == "dimensions"
    async with serving(model_folder, None) as server:
        for task, words in (("token_embed", "--embeddings"), ("token_classify", "no score head")):
            assert (
                words
                in error_of(await server.post("/pooling", input="a", task=task), 400)["message"]
            )
