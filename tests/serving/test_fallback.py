"""A device is lost: another takes over and nobody loses a token, or everybody is told why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import CapacityError, DeviceLostError, ProviderError
from onnxport.providers.base import Model
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.fallback import Fallback, Standby
from onnxport.serving.llm import LLM
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.worker import AsyncEngine
from tests.serving.helpers import (
    GREEDY,
    alone,
    checked_step,
    never,
    null_engine,
    null_model,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.watch import Watch
from tests.tiers import examples

MIB = 1 << 20
PREFIX = [(i * 7) % 500 for i in range(64)]
THREE = SamplingParams(temperature=1.0, seed=5, max_tokens=10, n=3)


def at(number: int) -> Callable[[int], bool]:
    return lambda operation: operation == number


def spare(**options: Any) -> NullModel:
    return NullModel(NullOptions(**{"block_size": 4, "max_model_len": 512, **options}))


# Whatever happens, the tokens are the same.


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_loss_changes_no_token(data: st.DataObject) -> None:
    draw = data.draw
    prompts = draw(
        st.lists(
            st.tuples(st.integers(1, 60), st.integers(1, 3), st.integers(1, 8), st.integers(0, 1)),
            min_size=1,
            max_size=5,
        )
    )
    first = draw(st.sampled_from([(4, 40), (16, 9), (3, 48)]))
    second = draw(st.sampled_from([(4, 60), (8, 30), (32, 6), (1, 160)]))
    tier = draw(st.sampled_from([{}, {"preemption": "swap", "kv_host_memory": MIB}]))
    lost = draw(st.integers(4 if tier else 0, 40))  # the first four are the trial
    model = spare(
        block_size=second[0],
        num_blocks=second[1],
        max_batch_rows=draw(st.integers(1, 8)),
        max_batch_tokens=draw(st.sampled_from([None, 2, 7])),
    )
    engine = null_engine(
        block_size=first[0],
        num_blocks=first[1],
        max_num_seqs=4,
        max_num_batched_tokens=draw(st.sampled_from([4, 9, 40])),
        enable_prefix_caching=draw(st.booleans()) or bool(tier),
        lost_at=at(lost),
        fallbacks=[model],
        **tier,
    )
    watch = Watch(engine)
    wanted = {}
    for number, (length, n, max_tokens, temperature) in enumerate(prompts):
        params = SamplingParams(
            temperature=float(temperature), seed=number, max_tokens=max_tokens, n=n
        )
        prompt = [*PREFIX[: length - 1], number]
        submit(engine, str(number), prompt, params)
        wanted[str(number)] = [alone(prompt, params, index) for index in range(n)]
    deltas = run(engine)
    watch.check_all_ended()
    for name, expected in wanted.items():
        assert reasons(deltas[name]) == ["length"] * len(expected)
        assert [tokens(deltas[name], index) for index in range(len(expected))] == expected
    assert (null_model(engine) is model) == bool(engine.losses)


def test_completions_that_part_count_what_they_find_themselves() -> None:
    engine = null_engine(
        max_num_batched_tokens=8,
        lost_at=lambda _: losing,
        fallbacks=[spare(num_blocks=64, max_batch_rows=1)],
    )
    losing = False
    watch = Watch(engine)
    submit(engine, "first", PREFIX[:40])
    run(engine)
    submit(engine, "a", PREFIX, THREE)
    checked_step(engine)  # 40 tokens are found, some are computed
    losing = True
    deltas = run(engine)["a"]
    watch.check_all_ended()
    cached = {delta.index: delta.num_cached_tokens for delta in deltas}
    assert cached == {0: 40, 1: 60, 2: 60}  # the others find what the first one has computed
    assert [tokens(deltas, index) for index in range(3)] == [
        alone(PREFIX, THREE, index) for index in range(3)
    ]


# What the next provider cannot take.


def test_what_does_not_fit_ends_with_a_reason_or_gets_what_fits() -> None:
    small = spare(num_blocks=8)  # 32 tokens, and one more to generate
    engine = null_engine(lost_at=at(2), fallbacks=[small], max_num_batched_tokens=64)
    long, fits, short = [1] * 40, [2] * 20, [3] * 5
    submit(engine, "long", long)
    submit(engine, "fits", fits, SamplingParams(temperature=0.0, max_tokens=60, n=2))
    submit(engine, "short", short)
    deltas = run(engine)
    assert reasons(deltas["long"]) == ["error"]
    assert "has room for 33" in str(deltas["long"][-1].error)
    assert reasons(deltas["fits"]) == ["length"] * 2
    expected = alone(fits, SamplingParams(temperature=0.0, max_tokens=60))
    assert [tokens(deltas["fits"], index) for index in range(2)] == [expected[:13]] * 2
    assert tokens(deltas["short"]) == alone(short)
    with pytest.raises(CapacityError, match="the cache has 8"):
        engine.prepare("next", long, GREEDY)


def test_a_prompt_alone_that_takes_the_whole_context_moves_on() -> None:
    one = SamplingParams(temperature=0.0, max_tokens=1)
    engine = null_engine(lost_at=at(1), fallbacks=[spare(max_model_len=64)], max_model_len=64)
    submit(engine, "a", PREFIX, one, only_prompt=True)
    deltas = run(engine)["a"]
    assert tokens(deltas) == alone(PREFIX, one)
    assert [loss.replaced_by for loss in engine.losses] == ["null"]


def test_what_was_prepared_before_the_loss_runs_after_it() -> None:
    model = spare(block_size=16, num_blocks=8, max_batch_rows=2)
    engine = null_engine(lost_at=at(0), fallbacks=[model])
    prompts = {"long": [5] * 200, "wide": PREFIX[:9], "tail": PREFIX}
    prepared = {
        name: engine.prepare(name, prompt, THREE if name == "wide" else GREEDY)
        for name, prompt in prompts.items()
    }
    submit(engine, "first", [1, 2])
    run(engine)
    with pytest.raises(CapacityError, match="has room for 129"):
        engine.submit(prepared.pop("long"))
    for request in prepared.values():
        engine.submit(request)
    deltas = run(engine)
    assert tokens(deltas["tail"]) == alone(PREFIX)
    for index in range(3):
        assert tokens(deltas["wide"], index) == alone(PREFIX[:9], THREE, index)


def test_offline_outputs_are_complete_though_a_device_is_lost() -> None:
    engine = null_engine(
        max_num_seqs=1,
        max_queued_requests=1,
        lost_at=at(3),
        fallbacks=[spare(block_size=16, num_blocks=8)],
    )
    prompts = [[1, 2, 3], [5] * 200, PREFIX]
    with LLM.from_engine(engine) as llm:
        outputs = llm.generate([TokensPrompt(prompt_token_ids=one) for one in prompts], GREEDY)
    ends = [output.outputs[0].finish_reason for output in outputs]
    assert ends == ["length", "error", "length"]
    assert list(outputs[0].outputs[0].token_ids) == alone(prompts[0])
    assert "has room for 129" in str(outputs[1].outputs[0].error)
    assert list(outputs[2].outputs[0].token_ids) == alone(prompts[2])


# Nobody takes over.


class Sticky(NullModel):
    """Cannot even be closed once it is lost."""

    num_closed = 0

    def close(self) -> None:
        super().close()
        self.num_closed += 1
        if self.lost:
            raise ProviderError("the driver hangs")


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_without_a_fallback_everybody_ends_once(tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "none": {},
        "host": {"kv_host_memory": MIB, "preemption": "swap"},
        "disk": {"kv_disk": tmp_path},
    }
    engine = null_engine(model_type=Sticky, lost_at=at(5), max_num_seqs=4, **options[tier])
    model = null_model(engine)
    watch = Watch(engine)
    for index in range(6):
        submit(engine, str(index), [*PREFIX[:9], index], replace(THREE, n=1 + index % 3))
    deltas = run(engine)
    watch.check_all_ended()
    for index in range(6):
        assert reasons(deltas[str(index)]) == ["error"] * (1 + index % 3)
        for delta in deltas[str(index)]:
            if delta.finish_reason:
                assert "the device none (null) was lost" in str(delta.error)
                assert "start it again, or allow another provider" in str(delta.error)
    assert model.num_operations == 6  # nothing is tried on a device that is gone
    assert engine.failure is not None
    assert Counter(loss.replaced_by for loss in engine.losses) == {None: 1}
    stats = engine.stats()
    assert (stats.num_losses, stats.num_fallbacks, stats.num_failed_steps) == (1, 0, 1)
    with pytest.raises(DeviceLostError, match="none"):
        submit(engine, "late", [1])
    assert checked_idle(engine) == []
    engine.close()
    assert isinstance(model, Sticky)
    assert model.num_closed == 1


def checked_idle(engine: Engine) -> Sequence[object]:
    assert not engine.has_work
    engine.check()
    return engine.step()


def test_offline_prompts_that_were_not_begun_end_too() -> None:
    engine = null_engine(max_num_seqs=1, max_queued_requests=1, lost_at=at(3))
    with LLM.from_engine(engine) as llm:
        outputs = llm.generate([TokensPrompt(prompt_token_ids=[index]) for index in range(4)])
    for output in outputs:
        assert output.outputs[0].finish_reason == "error"
        assert "was lost" in str(output.outputs[0].error)


def with_standby(*loads: Callable[[], Model], **options: Any) -> Engine:
    model = NullModel(NullOptions(block_size=4, lost_at=options.pop("lost_at", never)))
    standby = Standby(tuple(Fallback(f"p{index}", load) for index, load in enumerate(loads)))
    return Engine(model, config=EngineConfig(8, 32, 0, **options), standby=standby)


def broken() -> Model:
    raise RuntimeError("no such driver")


def test_one_after_the_other_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    # With tiers, a block is moved for a trial before a model is taken.
    dead = spare(lost_at=at(1))
    brief, last = spare(block_size=2, lost_at=at(6)), spare(block_size=16)
    loads = (broken, lambda: dead, lambda: brief, lambda: last)
    engine = with_standby(*loads, lost_at=at(5), kv_host_memory=MIB)
    submit(engine, "a", PREFIX, THREE)
    deltas = run(engine)["a"]
    assert [tokens(deltas, index) for index in range(3)] == [
        alone(PREFIX, THREE, index) for index in range(3)
    ]
    assert engine.capabilities.block_size == 16
    assert dead.closed
    assert brief.closed
    assert not last.closed
    assert [loss.replaced_by for loss in engine.losses] == ["null", "null"]
    assert engine.losses[0].reason == "operation 5 was told to lose the device"
    assert "p0 cannot take over" in caplog.text
    assert "no such driver" in caplog.text
    engine.close()
    assert last.closed


def test_when_no_fallback_loads_all_reasons_are_told() -> None:
    dead = spare(lost_at=at(0))
    engine = with_standby(broken, lambda: dead, lost_at=at(4), kv_host_memory=MIB)
    submit(engine, "a", PREFIX, THREE)
    deltas = run(engine)["a"]
    assert reasons(deltas) == ["error"] * 3
    error = str(deltas[-1].error)
    assert "p0 could not take over: no such driver" in error
    assert "p1 could not take over: operation 0 was told" in error
    assert error == engine.failure
    engine.close()


# Streams.


async def last(worker: AsyncEngine, prompt: list[int]) -> CompletionDelta:
    return [delta async for delta in worker.stream(prompt, GREEDY)][-1]


async def test_a_stream_that_was_checked_before_the_loss_is_refused_after_it() -> None:
    engine = null_engine(lost_at=at(2), fallbacks=[spare(num_blocks=8)])
    async with AsyncEngine(engine) as worker:
        long = worker.stream([5] * 200, GREEDY)
        assert (await last(worker, [1])).finish_reason == "length"
        with pytest.raises(CapacityError, match="has room for 33"):
            await anext(long)
        assert (await last(worker, [2])).finish_reason == "length"
        assert worker.healthy
        assert [loss.replaced_by for loss in worker.losses] == ["null"]


async def test_streams_are_refused_at_once_when_nothing_took_over() -> None:
    async with AsyncEngine(null_engine(lost_at=at(2))) as worker:
        before = worker.stream([7], GREEDY)
        assert (await last(worker, [1])).finish_reason == "error"
        assert not worker.healthy
        assert "was lost" in str(worker.failure)
        with pytest.raises(DeviceLostError, match="was lost"):
            worker.stream([1], GREEDY)
        with pytest.raises(DeviceLostError, match="was lost"):
            await anext(before)
