"""`/score` and `/rerank`: texts, limits and variables of templates in vLLM's newer forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxport.serving.chat import ChatTemplate
from onnxport.serving.classifying import Classifier
from onnxport.serving.pairs import PairTemplate
from onnxport.serving.pooling import Embedder
from tests.serving.classifying import ONE, PAIRS, judged
from tests.serving.pooling import LAST

from .test_errors import error_of
from .test_scoring import as_parts, serving


def answers(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = body.get("data") or body["results"]
    return found


async def test_texts_in_vllms_forms(model_folder: Path) -> None:
    """One document may stand for a list of it, and 0 tokens of a text are any number."""
    async with serving(model_folder) as server:
        [score] = server.scores("why", ["ab"])
        for one in ("ab", ["ab"], {"text": "ab"}, as_parts("ab"), [as_parts("ab")]):
            body: dict[str, Any] = {
                "query": as_parts("why"),
                "documents": one,
                "max_tokens_per_doc": 0,
            }
            found = await server.answer("/rerank", **body, max_tokens_per_query=0)
            expected = {"index": 0, "relevance_score": score, "document": {"text": "ab"}}
            assert found["results"] == [expected]
        body = {"query": as_parts("w", "y"), "documents": as_parts("a", "b", "")}
        [one] = (await server.answer("/rerank", **body))["results"]
        assert one["document"] == {"text": "a\nb"}  # as vLLM joins them
        assert [one["relevance_score"]] == server.scores("w\ny", ["a\nb"])
        image = {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
        for body in ({"query": image, "documents": ["a"]}, {"query": "a", "documents": [image]}):
            assert (
                "reads text alone" in error_of(await server.post("/rerank", **body), 400)["message"]
            )


async def test_variables_of_the_score_template(model_folder: Path) -> None:
    reads = PairTemplate(
        ChatTemplate(
            {"default": "{{ instruction | default(kind, true) }}{{ messages[1].content }}"}
        )
    )
    judge = replace(PAIRS, template=reads)
    pair = {"text_1": "a", "text_2": "b"}
    async with serving(model_folder, judge) as server:
        given: dict[str, Any]
        for given, text in (
            ({"chat_template_kwargs": {"kind": "x"}}, "xb"),
            ({"instruction": "find"}, "findb"),
            ({"instruction": "find", "chat_template_kwargs": {"instruction": "go"}}, "gob"),
        ):
            found = await server.answer("/score", **pair, **given)
            own = judged(server.ids(text, special=False), PAIRS)[0]
            assert found["data"][0]["score"] == own, given
        given = {"chat_template_kwargs": {"instruction": 3}}
        assert "no text" in error_of(await server.post("/score", **pair, **given), 400)["message"]
        given = {"chat_template_kwargs": {"messages": []}}
        assert (
            "remove them" in error_of(await server.post("/score", **pair, **given), 400)["message"]
        )
    deaf = PairTemplate(
        ChatTemplate({"default": "{{ messages[-2].content ~ messages[-1].content }}"})
    )
    async with serving(model_folder, replace(PAIRS, template=deaf)) as server:
        error = error_of(await server.post("/score", **pair, instruction="find"), 400)
        assert error["param"] == "instruction"
        assert "does not write it" in error["message"]
    neither: list[tuple[Classifier | None, Embedder | None]] = [(ONE, None), (None, LAST)]
    for classifier, embedder in neither:
        async with serving(model_folder, classifier, embedder) as server:
            given = {"chat_template_kwargs": {"kind": "x"}}
            error = error_of(await server.post("/score", **pair, **given), 400)
            assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("vectors", [False, True])
async def test_queries_are_cut_where_that_is_asked_for(model_folder: Path, vectors: bool) -> None:
    models = (None, LAST) if vectors else (PAIRS, None)
    async with serving(model_folder, *models) as server:
        how = {"max_tokens_per_query": 3, "max_tokens_per_doc": 4}
        for path, body in (
            ("/score", {"queries": ["abcdef", "ab"], "documents": ["the sea"] * 2}),
            ("/rerank", {"query": "abcdef", "documents": ["the sea", "c"]}),
        ):
            long = await server.answer(path, **body, **how)
            short = json.loads(json.dumps(body).replace("abcdef", "abc").replace("the sea", "the "))
            expected = await server.answer(path, **short)
            assert [one.get("score", one.get("relevance_score")) for one in answers(long)] == [
                one.get("score", one.get("relevance_score")) for one in answers(expected)
            ]
            assert long["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
