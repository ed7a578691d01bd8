"""Adapters in the engine: every request gets its own, whatever else is loaded, cached or running.

The null model's K/V and logits depend on the adapter of each row, and an empty slot is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import (
    AdapterError,
    CapacityError,
    DeviceLostError,
    OverloadedError,
    ProviderError,
    RequestError,
    UnknownAdapterError,
)
from onnxport.graphs.lora import LoraAdapter
from onnxport.providers.base import Capabilities
from onnxport.providers.null import NullModel
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from tests.graphs.artifacts import SPEC
from tests.serving.adapting import (
    adapter_engine,
    alone_with,
    content,
    null_options,
    random_tensors,
    write_adapter,
)
from tests.serving.helpers import (
    GREEDY,
    checked_step,
    null_engine,
    null_model,
    reasons,
    run,
    submit,
    tokens,
)
from tests.tiers import examples

MIB = 1 << 20
PROMPT = [(i * 7) % 500 for i in range(22)]
THREE = SamplingParams(temperature=1.0, seed=5, max_tokens=9, n=3)


def name_of(seed: int | None) -> str | None:
    return None if seed is None else str(seed)


def names(engine: Engine) -> list[str]:
    return [adapter.name for adapter in engine.adapters.loaded]


# Who gets which adapter.


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_whatever_is_in_the_batch_each_gets_its_own(data: st.DataObject) -> None:
    draw = data.draw
    seeds = st.sampled_from([None, 0, 1, 2])
    request = st.tuples(seeds, st.integers(1, 40), st.integers(1, 3), st.integers(1, 8))
    requests = draw(st.lists(request, min_size=1, max_size=6))
    tier: dict[str, Any] = draw(
        st.sampled_from([{}, {"preemption": "swap", "kv_host_memory": MIB}])
    )
    caching = draw(st.booleans()) or bool(tier)
    engine = adapter_engine(
        adapters=draw(st.permutations([0, 1, 2])),
        num_blocks=draw(st.sampled_from([14, 64])),
        max_num_seqs=4,
        max_num_batched_tokens=draw(st.sampled_from([4, 9, 40])),
        config={"enable_prefix_caching": caching, **tier},
    )
    long = [*PROMPT, *PROMPT]
    wanted = {}
    for number, (seed, length, n, max_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
        submit(engine, str(number), long[:length], params, adapter=name_of(seed))
        expected = alone_with(
            seed, long[:length], SamplingParams(temperature=0.0, max_tokens=max_tokens)
        )
        wanted[str(number)] = [expected] * n
    deltas = run(engine)
    for name, expected in wanted.items():
        assert [tokens(deltas[name], index) for index in range(len(expected))] == expected
    assert engine.adapters.num_requests == {"0": 0, "1": 0, "2": 0}


def test_the_tokens_differ_at_all() -> None:
    assert len({tuple(alone_with(seed, PROMPT)) for seed in (None, 0, 1, 2)}) == 4


def test_preemption_leaves_every_request_its_adapter() -> None:
    engine = adapter_engine(adapters=[0, 1, 2], num_blocks=16, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    for seed in (None, 0, 1, 2):
        submit(engine, str(seed), PROMPT, params, adapter=name_of(seed))
    deltas = run(engine)
    assert engine.stats().num_preemptions > 0
    for seed in (None, 0, 1, 2):
        assert tokens(deltas[str(seed)]) == alone_with(seed, PROMPT, params)


# The prefix cache.


def test_prefixes_are_shared_within_an_adapter_and_not_between() -> None:
    engine = adapter_engine(adapters=[0, 1])
    engine.adapters.load("same as 0", content(0))
    for index, adapter in enumerate((None, "0", "1", "0", "same as 0", None)):
        submit(engine, str(index), PROMPT, adapter=adapter)
        deltas = run(engine)[str(index)]
        seed = None if adapter is None else int(adapter[-1])
        assert tokens(deltas) == alone_with(seed, PROMPT)
        assert deltas[0].num_cached_tokens == (0 if index < 3 else 20)


def test_an_adapter_of_the_same_name_with_other_weights_finds_nothing() -> None:
    engine = adapter_engine(max_adapters=1)
    for seed, cached in ((0, 0), (1, 0), (0, 20)):
        engine.adapters.load("one", content(seed), in_place=True)
        submit(engine, "a", PROMPT, adapter="one")
        deltas = run(engine)["a"]
        assert tokens(deltas) == alone_with(seed, PROMPT)
        assert deltas[0].num_cached_tokens == cached


def test_what_is_on_disk_is_found_again_by_content(tmp_path: Path) -> None:
    config = {"kv_disk": tmp_path}
    for name, seed, cached in (("a", 0, 0), ("a", 1, 0), ("b", 0, 20), ("a", 1, 20)):
        engine = adapter_engine(config=config)
        engine.adapters.load("other", content(2))  # so that slots say nothing
        engine.adapters.load(name, content(seed))
        if seed:
            engine.adapters.unload("other")
        submit(engine, "x", PROMPT, adapter=name)
        deltas = run(engine)["x"]
        engine.close()
        assert tokens(deltas) == alone_with(seed, PROMPT)
        assert deltas[0].num_cached_tokens == cached


# Loading and unloading while requests run.


def test_an_unloaded_adapter_is_hidden_and_its_requests_go_on() -> None:
    engine = adapter_engine(adapters=[0], max_adapters=1)
    submit(engine, "a", PROMPT, THREE, adapter="0")
    deltas = checked_step(engine)
    engine.adapters.unload("0")
    assert engine.adapters.loaded == ()
    with pytest.raises(UnknownAdapterError, match="no adapter '0' is loaded; loaded are: none"):
        engine.prepare("b", PROMPT, GREEDY, options("0"))
    with pytest.raises(UnknownAdapterError):
        engine.adapters.unload("0")
    with pytest.raises(CapacityError, match=r"'0' \(unloaded, in use\)"):
        engine.adapters.load("1", content(1))
    deltas += [each for group in run(engine).values() for each in group]
    reference = adapter_engine(adapters=[0])
    submit(reference, "a", PROMPT, THREE, adapter="0")
    assert by_index(deltas) == by_index(run(reference)["a"])
    engine.adapters.load("1", content(1))  # its slot is free now
    submit(engine, "c", PROMPT, adapter="1")
    assert tokens(run(engine)["c"]) == alone_with(1, PROMPT)


def options(adapter: str | None) -> Any:
    from onnxport.serving.params import RequestOptions

    return RequestOptions(adapter=adapter)


def by_index(deltas: Sequence[Any]) -> list[list[int]]:
    return [tokens(deltas, index) for index in range(3)]


@pytest.mark.parametrize("end", ["abort", "close", "error"])
def test_a_slot_is_freed_however_its_requests_end(end: str) -> None:
    engine = adapter_engine(adapters=[0], max_adapters=1, fails=lambda run: end == "error")
    model = null_model(engine)
    submit(engine, "a", PROMPT, THREE, adapter="0")
    engine.adapters.unload("0")
    assert model._adapters
    if end == "abort":
        engine.abort("a")
    elif end == "close":
        engine.close()
    else:
        assert reasons(run(engine)["a"]) == ["error"] * 3
    assert not model._adapters


def test_a_replacement_runs_beside_what_it_replaces() -> None:
    engine = adapter_engine(adapters=[0], max_adapters=2)
    submit(engine, "old", PROMPT, adapter="0")
    first = checked_step(engine)
    with pytest.raises(AdapterError, match="is loaded already, from adapter-0; unload it first"):
        engine.adapters.load("0", content(1))
    engine.adapters.load("0", content(1), in_place=True)
    assert names(engine) == ["0"]
    submit(engine, "new", PROMPT, adapter="0")
    deltas = run(engine)
    assert tokens([*first, *deltas["old"]]) == alone_with(0, PROMPT)
    assert tokens(deltas["new"]) == alone_with(1, PROMPT)
    assert len(null_model(engine)._adapters) == 1
    engine.adapters.load("1", content(2))
    with pytest.raises(CapacityError, match=r"all 2 slots for adapters are taken: '0', '1'\."):
        engine.adapters.load("2", content(3))


def running_and_waiting(engine: Engine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    stats = engine.stats()
    assert stats.max_adapters == 4
    return stats.running_adapters, stats.waiting_adapters


def test_adapters_of_requests_that_run_and_wait_are_told() -> None:
    engine = adapter_engine(adapters=[0, 1, 2], max_num_seqs=2, max_num_batched_tokens=64)
    assert running_and_waiting(engine) == ((), ())
    for name, adapter in [("a", "1"), ("b", "0"), ("c", "1"), ("d", None)]:
        submit(engine, name, PROMPT, adapter=adapter)
    assert running_and_waiting(engine) == ((), ("0", "1"))
    checked_step(engine)
    assert running_and_waiting(engine) == (("0", "1"), ("1",))
    engine.abort("a")
    engine.adapters.load("0", content(3), in_place=True)
    submit(engine, "e", PROMPT, adapter="0")
    assert running_and_waiting(engine) == (("0",), ("0", "1"))  # two of one name
    run(engine)
    assert running_and_waiting(engine) == ((), ())


def test_an_idle_adapter_is_replaced_in_its_own_slot_when_no_other_is_free() -> None:
    engine = adapter_engine(adapters=[0], max_adapters=1)
    submit(engine, "a", PROMPT, adapter="0")
    checked_step(engine)
    with pytest.raises(CapacityError, match="all 1 slots"):
        engine.adapters.load("0", content(1), in_place=True)
    run(engine)
    engine.adapters.load("0", content(1), in_place=True)
    submit(engine, "b", PROMPT, adapter="0")
    assert tokens(run(engine)["b"]) == alone_with(1, PROMPT)


def test_what_was_prepared_gets_what_its_name_means_when_it_is_submitted() -> None:
    engine = adapter_engine(adapters=[0, 2], max_adapters=3)
    submit(engine, "first", PROMPT, adapter="2")
    run(engine)
    replaced = engine.prepare("a", PROMPT, THREE, options("0"))
    gone = engine.prepare("b", PROMPT, GREEDY, options("2"))
    engine.adapters.load("0", content(2), in_place=True)
    engine.adapters.unload("2")
    engine.adapters.load("3", content(3))
    engine.submit(replaced)
    with pytest.raises(UnknownAdapterError, match="no adapter '2' is loaded"):
        engine.submit(gone)
    deltas = run(engine)["a"]
    reference = adapter_engine(adapters=[2])
    submit(reference, "a", PROMPT, THREE, adapter="2")
    assert by_index(deltas) == by_index(run(reference)["a"])
    assert deltas[0].num_cached_tokens == 20  # of the same content


def test_requests_that_are_refused_hold_nothing() -> None:
    engine = adapter_engine(adapters=[0], config={"max_queued_requests": 1})
    submit(engine, "a", PROMPT, adapter="0")
    for name in ("a", "b"):
        with pytest.raises((RequestError, OverloadedError)):
            submit(engine, name, PROMPT, adapter="0")
    assert engine.adapters.num_requests == {"0": 1}
    run(engine)
    assert engine.adapters.num_requests == {"0": 0}


# What cannot be loaded.


def test_names_ranks_and_slots(tmp_path: Path) -> None:
    engine = adapter_engine(max_adapters=1)
    for name in ("", "a\nb", "x" * 257):
        with pytest.raises(AdapterError, match="cannot name an adapter"):
            engine.adapters.load(name, content(0))
    with pytest.raises(CapacityError, match=r"adapter-0 has rank 17.*up to 16.*max-lora-rank"):
        engine.adapters.load("big", content(0, rank=17))
    with pytest.raises(CapacityError, match="null was loaded without slots for adapters"):
        null_engine().adapters.load("a", content(0))
    with pytest.raises(AdapterError, match=r"does not know its model.s shapes"):
        null_engine().adapters.read(tmp_path)
    with pytest.raises(UnknownAdapterError, match="'nobody'"):
        engine.prepare("a", PROMPT, GREEDY, options("nobody"))
    read = engine.adapters.read(write_adapter(tmp_path, random_tensors(SPEC)))
    adapter = engine.adapters.load("real", read)
    assert (engine.adapters.slot_of(adapter), adapter.rank, adapter.path) == (1, 4, tmp_path)
    assert adapter.base_model == "example/tiny"
    assert engine.adapters.loaded == (adapter,)


class Stubborn(NullModel):
    """Fails the first times that an adapter is set, once it is told to."""

    failure: Exception | None = None
    attempts = 0
    failures = 1

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        self.attempts += 1
        if self.failure is not None and self.attempts <= self.failures:
            raise self.failure
        super().set_adapter(slot, adapter)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("failure", [ProviderError("device"), CapacityError("memory")])
def test_a_load_that_fails_changes_nothing(slots: int, failure: Exception) -> None:
    engine = adapter_engine(adapters=[0], max_adapters=slots, model_type=Stubborn)
    model = null_model(engine)
    assert isinstance(model, Stubborn)
    model.failure, model.attempts = failure, 0
    with pytest.raises(type(failure), match=str(failure)):
        engine.adapters.load("0", content(1), in_place=True)
    assert names(engine) == ["0"]
    submit(engine, "a", PROMPT, adapter="0")
    assert tokens(run(engine)["a"]) == alone_with(0, PROMPT)
    engine.adapters.load("0", content(1), in_place=True)
    submit(engine, "b", PROMPT, adapter="0")
    assert tokens(run(engine)["b"]) == alone_with(1, PROMPT)


def test_what_cannot_be_put_back_loses_its_slot(caplog: pytest.LogCaptureFixture) -> None:
    engine = adapter_engine(adapters=[0], max_adapters=1, model_type=Stubborn)
    model = null_model(engine)
    assert isinstance(model, Stubborn)
    model.failure, model.attempts, model.failures = ProviderError("device"), 0, 3
    with pytest.raises(ProviderError, match="device"):
        engine.adapters.load("0", content(1), in_place=True)
    assert "slot 1 for adapters could not be restored" in caplog.text
    [adapter] = engine.adapters.loaded
    assert not engine.adapters.has_slot(adapter.number)  # nobody knows what is there
    engine.check()
    model.failure = None
    submit(engine, "a", PROMPT, adapter="0")
    assert tokens(run(engine)["a"]) == alone_with(0, PROMPT)
    engine.adapters.load("0", content(1), in_place=True)
    submit(engine, "b", PROMPT, adapter="0")
    assert tokens(run(engine)["b"]) == alone_with(1, PROMPT)


def test_a_slot_that_cannot_be_emptied_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = adapter_engine(adapters=[0], max_adapters=1, model_type=Stubborn)
    model = null_model(engine)
    assert isinstance(model, Stubborn)
    model.failure, model.attempts = ProviderError("the driver sulks"), 0
    engine.adapters.unload("0")
    assert "slot 1 could not be emptied: the driver sulks" in caplog.text
    engine.adapters.load("1", content(1))
    submit(engine, "a", PROMPT, adapter="1")
    assert tokens(run(engine)["a"]) == alone_with(1, PROMPT)


# Another model takes over.


class Narrow(NullModel):
    """Takes adapters of rank 1."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_adapter_rank=1)

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        if adapter is not None and adapter.rank > 1:
            raise CapacityError(f"the adapter's rank is {adapter.rank}")
        super().set_adapter(slot, adapter)


