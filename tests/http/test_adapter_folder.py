"""Adapters of a folder, which requests have loaded by naming them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from onnxport.errors import RequestError
from onnxport.graphs.spec import ArchSpec
from onnxport.serving.adapters.peft import AdapterContent, read_adapter
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.adapter_folder import AdapterFolder
from onnxport.serving.http.app import AppOptions, create_app
from onnxport.serving.http.batch_file import Line, answers
from onnxport.serving.pooling import Embedder
from onnxport.serving.tokenizer import Tokenizer
from onnxport.serving.worker import AsyncEngine
from tests.graphs.artifacts import SPEC
from tests.serving.adapting import content, random_tensors, write_adapter
from tests.serving.helpers import null_engine

from .test_errors import error_of

ASK: dict[str, Any] = {"prompt": "the sea", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@dataclass
class Server:
    http: httpx.AsyncClient
    worker: AsyncEngine
    reads: list[str]  # the names that were read, in their order
    app: ASGIApp

    async def ask(self, model: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """As a server asks: each request is a task of its own."""
        whole = {"model": model, **(ASK if path == "/v1/completions" else {}), **body}
        return await asyncio.create_task(self.http.post(path, json=whole))

    @property
    def loaded(self) -> list[str]:
        return [one.name for one in self.worker.adapters]


@asynccontextmanager
async def serving(
    model_folder: Path,
    folder: Path,
    max_adapters: int = 2,
    before: Callable[[str], object] = lambda name: None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """Run a server; `before` is told of each name that is read, in that thread."""
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    engine = null_engine(tokenizer=tokenizer, max_adapters=max_adapters, base=SPEC, **settings)
    reads: list[str] = []

    def read(path: Path, base: ArchSpec) -> AdapterContent:
        reads.append(path.stem)
        before(path.stem)
        return content(4) if path.suffix == ".gguf" else read_adapter(path, base)

    engine.adapters.reader = read
    async with AsyncEngine(engine) as worker:
        template = ChatTemplate.read(model_folder)
        app = create_app(worker, "model", template, AppOptions(lora_folder=folder))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Server(http, worker, reads, app)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("outer") / "adapters"
    for seed, name in enumerate(("a1", "a2", "org/a3", ".a5", "../a6")):
        write_adapter(root / name, random_tensors(seed=seed))
    write_adapter(root / "bad0", r=5)
    (root / "a4.gguf").write_bytes(b"")
    (root / "plain").mkdir()
    return root


async def test_a_request_has_its_adapter_loaded(model_folder: Path, folder: Path) -> None:
    embedder = Embedder()
    async with serving(model_folder, folder, max_adapters=4, embedder=embedder) as server:
        texts = {}
        for name in ("model", "a1", "a2", "org/a3", "a4"):
            answer = await server.ask(name)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            texts[name] = answer.json()["choices"][0]["text"]
        assert server.loaded == ["a1", "a2", "org/a3", "a4"]
        assert len(set(texts.values())) == len(texts)
        again = await server.ask("a1")
        assert again.json()["choices"][0]["text"] == texts["a1"]
        assert server.loaded == ["a1", "a2", "org/a3", "a4"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/completion", {"prompt": "a", "n_predict": 2}),
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/v2/embed", {"texts": ["a"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/tokenize", {"prompt": "a"}),
        ("/invocations", {"prompt": "a", "max_tokens": 2}),
    ],
)
async def test_each_endpoint_does_so(
    model_folder: Path, folder: Path, path: str, body: dict[str, Any]
) -> None:
    async with serving(model_folder, folder, embedder=Embedder()) as server:
        answer = await server.ask("a1", path, **body)
        assert answer.status_code == 200, answer.text
        assert server.loaded == ["a1"]


async def test_what_is_not_there_or_outside_is_unknown(model_folder: Path, folder: Path) -> None:
    async with serving(model_folder, folder) as server:
        for name in (
            "none",
            "plain",
            "org",
            ".a5",
            "../a6",
            "org/../a1",
            "/a1",
            "a1/",
            "a\\1",
            "x" * 999,
        ):
            error = error_of(await server.ask(name), 404)
            assert error["code"] == "model_not_found"
        error = error_of(await server.ask("bad0"), 400)
        assert "another rank than" in error["message"]
        assert server.loaded == []
    with pytest.raises(RequestError, match="is no folder"):
        AdapterFolder(folder / "none")


async def test_the_one_unused_for_the_longest_makes_room(model_folder: Path, folder: Path) -> None:
    async with serving(model_folder, folder) as server:
        for name, loaded in (
            ("a1", ["a1"]),
            ("a2", ["a1", "a2"]),
            ("a1", ["a1", "a2"]),
            ("org/a3", ["a1", "org/a3"]),
            ("a2", ["org/a3", "a2"]),
        ):
            assert (await server.ask(name)).status_code == 200
            assert server.loaded == loaded


async def test_those_in_use_and_those_of_others_stay(model_folder: Path, folder: Path) -> None:
    async with serving(model_folder, folder, latency_s=0.001) as server:
        await server.worker.load_adapter("mine9", folder / "org" / "a3")
        running = asyncio.create_task(server.ask("a1", max_tokens=200))
        while "a1" not in server.loaded:
            await asyncio.sleep(0)
        answer = await server.ask("a2")
        assert "the adapter 'a2' has no place now" in error_of(answer, 429)["message"]
        assert answer.headers["retry-after"] == "1"
        done = await running
        assert done.status_code == 200
        assert done.json()["usage"]["completion_tokens"] == 200
        assert (await server.ask("a2")).status_code == 200
        assert server.loaded == ["mine9", "a2"]


async def test_many_at_once_end_as_alone(model_folder: Path, folder: Path) -> None:
    """Each asks again where it is told to: none of them has another's answer, or is unknown."""
    names = ["a1", "a2", "org/a3", "a4"] * 4
    async with serving(model_folder, folder, max_adapters=2, max_num_seqs=4) as server:
        alone = {name: (await server.ask(name)).json()["choices"][0]["text"] for name in names}

        async def one(name: str) -> str:
            while (answer := await server.ask(name)).status_code == 429:
                await asyncio.sleep(0)
            assert answer.status_code == 200, answer.text
            text: str = answer.json()["choices"][0]["text"]
            return text

        found = await asyncio.gather(*map(one, names))
        assert found == [alone[name] for name in names]


