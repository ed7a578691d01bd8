"""The asynchronous engine: streaming, cancelling, closing, failing."""

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from onnxport.errors import CapacityError, OnnxportError, OverloadedError, RequestError
from onnxport.serving.engine import Engine
from onnxport.serving.growth import Growth
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.worker import AsyncEngine
from tests.serving.helpers import GREEDY, Clock, alone, null_engine, reasons, tokens
from tests.waiting import until

ENDLESS = SamplingParams(temperature=0.0, max_tokens=90_000)  # minutes, if nobody ends it
ENDLESS_3 = replace(ENDLESS, n=3)


async def collect(worker: AsyncEngine, prompt: list[int]) -> list[CompletionDelta]:
    return [delta async for delta in worker.stream(prompt, GREEDY)]


def endless_engine(**options: Any) -> Engine:
    """Return an engine with room for what is endless."""
    settings = {"num_blocks": 80_000, "max_model_len": 100_000, "latency_s": 0.001}
    return null_engine(**settings | options)


async def until_idle(worker: AsyncEngine) -> None:
    def is_idle() -> bool:
        stats = worker.stats()
        return not stats.num_requests_running and not stats.num_requests_waiting

    await until(is_idle)
    assert worker.stats().num_free_blocks == worker.stats().num_blocks


async def until_running(worker: AsyncEngine) -> None:
    await until(lambda: worker.stats().num_requests_running)


async def test_many_streams_at_once_get_their_own_tokens() -> None:
    prompts = [[i, i + 1, i + 2] * (1 + i % 5) for i in range(40)]
    async with AsyncEngine(null_engine(num_blocks=40)) as worker:
        results = await asyncio.gather(*(collect(worker, prompt) for prompt in prompts))
        await until_idle(worker)
    for prompt, deltas in zip(prompts, results, strict=True):
        assert tokens(deltas) == alone(prompt)
        assert [d.finish_reason is not None for d in deltas] == [False] * 11 + [True]


async def test_errors_are_raised_at_once_and_nothing_is_scheduled() -> None:
    async with AsyncEngine(null_engine()) as worker:
        with pytest.raises(RequestError, match="empty"):
            worker.stream([], GREEDY)
        with pytest.raises(CapacityError, match="context length"):
            worker.stream([1] * 600, GREEDY)
        assert worker.stats().prompt_tokens == 0


async def test_an_id_is_used_once_at_a_time() -> None:
    async with AsyncEngine(endless_engine()) as worker:
        first = worker.stream([1], ENDLESS, request_id="same")
        second = worker.stream([1], ENDLESS, request_id="same")
        assert (await anext(first)).request_id == "same"
        with pytest.raises(RequestError, match="in use"):
            await anext(second)
        with pytest.raises(RequestError, match="in use"):
            worker.stream([1], ENDLESS, request_id="same")
        await first.aclose()
        await until_idle(worker)
        assert [d.request_id async for d in worker.stream([1], GREEDY, "same")] == ["same"] * 12


async def test_closing_a_generator_aborts_its_request() -> None:
    async with AsyncEngine(endless_engine()) as worker:
        async with aclosing(worker.stream([1, 2], ENDLESS)) as stream:
            async for _ in stream:
                break
        await until_idle(worker)
        assert worker.stats().finished["abort"] == 1
        assert worker.stats().generation_tokens < ENDLESS.max_tokens


async def test_cancelling_tasks_aborts_waiting_and_running_requests() -> None:
    async def endless() -> None:
        async for _ in worker.stream([1, 2], ENDLESS):
            pass

    async with AsyncEngine(endless_engine(max_num_seqs=2)) as worker:
        tasks = [asyncio.create_task(endless()) for _ in range(6)]
        await until(lambda: worker.stats().num_requests_waiting == 4)
        other = asyncio.create_task(collect(worker, [7]))
        await until(lambda: worker.stats().num_requests_waiting == 5)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert tokens(await other) == alone([7])
        await until_idle(worker)
        assert worker.stats().finished["abort"] == 6


async def test_a_generator_that_is_never_started_costs_nothing() -> None:
    async with AsyncEngine(null_engine()) as worker:
        stream = worker.stream([1], GREEDY)
        await stream.aclose()
        assert worker.stats().prompt_tokens == 0


async def test_a_failed_step_reaches_its_streams_and_the_engine_goes_on() -> None:
    async with AsyncEngine(null_engine(fails=lambda run: run == 2)) as worker:
        deltas = await collect(worker, [1])
        assert deltas[-1].finish_reason == "error"
        assert deltas[-1].error == "ProviderError: run 2 was told to fail"
        assert tokens(await collect(worker, [2])) == alone([2])
        assert worker.healthy


async def test_what_a_dead_engine_leaves_is_counted() -> None:
    engine = null_engine(max_num_seqs=1)
    async with AsyncEngine(engine) as worker:

        def broken() -> Any:
            raise RuntimeError("a bug")

        engine._scheduler.plan = broken  # type: ignore[method-assign, assignment]
        streams = [collect(worker, [number]) for number in (1, 2)]
        for deltas in await asyncio.gather(*streams):
            assert deltas[-1].finish_reason == "error"
        assert not worker.healthy
        stats = worker.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
        assert (stats.num_free_blocks, stats.finished["error"]) == (stats.num_blocks, 2)