@settings(max_examples=examples(30), deadline=None)
@given(lost=st.integers(0, 12), batched=st.sampled_from([4, 9, 40]), hidden=st.booleans())
def test_a_model_that_takes_over_gets_all_adapters(lost: int, batched: int, hidden: bool) -> None:
    spare = NullModel(null_options(block_size=8, num_blocks=40, max_adapters=3))
    engine = adapter_engine(
        adapters=[0, 1, 2],
        max_num_seqs=4,
        max_num_batched_tokens=batched,
        fallbacks=[spare],
        lost_at=lambda operation: operation == lost,
    )
    for seed in (None, 0, 1, 2):
        submit(engine, str(seed), PROMPT, adapter=name_of(seed))
    if hidden:  # its request still runs
        engine.adapters.unload("1")
    deltas = run(engine)
    for seed in (None, 0, 1, 2):
        assert tokens(deltas[str(seed)]) == alone_with(seed, PROMPT)
    assert null_model(engine) is spare
    assert len(spare._adapters) == 2 + (not hidden)
    engine.adapters.load("next", content(3), in_place=True) if hidden else None
    assert set(names(engine)) == ({"0", "2", "next"} if hidden else {"0", "1", "2"})


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_adapters_take_turns_where_a_model_with_fewer_slots_takes_over(
    num_slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    spare = NullModel(null_options(max_adapters=num_slots))
    engine = adapter_engine(
        adapters=[0, 1, 2, 3], fallbacks=[spare], lost_at=lambda operation: operation == 4
    )
    for seed in (1, 3, 2):  # which is used last; nobody uses 0
        submit(engine, str(seed), PROMPT, adapter=str(seed))
    deltas: dict[str, list[CompletionDelta]] = {}
    while null_model(engine) is not spare:
        for one in checked_step(engine):
            deltas.setdefault(one.request_id, []).append(one)
    slots = {one.name for one in engine.adapters.loaded if engine.adapters.has_slot(one.number)}
    assert slots == set(["2", "3", "1"][:num_slots])
    without = ", ".join(repr(name) for name in ["2", "3", "1", "0"][num_slots:])
    assert f"{num_slots} slots for adapters; without one are now: {without}" in caplog.text
    for name, more in run(engine).items():
        deltas[name] += more
    for seed in (1, 3, 2):
        assert tokens(deltas[str(seed)]) == alone_with(seed, PROMPT)
    assert set(names(engine)) == {"0", "1", "2", "3"}
    with pytest.raises(CapacityError, match="all 4 places for adapters in host memory are taken"):
        engine.adapters.load("next", content(4))
    engine.adapters.unload("1")
    engine.adapters.load("next", content(4))
    submit(engine, "next", PROMPT, adapter="next")
    submit(engine, "0", PROMPT, adapter="0")
    deltas = run(engine)
    assert tokens(deltas["next"]) == alone_with(4, PROMPT)
    assert tokens(deltas["0"]) == alone_with(0, PROMPT)


def test_a_model_without_slots_or_with_smaller_ones_cannot_take_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    none = NullModel(null_options(max_adapters=0))
    small = Narrow(null_options(max_adapters=2))
    good = NullModel(null_options(max_adapters=2))
    engine = adapter_engine(
        adapters=[0, 1], fallbacks=[none, small, good], lost_at=lambda operation: operation == 2
    )
    submit(engine, "a", PROMPT, adapter="1")
    assert tokens(run(engine)["a"]) == alone_with(1, PROMPT)
    assert null_model(engine) is good
    assert none.closed
    assert small.closed
    assert "2 adapters are loaded, and null was loaded without slots for any" in caplog.text
    assert "rank is 2" in caplog.text


def test_an_adapter_that_waits_and_is_too_large_for_who_takes_over_ends_its_requests() -> None:
    small = Narrow(null_options(max_adapters=1))
    engine = adapter_engine(
        max_adapters=1,
        config={"max_host_adapters": 2},
        fallbacks=[small],
        lost_at=lambda operation: operation == 1,
    )
    engine.adapters.load("small", content(0, rank=1))
    engine.adapters.load("large", content(1, rank=2))
    submit(engine, "a", PROMPT, adapter="small")
    submit(engine, "b", PROMPT, adapter="large")
    submit(engine, "c", PROMPT, adapter="large")
    deltas = run(engine)
    assert null_model(engine) is small
    assert reasons(deltas["a"]) == ["length"]
    for name in "bc":
        [ended] = deltas[name]
        assert ended.finish_reason == "error"
        assert ended.error is not None
        assert "has rank 2, and null, which took over, was loaded for ranks up to 1" in ended.error


def test_a_device_that_is_lost_while_an_adapter_is_loaded() -> None:
    spare = NullModel(null_options())
    engine = adapter_engine(
        adapters=[0],
        max_adapters=1,
        model_type=Stubborn,
        fallbacks=[spare],
        lost_at=lambda operation: operation == 0,
    )
    model = null_model(engine)
    assert isinstance(model, Stubborn)
    model.failure, model.attempts, model.failures = DeviceLostError("unplugged"), 0, 9
    with pytest.raises(DeviceLostError, match="unplugged"):
        engine.adapters.load("0", content(1), in_place=True)
    submit(engine, "a", PROMPT, adapter="0")
    assert tokens(run(engine)["a"]) == alone_with(0, PROMPT)
    assert null_model(engine) is spare
