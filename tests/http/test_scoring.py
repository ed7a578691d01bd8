"""`/classify`, `/pooling`, `/score` and `/rerank`: what they take, tell and refuse."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.classifying import Classifier, similarity
from onnxport.serving.http import scoring
from onnxport.serving.http.app import AppOptions, create_app
from onnxport.serving.pooling import Embedder
from onnxport.serving.scoring import PairPlanner, StoppedError
from onnxport.serving.tokenizer import Tokenizer
from onnxport.serving.worker import AsyncEngine
from tests.serving.adapting import content
from tests.serving.classifying import ONE, PAIRS, THREE, WEIGHT, judged
from tests.serving.helpers import null_engine
from tests.serving.pooling import LAST, vector

from .test_errors import error_of

DOCUMENTS = ["ab", "the sea", "c"]
PROMPTED = Embedder.of(
    EmbeddingSpec(prompts={"query": "q:", "document": "d:"}, similarity="dot", max_tokens=12)
)
LLAMA = ("/reranking", "/v1/reranking")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")


class Server:
    """An application over an engine that judges, without a socket."""

    def __init__(self, worker: AsyncEngine, folder: Path, options: AppOptions | None) -> None:
        assert worker.tokenizer is not None
        self.tokenizer = worker.tokenizer
        app = create_app(worker, "model", ChatTemplate.read(folder), options)
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def post(self, path: str, key: str = "", **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.http.post(path, json=body, headers=headers)

    async def answer(self, path: str, **body: Any) -> Any:
        found = await self.post(path, **body)
        assert found.status_code == 200, found.text
        return found.json()

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special)

    def pair(self, query: str, document: str, instruction: str = "") -> list[int]:
        """The prompt of a pair, as the template of these tests writes it."""
        ahead = f"[{instruction}]" if instruction else ""
        return self.ids(f"{ahead}{query}? {document}.", special=False)

    def scores(self, query: str, documents: list[str], **options: Any) -> list[float]:
        return [
            float(judged(self.pair(query, document), PAIRS, **options)[0]) for document in documents
        ]


@asynccontextmanager
async def serving(
    folder: Path,
    classifier: Classifier | None = PAIRS,
    embedder: Embedder | None = None,
    options: AppOptions | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    tokenizer = Tokenizer.from_folder(folder, frozenset())
    engine = null_engine(classifier=classifier, embedder=embedder, tokenizer=tokenizer, **settings)
    if settings.get("max_adapters"):
        engine.adapters.load("adapter", content(3))
    async with AsyncEngine(engine) as worker:
        yield Server(worker, folder, options)


def as_parts(*texts: str) -> dict[str, Any]:
    """A text as vLLM's content of parts has it."""
    return {"content": [{"type": "text", "text": text} for text in texts]}


def ranking(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda number: -scores[number])


@pytest.mark.parametrize("path", RERANK)
async def test_the_best_document_comes_first(model_folder: Path, path: str) -> None:
    async with serving(model_folder) as server:
        found = await server.answer(path, model="model", query="why", documents=DOCUMENTS)
        scores = server.scores("why", DOCUMENTS)
        assert found["results"] == [
            {
                "index": index,
                "relevance_score": scores[index],
                "document": {"text": DOCUMENTS[index]},
            }
            for index in ranking(scores)
        ]
        count = sum(len(server.pair("why", one)) for one in DOCUMENTS)
        assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == count
        assert (found["model"], found["object"]) == ("model", "list")
        assert found["id"].startswith("rerank-")


