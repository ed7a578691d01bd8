"""Adapters through `LLM` and through the asynchronous engine, which reads them elsewhere."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from onnxport.errors import (
    AdapterError,
    CapacityError,
    OnnxportError,
    RequestError,
    UnknownAdapterError,
)
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.engine import Engine
from onnxport.serving.growth import Growth
from onnxport.serving.llm import LLM
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.worker import AsyncEngine
from tests.serving.adapting import adapter_engine, random_tensors, write_adapter
from tests.serving.helpers import GREEDY, run, submit, tokens

PROMPT = [(i * 7) % 500 for i in range(22)]
LONG = SamplingParams(temperature=0.0, max_tokens=400)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_adapter(tmp_path / str(i), random_tensors(seed=i)) for i in range(3)]


def expected(folder: Path | None, params: SamplingParams = GREEDY) -> list[int]:
    """The tokens of a request that is alone."""
    engine = adapter_engine(num_blocks=512, max_num_batched_tokens=512)
    if folder is not None:
        engine.adapters.load("it", engine.adapters.read(folder))
    submit(engine, "a", PROMPT, params, adapter=None if folder is None else "it")
    return tokens(run(engine)["a"])


def test_offline(folders: list[Path]) -> None:
    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    with LLM.from_engine(adapter_engine()) as llm:
        for index, folder in enumerate(folders):
            llm.load_adapter(str(index), str(folder) if index else folder)
        assert [adapter.name for adapter in llm.adapters] == ["0", "1", "2"]
        options = [RequestOptions(adapter=name) for name in (None, "1", "0", "2")]
        outputs = llm.generate([prompt] * 4, GREEDY, options=options)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        wanted = (None, folders[1], folders[0], folders[2])
        assert found == [expected(folder) for folder in wanted]
        with pytest.raises(AdapterError, match="loaded already"):
            llm.load_adapter("0", folders[1])
        llm.load_adapter("0", folders[1], in_place=True)
        (output,) = llm.generate(prompt, GREEDY, options=RequestOptions(adapter="0"))
        assert list(output.outputs[0].token_ids) == expected(folders[1])
        llm.unload_adapter("0")
        with pytest.raises(RequestError, match="no adapter '0' is loaded; loaded are: '1', '2'"):
            llm.generate(prompt, GREEDY, options=RequestOptions(adapter="0"))


async def collect(
    worker: AsyncEngine, adapter: str | None, params: SamplingParams = GREEDY
) -> list[CompletionDelta]:
    stream = worker.stream(PROMPT, params, options=RequestOptions(adapter=adapter))
    return [delta async for delta in stream]


@pytest.mark.slow
async def test_adapters_come_and_go_while_requests_run(folders: list[Path]) -> None:
    async with AsyncEngine(adapter_engine(num_blocks=512, latency_s=0.001)) as worker:
        await worker.load_adapter("a", folders[0])
        first = asyncio.create_task(collect(worker, "a", LONG))
        base = asyncio.create_task(collect(worker, None, LONG))
        while not worker.stats().num_requests_running:
            await asyncio.sleep(0.001)
        assert worker.stats().adapter_requests == {"a": 1}
        loaded = await worker.load_adapter("b", folders[1])
        assert [adapter.name for adapter in worker.adapters] == ["a", "b"]
        assert loaded == worker.adapters[1]
        await worker.load_adapter("a", folders[2], in_place=True)
        assert tokens(await collect(worker, "b")) == expected(folders[1])
        assert tokens(await collect(worker, "a")) == expected(folders[2])
        await worker.unload_adapter("a")
        with pytest.raises(UnknownAdapterError):
            worker.stream(PROMPT, GREEDY, options=RequestOptions(adapter="a"))
        assert not first.done()
        assert tokens(await first) == expected(folders[0], LONG)
        assert tokens(await base) == expected(None, LONG)
        assert worker.stats().adapter_requests == {"b": 0}


async def test_what_is_refused_changes_nothing(folders: list[Path], tmp_path: Path) -> None:
    async with AsyncEngine(adapter_engine(max_adapters=1)) as worker:
        with pytest.raises(AdapterError, match="not a folder"):
            await worker.load_adapter("a", tmp_path / "none")
        with pytest.raises(UnknownAdapterError):
            await worker.unload_adapter("a")
        await worker.load_adapter("a", folders[0])
        with pytest.raises(CapacityError, match="all 1 slots"):
            await worker.load_adapter("b", folders[1])
        assert tokens(await collect(worker, "a")) == expected(folders[0])
    with pytest.raises(OnnxportError, match="closed"):
        await worker.load_adapter("b", folders[1])


async def test_folders_are_read_off_the_loop_and_loaded_in_the_engine_s_thread(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def noting(method: Any) -> Any:
        def call(self: AdapterRegistry, *args: Any, **more: Any) -> Any:
            names.append(threading.current_thread().name)
            return method(self, *args, **more)

        return call

    for name in ("read", "load", "unload"):
        monkeypatch.setattr(AdapterRegistry, name, noting(getattr(AdapterRegistry, name)))
    async with AsyncEngine(adapter_engine()) as worker:
        await worker.load_adapter("a", folders[0])
        await worker.unload_adapter("a")
    reader, *others = names
    assert reader == "onnxport-reading"
    assert others == ["onnxport-engine"] * 2


async def test_an_engine_that_fails_lets_nobody_wait(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = threading.Event(), threading.Event()

    def bug(self: Engine) -> list[Growth]:
        entered.set()
        go.wait(5)
        raise LookupError("lost")

    monkeypatch.setattr(Engine, "advance", bug)
    worker = AsyncEngine(adapter_engine())
    stream = asyncio.create_task(collect(worker, None))
    await asyncio.to_thread(entered.wait, 5)
    loading = asyncio.create_task(worker.load_adapter("a", folders[0]))
    while not worker._calls:
        await asyncio.sleep(0.001)
    go.set()
    with pytest.raises(OnnxportError, match="LookupError: lost"):
        await loading
    await stream
    with pytest.raises(OnnxportError, match="has failed"):
        await worker.unload_adapter("a")
    await worker.close()


async def test_a_task_that_is_cancelled_waits_for_nothing(folders: list[Path]) -> None:
    async with AsyncEngine(adapter_engine(num_blocks=512, latency_s=0.05)) as worker:
        running = asyncio.create_task(collect(worker, None))
        while not worker.stats().num_requests_running:
            await asyncio.sleep(0.001)
        task = asyncio.create_task(worker.load_adapter("a", folders[0]))
        while not worker._calls:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tokens(await running) == expected(None)
        assert worker.healthy
        assert not worker._calls