async def test_one_that_was_unloaded_by_name_is_loaded_again(
    model_folder: Path, folder: Path
) -> None:
    async with serving(model_folder, folder) as server:
        await server.ask("a1")
        await server.worker.unload_adapter("a1")
        assert server.loaded == []
        assert (await server.ask("a1")).status_code == 200
        await server.ask("a2")
        await server.worker.unload_adapter("a1")
        assert (await server.ask("org/a3")).status_code == 200
        assert server.loaded == ["a2", "org/a3"]


async def test_one_that_somebody_loads_by_this_name_stays(model_folder: Path, folder: Path) -> None:
    async with serving(model_folder, folder, max_adapters=1) as server:
        await server.ask("a1")
        await server.worker.unload_adapter("a1")
        await server.worker.load_adapter("a1", folder / "a2")
        assert error_of(await server.ask("a2"), 429)
        assert server.loaded == ["a1"]


async def test_each_is_read_once(model_folder: Path, folder: Path) -> None:
    """By however many requests it is named at once; and not at all if it has no place."""
    async with serving(model_folder, folder, max_adapters=1, latency_s=0.001) as server:
        answers = await asyncio.gather(*(server.ask("a1") for _ in range(3)))
        assert [one.status_code for one in answers] == [200] * 3
        running = asyncio.create_task(server.ask("a1", max_tokens=100))
        await server.ask("a1")
        assert (await server.ask("a2")).status_code == 429
        assert not running.done()
        assert server.reads == ["a1"]
        await running
        assert (await server.ask("a2")).status_code == 200
        assert server.reads == ["a1", "a2"]


async def test_no_other_waits_for_one_that_is_read(model_folder: Path, folder: Path) -> None:
    """Neither those that are loaded, nor those that are not."""
    goes_on = threading.Event()

    def before(name: str) -> None:
        if name == "a2":
            assert goes_on.wait(60)

    async with serving(model_folder, folder, max_adapters=3, before=before) as server:
        try:
            await server.ask("a1")
            slow = [asyncio.create_task(server.ask("a2")) for _ in range(2)]
            while "a2" not in server.reads:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(30):
                for name in ("a1", "org/a3"):
                    assert (await server.ask(name)).status_code == 200
            assert not any(one.done() for one in slow)
        finally:
            goes_on.set()
        assert [(await one).status_code for one in slow] == [200, 200]
        assert server.reads == ["a1", "a2", "a3"]


async def test_somebody_else_loads_it_meanwhile(model_folder: Path, folder: Path) -> None:
    goes_on = threading.Event()

    def before(name: str) -> None:
        if name == "a1":
            assert goes_on.wait(60)

    async with serving(model_folder, folder, before=before) as server:
        asked = asyncio.create_task(server.ask("a1"))
        try:
            while "a1" not in server.reads:
                await asyncio.sleep(0.001)
            await server.worker.load_adapter("a1", folder / "a2")
        finally:
            goes_on.set()
        assert (await asked).status_code == 200


async def test_lines_of_a_batch_wait_for_a_place(model_folder: Path, folder: Path) -> None:
    """A line that is to be asked again has no place meanwhile."""
    names = ["a1", "a2", "org/a3", "model", "model", "a2", "org/a3"]
    async with serving(model_folder, folder, max_adapters=1, latency_s=0.001) as server:
        await server.ask("a1")
        bodies = [{**ASK, "model": name} for name in names]
        bodies[0]["max_tokens"] = 200  # until the last lines begin, and more
        lines = [
            Line(str(number), "/v1/completions", json.dumps(body).encode())
            for number, body in enumerate(bodies)
        ]
        async with asyncio.timeout(60):
            found = [one async for one in answers(server.app, lines, len(lines) - 2)]
        assert [one.status for one in found] == [200] * len(names), found