async def test_several_completions_are_one_stream() -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=9, n=3)
    async with AsyncEngine(endless_engine()) as worker:
        deltas = [delta async for delta in worker.stream([1, 2, 3, 4, 5], params)]
        assert sorted(reasons(deltas)) == ["length"] * 3
        for index in range(3):
            assert tokens(deltas, index) == alone([1, 2, 3, 4, 5], params, index)
        await until_idle(worker)
        async with aclosing(worker.stream([1, 2], ENDLESS_3)) as stream:
            seen = {(await anext(stream)).index for _ in range(6)}
        assert seen == {0, 1, 2}
        await until_idle(worker)
        assert worker.stats().finished["abort"] == 3


async def test_a_full_queue_refuses_at_once_and_takes_more_when_it_has_room() -> None:
    engine = endless_engine(max_num_seqs=1, max_queued_requests=2)
    async with AsyncEngine(engine) as worker:
        tasks = [asyncio.create_task(_last(worker)) for _ in range(3)]
        await until(
            lambda: worker.stats().num_requests_waiting + worker.stats().num_requests_running >= 2
        )
        refused = 0
        for _ in range(5):
            try:
                tasks.append(asyncio.create_task(_one(worker.stream([1], GREEDY))))
            except OverloadedError:
                refused += 1
            await asyncio.sleep(0.001)
        assert refused >= 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(worker)
        assert tokens(await collect(worker, [7])) == alone([7])


async def _one(stream: AsyncGenerator[CompletionDelta, None]) -> None:
    async for _ in stream:
        pass


async def test_a_timeout_is_the_last_delta() -> None:
    clock = Clock(tick_s=0.001)
    async with AsyncEngine(endless_engine(clock=clock, latency_s=0.0)) as worker:
        options = RequestOptions(timeout_s=0.1)
        deltas = [delta async for delta in worker.stream([1], ENDLESS, options=options)]
        assert reasons(deltas) == ["timeout"]
        found = tokens(deltas)
        assert found
        assert found == alone([1], replace(ENDLESS, max_tokens=len(found)))


async def test_close_aborts_what_is_left() -> None:
    worker = AsyncEngine(endless_engine())
    task = asyncio.create_task(_last(worker))
    await until_running(worker)
    await worker.close()
    assert (await task).finish_reason == "abort"
    assert not worker.healthy
    with pytest.raises(OnnxportError, match="closed"):
        worker.stream([1], GREEDY)
    await worker.close()


async def test_close_can_wait_for_what_is_left() -> None:
    worker = AsyncEngine(null_engine(latency_s=0.001))
    task = asyncio.create_task(collect(worker, [3]))
    await until(lambda: worker.stats().prompt_tokens)
    await worker.close(drain=True)
    assert tokens(await task) == alone([3])


async def test_close_ends_a_drain_that_takes_too_long() -> None:
    worker = AsyncEngine(endless_engine())
    task = asyncio.create_task(_last(worker))
    await until_running(worker)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await worker.close(drain=True)
    await worker.close()
    assert (await task).finish_reason == "abort"


async def _last(worker: AsyncEngine) -> CompletionDelta:
    deltas = [delta async for delta in worker.stream([1], ENDLESS)]
    return deltas[-1]


async def test_a_bug_in_the_engine_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(self: Engine) -> list[Growth]:
        raise LookupError("lost")

    monkeypatch.setattr(Engine, "advance", bug)
    worker = AsyncEngine(endless_engine())
    results = await asyncio.gather(*(_last(worker) for _ in range(3)), return_exceptions=True)
    for result in results:  # the last may come too late to be scheduled
        if isinstance(result, CompletionDelta):
            assert result.finish_reason == "error"
            assert "LookupError: lost" in str(result.error)
        else:
            assert isinstance(result, OnnxportError)
    assert isinstance(results[0], CompletionDelta)
    assert not worker.healthy
    with pytest.raises(OnnxportError, match="has failed"):
        worker.stream([1], GREEDY)
    await worker.close()


def test_an_event_loop_that_vanished_frees_its_requests() -> None:
    worker = AsyncEngine(endless_engine())
    loop = asyncio.new_event_loop()
    stream = worker.stream([1], ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(_idle_then_close(worker))
    del stream
    gc.collect()


async def _idle_then_close(worker: AsyncEngine) -> None:
    await until_idle(worker)
    assert tokens(await collect(worker, [5])) == alone([5])
    await worker.close()


async def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    async with AsyncEngine(null_engine()) as worker:
        await collect(worker, [1])
        assert "onnxport-engine" in {thread.name for thread in threading.enumerate()}
    assert "onnxport-engine" not in {thread.name for thread in threading.enumerate()}
    assert threading.active_count() <= before + 1  # asyncio keeps a helper of its own