async def test_documents_are_told_as_is_asked_for(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        scores = server.scores("why", DOCUMENTS)
        best = ranking(scores)
        mixed = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
        body = {"query": "why", "documents": mixed}
        for top, kept in ((1, best[:1]), (2, best[:2]), (0, best), (9, best)):
            found = await server.answer("/rerank", **body, top_n=top, return_documents=False)
            assert found["results"] == [
                {"index": index, "relevance_score": scores[index]} for index in kept
            ]
            as_tei = await server.answer("/rerank", query="why", texts=DOCUMENTS, top_n=top)
            assert as_tei == [{"index": index, "score": scores[index]} for index in kept]
        for path in LLAMA:
            found = await server.answer(path, **body)
            assert all("document" not in one for one in found["results"])
            found = await server.answer(path, **body, return_documents=True)
            assert all("document" in one for one in found["results"])


async def test_teis_form_is_a_list(model_folder: Path) -> None:
    async with serving(model_folder, num_blocks=256) as server:
        scores = server.scores("why", DOCUMENTS)
        body = {"query": "why", "texts": DOCUMENTS}
        assert await server.answer("/rerank", **body) == [
            {"index": index, "score": scores[index]} for index in ranking(scores)
        ]
        raw = server.scores("why", DOCUMENTS, activated=False)
        assert await server.answer("/rerank", **body, raw_scores=True, return_text=True) == [
            {"index": index, "score": raw[index], "text": DOCUMENTS[index]}
            for index in ranking(raw)
        ]
        long = {"query": "why", "texts": ["a" * 600]}
        error = error_of(await server.post("/rerank", **long), 400)
        assert error["code"] == "context_length_exceeded"
        [cut] = await server.answer("/rerank", **long, truncate=True)
        kept = server.pair("why", "a" * (512 - len(server.pair("why", ""))))
        assert cut["score"] == judged(kept, PAIRS)[0]


async def test_an_instruction_is_for_the_template(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        found = await server.answer("/score", text_1="a", text_2="b", instruction="find")
        assert found["data"][0]["score"] == judged(server.pair("a", "b", "find"), PAIRS)[0]
    async with serving(model_folder, ONE) as server:
        found = await server.answer("/score", text_1="a", text_2="b")
        ids = server.tokenizer.encode_pair("a", "b")
        assert found["data"][0]["score"] == judged(ids, ONE)[0]
        body = {"query": "a", "documents": ["b"], "instruction": "find"}
        error = error_of(await server.post("/rerank", **body), 400)
        assert error["param"] == "instruction"
        assert "--score-template" in error["message"]


async def test_documents_are_cut_where_that_is_asked_for(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        frame = len(server.pair("why", ""))
        for further, kept in (
            ({"truncate_prompt_tokens": frame + 2}, "the"[:2]),
            ({"max_tokens_per_doc": 3}, "the"),
            ({"max_tokens_per_doc": 3, "truncate_prompt_tokens": frame + 1}, "t"),
        ):
            found = await server.answer("/rerank", query="why", documents=["the sea"], **further)
            [one] = found["results"]
            assert one["relevance_score"] == server.scores("why", [kept])[0]
            assert one["document"] == {"text": "the sea"}
        body = {"query": "why", "documents": ["a"], "truncate_prompt_tokens": frame - 1}
        error = error_of(await server.post("/rerank", **body), 400)
        assert "without anything of the document" in error["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_pairs_are_scored_in_their_order(model_folder: Path, path: str) -> None:
    async with serving(model_folder) as server:
        scores = server.scores("why", DOCUMENTS)
        for body in (
            {"text_1": "why", "text_2": DOCUMENTS},
            {"text_1": ["why"] * 3, "text_2": DOCUMENTS},
            {"queries": "why", "documents": DOCUMENTS},
            {"data_1": ["why"], "data_2": DOCUMENTS},
            {"queries": ["why"], "items": DOCUMENTS, "truncation_side": "right"},
            {"queries": as_parts("why"), "items": list(map(as_parts, DOCUMENTS))},
        ):
            found = await server.answer(path, **body)
            assert found["data"] == [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ]
        raw = server.scores("why", ["ab"], activated=False)
        for name in ("use_activation", "activation"):
            found = await server.answer(path, text_1="why", text_2="ab", **{name: False})
            assert [one["score"] for one in found["data"]] == raw


async def test_vectors_are_compared_where_there_are_such(model_folder: Path) -> None:
    async with serving(model_folder, None, LAST) as server:
        vectors = [vector(server.ids(text)) for text in ("why", *DOCUMENTS)]
        scores = [similarity("cosine", vectors[0], one) for one in vectors[1:]]
        found = await server.answer("/score", text_1="why", text_2=DOCUMENTS)
        assert [one["score"] for one in found["data"]] == scores
        count = sum(len(server.ids(text)) for text in ("why", *DOCUMENTS))
        assert found["usage"]["prompt_tokens"] == count
        found = await server.answer("/rerank", query="why", documents=DOCUMENTS)
        assert [one["index"] for one in found["results"]] == ranking(scores)
    async with serving(model_folder, None, PROMPTED) as server:
        found = await server.answer("/rerank", query="why", documents=["ab", "cd"])
        query = vector(server.ids("q:why"), PROMPTED)
        for one in found["results"]:
            document = vector(server.ids(f"d:{one['document']['text']}"), PROMPTED)
            assert one["relevance_score"] == similarity("dot", query, document)
        error = error_of(await server.post("/score", text_1="a", text_2="b" * 20), 400)
        assert "max_seq_length" in error["message"]
        body = {"text_1": "a", "text_2": "b" * 20, "truncate_prompt_tokens": -1}
        found = await server.answer("/score", **body)
        cut = vector(server.ids("b" * 12), PROMPTED)
        first = vector(server.ids("a"), PROMPTED)
        assert found["data"][0]["score"] == similarity("dot", first, cut)


async def test_the_models_prompts_go_ahead_of_texts(model_folder: Path) -> None:
    async with serving(model_folder, None, PROMPTED) as server:
        for further, text in (
            ({}, "ab"),
            ({"prompt_name": "query"}, "q:ab"),
            ({"prompt_name": ""}, "ab"),
        ):
            for path, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
                found = await server.answer(path, input=["ab"], **further)
                assert found["data"][0][name] == vector(server.ids(text), PROMPTED).tolist()
        for body, words in (
            ({"input": "ab", "prompt_name": "title"}, "this model has 'query', 'document'"),
            ({"input": [1, 2], "prompt_name": "query"}, "goes with texts"),
            ({"messages": [{"role": "user", "content": "a"}], "prompt_name": "query"}, "goes with"),
        ):
            error = error_of(await server.post("/v1/embeddings", **body), 400)
            assert error["param"] == "prompt_name"
            assert words in error["message"]
        body = {"input": "b" * 20}
        error = error_of(await server.post("/v1/embeddings", **body), 400)
        assert "20 prompt tokens, and this model embeds 12 at most" in error["message"]
        found = await server.answer("/v1/embeddings", **body, truncate_prompt_tokens=-1)
        assert found["usage"]["prompt_tokens"] == 12
    default = Embedder(prompts={"a": "a:"}, default_prompt="a")
    async with serving(model_folder, None, default) as server:
        own = vector(server.ids("a:b")).tolist()
        found = await server.answer("/v1/embeddings", input="b")
        assert found["data"][0]["embedding"] == own
        found = await server.answer("/embedding", content="b")
        assert found[0]["embedding"] == [own]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/embedding"])
async def test_a_text_is_cut_behind_the_models_prompt(model_folder: Path, path: str) -> None:
    name = {"/v1/embeddings": "embedding", "/pooling": "data"}.get(path)
    async with serving(model_folder, None, PROMPTED) as server:
        for further, text in (
            ({"prompt_name": "query"}, "q:" + "abcdefgjkl"),
            ({"prompt_name": "query", "truncation_side": "left"}, "q:" + "cdefgjklmn"),
            ({"prompt_name": "query", "truncation_side": "right"}, "q:" + "abcdefgjkl"),
            ({"prompt_name": "query", "truncate_prompt_tokens": 3}, "q:a"),
            ({"prompt_name": "query", "truncate_prompt_tokens": 99, "input": "ab"}, "q:ab"),
            ({"truncate_prompt_tokens": 3}, "abc"),
            ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "lmn"),
        ):
            body = {"input": "abcdefgjklmn", "truncate_prompt_tokens": -1, **further}
            found = await server.answer(path, **body)
            own = vector(server.ids(text), PROMPTED).tolist()
            told = found["data"][0][name] if name else found[0]["embedding"][0]
            assert told == own, further
        body = {"input": "abcdef", "truncate_prompt_tokens": 2, "prompt_name": "query"}
        error = error_of(await server.post(path, **body), 400)
        assert "nothing of the text would be left" in error["message"]
        body = {"input": [1, 2, 3], "truncate_prompt_tokens": 2}
        await server.answer(path, **body)
        error = error_of(await server.post(path, **body, prompt_name="query"), 400)
        assert error["param"] == "prompt_name"


@pytest.mark.parametrize("special", [True, False])
async def test_special_tokens_of_a_cut_text_stay(model_folder: Path, special: bool) -> None:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.processors import TemplateProcessing

    fast = FastTokenizer.from_file(str(model_folder / "tokenizer.json"))
    ends = fast.token_to_id("<|im_end|>")
    fast.post_processor = TemplateProcessing(
        single="<|im_end|> $A <|im_end|>", special_tokens=[("<|im_end|>", ends)]
    )
    tokenizer = Tokenizer(fast)
    engine = null_engine(embedder=PROMPTED, tokenizer=tokenizer)
    async with AsyncEngine(engine) as worker:
        server = Server(worker, model_folder, None)
        for name, side, left in (
            ("query", "left", "q:f"),
            ("query", "right", "q:a"),
            ("", "right", "abc"),
        ):
            found = await server.answer(
                *("/v1/embeddings",),
                input="abcdef",
                prompt_name=name,
                truncation_side=side,
                truncate_prompt_tokens=5 if special else 3,
                add_special_tokens=special,
            )
            own = vector(server.ids(left, special=special), PROMPTED)
            assert found["data"][0]["embedding"] == own.tolist()


async def test_texts_have_labels(model_folder: Path) -> None:
    async with serving(model_folder, THREE) as server:
        found = await server.answer("/classify", model="model", input=DOCUMENTS)
        probs = [judged(server.ids(text), THREE) for text in DOCUMENTS]
        assert found["data"] == [
            {
                "index": index,
                "label": THREE.labels[int(one.argmax())],
                "probs": one.tolist(),
                "num_classes": 3,
            }
            for index, one in enumerate(probs)
        ]
        assert found["id"].startswith("classify-")
        assert found["object"] == "list"
        raw = judged(server.ids("ab"), THREE, activated=False).tolist()
        for name in ("use_activation", "activation"):
            found = await server.answer("/classify", input="ab", **{name: False})
            assert found["data"][0]["probs"] == raw
        messages = [{"role": "user", "content": "ab"}]
        text = ChatTemplate.read(model_folder).render(messages, (), False)
        found = await server.answer("/classify", messages=messages)
        own = judged(server.ids(text, special=False), THREE).tolist()
        assert found["data"][0]["probs"] == own
        ids = server.ids("abcdefgh")
        found = await server.answer("/classify", input=ids, truncate_prompt_tokens=3)
        assert found["data"][0]["probs"] == judged(ids[:3], THREE).tolist()


async def test_pooling_is_what_the_model_does(model_folder: Path) -> None:
    async with serving(model_folder, THREE, LAST) as server:
        probs = judged(server.ids("ab"), THREE)
        found = await server.answer("/pooling", input="ab")
        assert found["data"] == [{"index": 0, "object": "pooling", "data": probs.tolist()}]
        found = await server.answer("/pooling", input="ab", use_activation=False)
        raw = judged(server.ids("ab"), THREE, activated=False)
        assert found["data"][0]["data"] == raw.tolist()
        found = await server.answer("/pooling", input="ab", encoding_format="base64")
        text = found["data"][0]["data"]
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), probs)
        found = await server.answer("/pooling", input="ab", task="embed", normalize=False)
        own = vector(server.ids("ab"), Embedder(normalized=False))
        assert found["data"][0]["data"] == own.tolist()
        error = error_of(await server.post("/pooling", input="ab", dimensions=3), 400)
        assert error["param"] == "dimensions"
    async with serving(model_folder, None, LAST) as server:
        found = await server.answer("/pooling", input="ab")
        assert found["data"][0]["data"] == vector(server.ids("ab")).tolist()
        error = error_of(await server.post("/pooling", input="ab", task="classify"), 400)
        assert "has no score head" in error["message"]


async def test_who_cannot_says_how_to_change_that(model_folder: Path) -> None:
    pair = {"text_1": "a", "text_2": "b"}
    async with serving(model_folder, None) as server:
        for path, body, words in (
            ("/classify", {"input": "a"}, "has no score head"),
            ("/pooling", {"input": "a"}, "start it with --embeddings"),
            ("/score", pair, "compares no texts"),
            ("/rerank", {"query": "a", "documents": ["b"]}, "compares no texts"),
        ):
            assert words in error_of(await server.post(path, **body), 400)["message"]
    async with serving(model_folder, THREE) as server:
        error = error_of(await server.post("/score", **pair), 400)
        assert "3 labels" in error["message"]
    only = Classifier(THREE.labels, "softmax", WEIGHT, generates=False)
    async with serving(model_folder, only) as server:
        error = error_of(await server.post("/v1/completions", prompt="a"), 400)
        assert "/classify" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/score", {"text_2": "a"}, "text_1", "nothing was sent"),
        ("/score", {"text_1": "a"}, "text_2", "nothing was sent"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries", "send one of"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "as many of both"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "text_2 is empty"),
        ("/score", {"text_1": 3, "text_2": "a"}, "text_1", "should be"),
        ("/score", {"text_1": "a", "text_2": "b", "top_n": 1}, "top_n", "unknown field"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 9}, "text_2", "lets 8 wait"),
        (
            *("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}),
            *("truncate_prompt_tokens", "use 1 or more"),
        ),
        (
            *("/score", {"text_1": "a", "text_2": "b", "activation": 1, "use_activation": True}),
            *("activation", "valid boolean|two names"),
        ),
        ("/rerank", {"documents": ["a"]}, "query", "is missing"),
        ("/rerank", {"query": "a"}, "documents", "send documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "documents", "send doc"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("/rerank", {"query": "a", "texts": []}, "texts", "texts is empty"),
        ("/rerank", {"query": "a", "documents": ["b"] * 9}, "documents", "lets 8 wait"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater"),
        (
            *("/rerank", {"query": "a", "documents": [{"image": "b"}]}),
            *("documents", "should be a list of texts"),
        ),
        (
            *("/rerank", {"query": "a", "documents": ["b"], "return_text": True}),
            *("return_text", "does not go with documents"),
        ),
        (
            *("/rerank", {"query": "a", "texts": ["b"], "return_documents": True}),
            *("return_documents", "does not go with texts"),
        ),
        (
            *("/rerank", {"query": "a", "texts": ["b"], "truncate": True}),
            *("truncate", "say the same"),
        ),
        ("/classify", {"input": []}, "input", "input is empty"),
        ("/classify", {"input": "a", "dimensions": 3}, "dimensions", "unknown field"),
        ("/classify", {"input": "a", "priority": 1}, "priority", "serves by arrival"),
        (
            *("/classify", {"input": "a", "activation": True, "use_activation": True}),
            *("activation", "two names"),
        ),
        ("/pooling", {"input": "a", "task": "plugin"}, "task", "token_embed"),
    ],
)
async def test_what_means_nothing_is_refused(
    model_folder: Path, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    if body.get("truncate"):
        body = {**body, "truncate_prompt_tokens": 3}
    async with serving(model_folder, max_queued_requests=8) as server:
        error = error_of(await server.post(path, **body), 400)
        if param is not None:
            assert error["param"] == param
        assert any(word in error["message"] for word in words.split("|")), error


async def test_keys_adapters_and_tenants_are_as_elsewhere(model_folder: Path) -> None:
    options = AppOptions(api_keys=("key-a", "key-b"))
    bodies = {
        **{path: {"input": "a"} for path in ("/classify", "/pooling")},
        **{path: {"text_1": "a", "text_2": "b"} for path in ("/score", "/v1/score")},
        **{path: {"query": "a", "documents": ["b"]} for path in (*RERANK, *LLAMA)},
    }
    async with serving(
        model_folder, options=options, scheduling_policy="fair", max_adapters=1
    ) as server:
        for path, body in bodies.items():
            assert (await server.post(path, **body)).status_code == 401, path
            plain = await server.post(path, "key-a", **body, request_id="mine")
            assert plain.status_code == 200, path
            assert plain.headers["x-request-id"] == "mine"
            other = await server.post(path, "key-b", **body, model="adapter")
            assert other.json()["model"] == "adapter"
            assert plain.json() != other.json()
            error = error_of(await server.post(path, "key-a", **body, model="neither"), 404)
            assert error["code"] == "model_not_found"


async def test_what_is_judged_is_counted(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        found = await server.answer("/score", text_1="a" * 20, text_2=["b", "b"])
        again = await server.answer("/score", text_1="a" * 20, text_2="b")
        count = again["usage"]["prompt_tokens"]
        assert found["usage"]["prompt_tokens"] == 2 * count
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": (count - 1) // 4 * 4}
        text = (await server.http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total")]
        assert [float(line.rpartition(" ")[2]) for line in lines] == [3 * count]
        [done] = [
            line
            for line in text.splitlines()
            if line.startswith("vllm:request_success_total") and '"stop"' in line
        ]
        assert done.endswith(" 3.0")


async def test_pairs_have_so_many_tokens_in_all(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a pair may always be as long as the context."""
    monkeypatch.setattr(scoring, "MOST_TOKENS", 4)
    async with serving(model_folder, num_blocks=512) as server:
        body = {"query": "a" * 300, "documents": ["b"] * 4}
        error = error_of(await server.post("/rerank", **body), 400)
        assert "one request may have 1024 in all of its prompts" in error["message"]
        await server.answer("/rerank", **{**body, "documents": ["b"] * 3})


async def test_pairs_are_not_made_for_a_client_that_is_gone(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()
    stopped = []

    def plan(planner: Any, pairs: Any, params: Any, is_stopped: Any) -> Any:
        began.set()
        while not is_stopped() and len(stopped) < 500:
            stopped.append(time.sleep(0.01))
        ended.set()
        raise StoppedError("ended")

    monkeypatch.setattr(PairPlanner, "plan", plan)
    async with serving(model_folder) as server:
        asked = asyncio.ensure_future(server.post("/rerank", query="a", documents=["b"]))
        assert await asyncio.to_thread(began.wait, 10)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        assert await asyncio.to_thread(ended.wait, 10)
        assert len(stopped) < 500


async def test_it_runs_beside_what_generates(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        text = {"prompt": "ab", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        alone = (await server.answer("/v1/completions", **text))["choices"][0]["text"]
        completion, ranked = await asyncio.gather(
            server.answer("/v1/completions", **text),
            server.answer("/rerank", query="why", documents=DOCUMENTS),
        )
        assert completion["choices"][0]["text"] == alone
        scores = server.scores("why", DOCUMENTS)
        assert [one["index"] for one in ranked["results"]] == ranking(scores)


async def test_what_fails_is_an_error(model_folder: Path) -> None:
    async with serving(model_folder, fails=lambda run: True) as server:
        body = {"query": "a", "documents": ["b", "c"]}
        assert error_of(await server.post("/rerank", **body), 500)["type"] == "server_error"
    async with serving(model_folder, latency_s=0.05, max_num_batched_tokens=8) as server:
        body = {"text_1": "a" * 100, "text_2": "b", "timeout_s": 0.1}
        assert error_of(await server.post("/score", **body), 504)["code"] == "request_timeout"
    # A head whose numbers are beyond float32 judges nothing, and says so.
    huge = Classifier(("yes",), "none", WEIGHT[:1] * 1e300)
    async with serving(model_folder, huge) as server:
        assert error_of(await server.post("/classify", input="a"), 500)
