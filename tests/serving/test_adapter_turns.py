"""More adapters than slots: who gets one, who waits for it, and that nobody waits for ever."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from onnxport.errors import AdapterError, CapacityError, DeviceLostError, ProviderError
from onnxport.graphs.lora import LoraAdapter
from onnxport.providers.null import NullModel
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.waiting import NO_BARS, Bars
from tests.serving.adapting import adapter_engine, alone_with, content, null_options
from tests.serving.helpers import GREEDY, checked_step, null_model, run, submit, tokens

PROMPT = [(i * 7) % 500 for i in range(22)]


def few_slots(adapters: int, slots: int, config: Any = (), **options: Any) -> Engine:
    return adapter_engine(
        adapters=range(adapters),
        max_adapters=slots,
        config={"max_host_adapters": adapters, **dict(config)},
        **options,
    )


def lengths(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


def in_slots(engine: Engine) -> set[str]:
    adapters = engine.adapters
    return {one.name for one in adapters.loaded if adapters.has_slot(one.number)}


@pytest.mark.parametrize("seed", range(24))
def test_each_gets_its_own_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    policy = ["fcfs", "priority", "fair"][seed % 3]
    spares = [NullModel(null_options(max_adapters=2, num_blocks=40))]
    engine = few_slots(
        5,
        2,
        {"scheduling_policy": policy},
        num_blocks=draw.choice([16, 64]),
        max_num_seqs=4,
        max_num_batched_tokens=draw.choice([4, 9, 40]),
        fallbacks=spares,
        lost_at=lambda operation: seed % 2 and operation == 11,
    )
    wanted, deltas = {}, []
    for number in range(14):
        adapter, n = draw.choice([None, *range(5)]), draw.randint(1, 3)
        prompt, params = PROMPT[: draw.randint(1, 22)], lengths(draw.randint(1, 9))
        several = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, n=n)
        priority = draw.randint(0, 2) if policy != "fcfs" else 0
        submit(
            engine,
            str(number),
            prompt,
            several,
            adapter=None if adapter is None else str(adapter),
            priority=priority,
            tenant=draw.choice("xyz"),
        )
        wanted[str(number)] = [alone_with(adapter, prompt, params)] * n
        for _ in range(draw.randint(0, 3)):
            deltas += checked_step(engine)
    deltas += [one for group in run(engine).values() for one in group]
    for name, expected in wanted.items():
        own = [one for one in deltas if one.request_id == name]
        assert [tokens(own, index) for index in range(len(expected))] == expected


@pytest.mark.parametrize("tier", [{}, {"preemption": "swap", "kv_host_memory": 1 << 20}])
def test_preempted_requests_get_a_slot_again(tier: dict[str, Any]) -> None:
    engine = few_slots(4, 2, tier, num_blocks=16, max_num_seqs=4)
    for seed in (0, 1, 2, 3):
        submit(engine, f"{seed}", PROMPT, lengths(30), adapter=str(seed))
        submit(engine, f"{seed}+", PROMPT[:9], lengths(30), adapter=str(seed))
    deltas = run(engine)
    assert engine.stats().num_preemptions > 0
    for seed in (0, 1, 2, 3):
        assert tokens(deltas[f"{seed}"]) == alone_with(seed, PROMPT, lengths(30))
        assert tokens(deltas[f"{seed}+"]) == alone_with(seed, PROMPT[:9], lengths(30))


def test_the_one_unused_for_longest_loses_its_slot() -> None:
    engine = few_slots(3, 2)
    assert in_slots(engine) == {"0", "1"}
    for adapter, left in (("0", {"0", "1"}), ("2", {"0", "2"}), ("1", {"1", "2"})):
        submit(engine, "a", PROMPT, adapter=adapter)
        run(engine)
        assert in_slots(engine) == left
    stats = engine.stats()
    assert (stats.num_adapters, stats.num_adapter_swaps) == (3, 2)


def test_a_slot_is_drained_for_who_waits_and_others_go_on() -> None:
    engine = few_slots(2, 1)
    submit(engine, "a", PROMPT, lengths(12), adapter="0")
    first = checked_step(engine)
    submit(engine, "wants", PROMPT, lengths(2), adapter="1")
    submit(engine, "same", PROMPT, lengths(2), adapter="0")
    submit(engine, "none", PROMPT, lengths(2))
    order = []
    while engine.has_work:
        deltas = checked_step(engine)
        first += deltas
        order += [one.request_id for one in deltas if one.finish_reason]
    assert order == ["none", "a", "wants", "same"]
    own = [one for one in first if one.request_id == "a"]
    assert tokens(own) == alone_with(0, PROMPT, lengths(12))


def test_others_yield_to_a_higher_priority_that_needs_a_slot() -> None:
    engine = few_slots(2, 1, {"scheduling_policy": "priority"}, max_num_seqs=2)
    for name in ("a", "b"):
        submit(engine, name, PROMPT, lengths(30), priority=1)
    deltas = [*checked_step(engine), *checked_step(engine)]
    assert engine.stats().num_requests_running == 2
    submit(engine, "urgent", PROMPT, lengths(2), adapter="1")
    while engine.has_work:
        deltas += checked_step(engine)
    ended = [one.request_id for one in deltas if one.finish_reason]
    assert ended[0] == "urgent"
    for name in ("a", "b"):
        own = [one for one in deltas if one.request_id == name]
        assert tokens(own) == alone_with(None, PROMPT, lengths(30))


def test_others_yield_to_a_request_behind_one_that_waits_for_a_slot() -> None:
    engine = few_slots(2, 1, {"scheduling_policy": "priority"}, max_num_seqs=2)
    submit(engine, "a", PROMPT, lengths(60), adapter="0", priority=1)
    submit(engine, "b", PROMPT, lengths(60), priority=1)
    deltas = [*checked_step(engine), *checked_step(engine)]
    submit(engine, "waits", PROMPT, lengths(2), adapter="1")
    deltas += checked_step(engine)
    submit(engine, "none", PROMPT, lengths(2))
    deltas += [one for group in run(engine).values() for one in group]
    for name, adapter, n in (("waits", 1, 2), ("none", None, 2), ("a", 0, 60), ("b", None, 60)):
        own = [one for one in deltas if one.request_id == name]
        assert tokens(own) == alone_with(adapter, PROMPT, lengths(n))
    assert engine.stats().num_preemptions == 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_of_requests_does_not_starve_who_waits(n: int) -> None:
    engine = few_slots(2, 1, max_num_seqs=4)
    submit(engine, "s0", PROMPT, lengths(6), adapter="0")
    checked_step(engine)
    several = SamplingParams(temperature=0.0, max_tokens=3, n=n)
    submit(engine, "wants", PROMPT, several, adapter="1")
    for number in range(1, 40):  # before one ends the next one comes
        submit(engine, f"s{number}", PROMPT[:3], lengths(6), adapter="0")
        if any(one.request_id == "wants" for one in checked_step(engine)):
            break
    assert number < 20
    run(engine)


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_stream_of_a_higher_priority_holds_up_its_own_slot_alone(policy: str) -> None:
    engine = few_slots(3, 2, {"scheduling_policy": policy})
    for name, adapter, priority in (("d", "0", 0), ("e", "1", 1), ("wants", "2", 1)):
        submit(engine, name, PROMPT[:5], lengths(12), adapter=adapter, priority=priority)
        checked_step(engine)
    for number in range(1, 60):  # before one of either ends the next one comes
        if number % 8 == 0:
            submit(engine, f"d{number}", PROMPT[:5], lengths(12), adapter="0", priority=0)
        if number % 8 == 4:
            submit(engine, f"e{number}", PROMPT[:5], lengths(12), adapter="1", priority=1)
        if any(one.request_id == "wants" for one in checked_step(engine)):
            break
    assert number < 20
    run(engine)


def test_nobody_passes_who_waits_where_both_slots_are_held_from_ahead_in_turns() -> None:
    engine = few_slots(3, 2, {"scheduling_policy": "priority"}, max_num_seqs=6)
    for name, adapter, priority in (("d", "0", 0), ("e", "1", 0), ("wants", "2", 1)):
        submit(engine, name, PROMPT[:5], lengths(14), adapter=adapter, priority=priority)
        checked_step(engine)
    submit(engine, "ahead 0", PROMPT[:5], lengths(14), adapter="0", priority=0)
    checked_step(engine)  # then the other slot is drained, too
    started = []
    for number in range(4, 80):
        if number % 4 == 0:
            adapter = str(number // 4 % 2)
            submit(engine, f"ahead {number}", [number], lengths(14), adapter=adapter, priority=0)
        if number % 5 == 0:
            adapter = str(number // 5 % 2)
            submit(engine, f"behind {number}", [number], lengths(2), adapter=adapter, priority=1)
        started += [one.request_id for one in checked_step(engine)]
    assert not [one for one in started if one.startswith(("behind", "wants"))]
    while engine.has_work:
        started += [one.request_id for one in checked_step(engine)]
    assert next(one for one in started if one.startswith(("behind", "wants"))) == "wants"


def test_a_slot_is_free_and_rows_are_not() -> None:
    engine = few_slots(2, 1, max_num_seqs=1)
    engine.adapters.unload("0")
    submit(engine, "run", PROMPT, lengths(9))
    deltas = checked_step(engine)
    submit(engine, "x", PROMPT)
    submit(engine, "y", PROMPT, adapter="1")
    deltas += [one for group in run(engine).values() for one in group]
    own = [one for one in deltas if one.request_id == "y"]
    assert tokens(own) == alone_with(1, PROMPT)


def test_a_backlog_of_one_tenant_does_not_starve_another() -> None:
    engine = few_slots(3, 1, {"scheduling_policy": "fair"}, max_num_seqs=2)
    numbers = iter(range(200))

    def submit_more(count: int) -> None:
        for _, number in zip(range(count), numbers, strict=False):
            adapter = str(number % 2)
            submit(engine, f"a{number}", PROMPT, lengths(4), adapter=adapter, tenant="a")

    submit_more(4)
    submit(engine, "wants", PROMPT[:9], lengths(2), adapter="2", tenant="b")
    for _ in range(30):
        submit_more(3)  # in as many steps as one takes: its line never ends
        if any(one.request_id == "wants" for _ in range(5) for one in checked_step(engine)):
            break
    else:
        pytest.fail("it waits for ever")
    run(engine)


def test_who_waits_for_a_slot_keeps_no_room_from_those_who_are_to_start_with_it() -> None:
    """Or neither of them starts before everybody else has ended."""
    engine = few_slots(2, 1, {"scheduling_policy": "fair"}, num_blocks=16, max_num_seqs=4)
    submit(engine, "runs", PROMPT[:3], lengths(50), tenant="x")
    checked_step(engine)
    long = [*PROMPT, *PROMPT[:18]]  # each needs ten blocks of sixteen
    submit(engine, "ahead", long, lengths(2), adapter="0", tenant="x")  # y's turn comes before
    submit(engine, "wants", long, lengths(2), adapter="1", tenant="y")
    ended = []
    while engine.has_work:
        ended += [one.request_id for one in checked_step(engine) if one.finish_reason]
    assert ended == ["ahead", "wants", "runs"]


def test_the_slot_that_is_drained_is_one_that_nobody_ahead_waits_for() -> None:
    engine = few_slots(3, 2, num_blocks=16, max_num_seqs=4)
    submit(engine, "a", PROMPT[:3], lengths(40), adapter="0")
    submit(engine, "b", PROMPT[:3], lengths(8), adapter="1")
    checked_step(engine)
    submit(engine, "large", [*PROMPT, *PROMPT, *PROMPT[:8]], lengths(2), adapter="0")  # no room
    submit(engine, "wants", PROMPT[:3], lengths(2), adapter="2")
    submit(engine, "same", PROMPT[:3], lengths(2), adapter="1")
    checked_step(engine)
    turns, adapters = engine._runtime.turns, engine.adapters
    numbers = {one.name: one.number for one in adapters.loaded}
    place = engine._scheduler.waiting.place
    assert turns.first is not None
    assert turns.first.request_id == "wants"
    drained = dict.fromkeys([numbers["1"], numbers["2"]], place(turns.first))
    assert turns.bars == Bars({numbers["0"]: None, **drained})
    run(engine)


def num_calls(function: Callable[[], object]) -> int:
    """How many functions are called, those in C included."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection calls whoever listens to it, such as hypothesis
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def choose_and_tell(engine: Engine) -> None:
    """All that a step does with those that wait, before it runs and when it is over."""
    engine._runtime.take_slots()
    engine._scheduler.plan(loading=engine._runtime.load())
    engine.stats()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("kind", ["few", "adapters", "sums"])
def test_planning_takes_as_long_whatever_the_length_of_the_line(policy: str, kind: str) -> None:
    """Be it of requests for the same adapters, for as many others, or for as many sums of two."""

    def calls(waiting: int) -> int:
        engine = few_slots(
            *(waiting if kind == "adapters" else 5, 2),
            {"scheduling_policy": policy},
            max_num_seqs=8,
        )
        for number in range(waiting):  # the first two have the slots
            picked: dict[str, Any] = {"adapter": f"{number}"}
            if number >= 2 and kind == "few":
                picked = {"adapter": f"{2 + number % 3}"}
            if number >= 2 and kind == "sums":
                picked = {"adapter_scales": {"2": 1.0, "3": number / 8}}
            tenant = f"tenant {number % 2}"
            submit(engine, f"{number}", [number], lengths(99), tenant=tenant, **picked)
        for _ in range(3):
            checked_step(engine)
        assert engine.stats().num_requests_running == 2
        return num_calls(lambda: choose_and_tell(engine))

    assert calls(200) == calls(20)


@pytest.mark.parametrize("seed", range(12))
def test_tenants_of_many_rows_take_turns_for_one_slot(seed: int) -> None:
    draw = random.Random(seed)
    engine = few_slots(3, 1, {"scheduling_policy": "fair"}, max_num_seqs=4)
    names = []
    for number in range(20):
        several = SamplingParams(
            temperature=0.0, max_tokens=draw.randint(1, 6), n=draw.choice([1, 2, 4])
        )
        names.append(f"{number}")
        submit(
            engine,
            names[-1],
            PROMPT[: draw.randint(1, 22)],
            several,
            adapter=draw.choice([None, "0", "1", "2"]),
            tenant=draw.choice("abc"),
            priority=draw.randint(0, 2) * (seed % 2),
        )
        for _ in range(draw.choice([0, 0, 1, 9])):
            checked_step(engine)
    for _ in range(2000):
        checked_step(engine)
        if not engine.has_work:
            break
    assert not engine.has_work


class Failing(NullModel):
    """Fails to write a slot while it is told to."""

    failure: Exception | None = None
    writes = 0

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        self.writes += adapter is not None
        if self.failure is not None and adapter is not None:
            raise self.failure
        super().set_adapter(slot, adapter)


@pytest.mark.parametrize(
    "failure", [ProviderError("device"), CapacityError("memory"), AdapterError("too large")]
)
def test_a_slot_that_cannot_be_written_ends_that_request_alone(failure: Exception) -> None:
    engine = few_slots(3, 2, model_type=Failing)
    model = null_model(engine)
    assert isinstance(model, Failing)
    submit(engine, "runs", PROMPT, lengths(9), adapter="0")
    deltas = checked_step(engine)
    submit(engine, "fails", PROMPT, adapter="2")
    model.failure = failure
    deltas += checked_step(engine)
    [failed] = [one for one in deltas if one.request_id == "fails"]
    assert (failed.finish_reason, failed.error) == (
        "error",
        f"{type(failure).__name__}: {failure}",
    )
    model.failure = None
    deltas += run(engine)["runs"]
    assert tokens(deltas) == alone_with(0, PROMPT, lengths(9))
    submit(engine, "again", PROMPT, adapter="2")
    assert tokens(run(engine)["again"]) == alone_with(2, PROMPT)


class FailingFor(NullModel):
    """Fails to write some adapters, the first of them after something was changed."""

    failing: tuple[LoraAdapter, ...] = ()

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        if any(adapter is one for one in self.failing):
            if adapter is self.failing[0]:
                super().set_adapter(slot, None)
            raise ProviderError("device")
        super().set_adapter(slot, adapter)


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("hidden", [False, True])
def test_who_would_lose_its_slot_keeps_it_if_the_other_cannot_be_written(
    restores: bool, hidden: bool
) -> None:
    engine = few_slots(3, 1, {"max_host_adapters": 4}, model_type=FailingFor)
    model = null_model(engine)
    assert isinstance(model, FailingFor)
    adapters = engine.adapters
    [first, bad, _] = adapters.loaded
    model.failing = (content(1).adapter, *([] if restores else [content(0).adapter]))
    submit(engine, "fails", PROMPT, adapter="1")
    submit(engine, "waits", PROMPT, adapter="0")
    if hidden:
        adapters.unload("0")
        adapters.load("0", content(4))  # another one of that name is not concerned
    with pytest.raises(ProviderError, match="device"):
        adapters.put(bad.number, ())
    assert adapters.num_swaps == 0
    assert adapters.has_slot(first.number) == restores
    assert "0" in {one.name for one in adapters.loaded}
    engine.check()
    model.failing = model.failing[:1]
    deltas = run(engine)
    assert deltas["fails"][-1].finish_reason == "error"
    assert tokens(deltas["waits"]) == alone_with(0, PROMPT)
    assert engine.stats().num_adapter_swaps == 0
    submit(engine, "next", PROMPT, adapter="2")
    assert tokens(run(engine)["next"]) == alone_with(2, PROMPT)
    assert engine.stats().num_adapter_swaps == (not hidden)


def test_numbers_that_no_slot_holds_are_tried_once_for_all_that_wait() -> None:
    engine = few_slots(2, 1, {"scheduling_policy": "fair"}, model_type=Failing)
    engine.adapters.unload("0")
    model = null_model(engine)
    assert isinstance(model, Failing)
    for number in range(6):
        options: Any = {"tenant": f"{number % 2}", "priority": number % 3}
        submit(engine, f"{number}", PROMPT[:5], lengths(2), adapter="1", **options)
    submit(engine, "none", PROMPT[:5], lengths(2))
    model.failure, model.writes = AdapterError("too large"), 0
    deltas = checked_step(engine)
    assert model.writes == 1
    told = {one.request_id: one.error for one in deltas if one.finish_reason == "error"}
    assert told == dict.fromkeys(map(str, range(6)), "AdapterError: too large")
    model.failure = None
    engine.adapters.load("1", content(3), in_place=True)  # others of that name are not concerned
    submit(engine, "again", PROMPT, adapter="1")
    assert tokens(run(engine)["again"]) == alone_with(3, PROMPT)


@pytest.mark.parametrize("failure", [CapacityError("memory"), ProviderError("device")])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_device_that_cannot_write_is_asked_less_and_less_while_others_run(
    failure: Exception, num_slots: int
) -> None:
    engine = few_slots(4, num_slots, model_type=Failing)
    for name in ("0", "1"):
        engine.adapters.unload(name)  # and the slots are free
    model = null_model(engine)
    assert isinstance(model, Failing)
    submit(engine, "runs", PROMPT, lengths(60))
    for number in range(7):
        submit(engine, f"{number}", PROMPT[:5], lengths(2), adapter=f"{2 + number % 2}")
    model.failure, model.writes = failure, 0
    asked, ended = [], []
    for step in range(20):
        before = model.writes
        deltas = checked_step(engine)
        assert any(one.request_id == "runs" for one in deltas)
        asked += [step] * (model.writes - before)
        ended += [one.request_id for one in deltas if one.finish_reason == "error"]
    assert asked == [0, 2, 5, 10, 19]
    assert ended == ["0", "1", "2", "3", "4"]  # the one that it was tried for
    model.failure = None
    served = {}
    for step in range(20, 60):
        for one in checked_step(engine):
            served.setdefault(one.request_id, (step, one.finish_reason))
    assert {name: step for name, (step, _) in served.items() if name in "56"} == {
        "5": 36,
        "6": 36 if num_slots == 2 else 38,
    }
    submit(engine, "7", PROMPT, adapter="3")
    submit(engine, "runs too", PROMPT, lengths(9))
    run(engine)
    assert engine._runtime.turns._num_failures == 0


def test_who_cannot_get_a_slot_yet_does_not_starve_behind_a_stream_of_others() -> None:
    engine = few_slots(3, 2, model_type=Failing)
    model = null_model(engine)
    assert isinstance(model, Failing)
    for name in ("0", "1"):
        submit(engine, f"first {name}", PROMPT[:3], lengths(6), adapter=name)
    checked_step(engine)
    submit(engine, "fails", PROMPT[:3], lengths(2), adapter="2")
    submit(engine, "wants", PROMPT[:3], lengths(2), adapter="2")
    model.failure = ProviderError("device")
    started = []
    for number in range(80):  # before one of either ends the next one comes
        if number % 3 == 0:
            submit(engine, f"0 {number}", PROMPT[:3], lengths(6), adapter="0")
            submit(engine, f"1 {number}", PROMPT[:3], lengths(6), adapter="1")
        deltas = checked_step(engine)
        if any(one.finish_reason == "error" for one in deltas):
            assert [one.request_id for one in deltas if one.finish_reason == "error"] == ["fails"]
            model.failure = None
        started += [one.request_id for one in deltas]
        if "wants" in started:
            break
    assert "wants" in started
    run(engine)


def test_a_device_that_cannot_write_is_asked_once_a_step_while_nobody_runs() -> None:
    engine = few_slots(2, 1, model_type=Failing)
    engine.adapters.unload("0")
    model = null_model(engine)
    assert isinstance(model, Failing)
    for number in range(6):
        submit(engine, f"{number}", PROMPT[:5], lengths(2), adapter="1")
    model.failure, model.writes = ProviderError("device"), 0
    for step in range(4):
        [ended] = checked_step(engine)
        assert (ended.request_id, ended.finish_reason) == (f"{step}", "error")
        assert model.writes == step + 1
    model.failure = None
    deltas = run(engine)
    for name in ("4", "5"):
        assert tokens(deltas[name]) == alone_with(1, PROMPT[:5], lengths(2))


def test_a_device_that_can_write_again_is_asked_at_once() -> None:
    """Also if it showed that while nobody ran."""
    engine = few_slots(4, 2, model_type=Failing)
    for name in ("0", "1"):
        engine.adapters.unload(name)
    model = null_model(engine)
    assert isinstance(model, Failing)
    submit(engine, "runs", PROMPT, lengths(12))
    for number in range(6):
        submit(engine, f"{number}", PROMPT[:5], lengths(2), adapter="2")
    model.failure = ProviderError("device")
    run(engine)  # the last ones while nobody runs any more
    model.failure = None
    submit(engine, "works", PROMPT[:5], lengths(2), adapter="2")
    run(engine)
    submit(engine, "runs too", PROMPT, lengths(30))
    checked_step(engine)
    submit(engine, "other", PROMPT[:5], lengths(2), adapter="3")
    assert any(one.request_id == "other" for one in checked_step(engine))
    run(engine)


def test_a_device_that_is_lost_while_a_slot_is_written() -> None:
    spare = NullModel(null_options(max_adapters=2))
    engine = few_slots(3, 2, model_type=Failing, fallbacks=[spare])
    model = null_model(engine)
    assert isinstance(model, Failing)
    submit(engine, "runs", PROMPT, lengths(9), adapter="0")
    deltas = checked_step(engine)
    submit(engine, "wants", PROMPT, adapter="2")
    model.failure = DeviceLostError("unplugged")
    deltas += [one for group in run(engine).values() for one in group]
    assert null_model(engine) is spare
    for name, seed, params in (("runs", 0, lengths(9)), ("wants", 2, GREEDY)):
        own = [one for one in deltas if one.request_id == name]
        assert tokens(own) == alone_with(seed, PROMPT, params)


def test_a_device_that_is_lost_while_a_drained_slot_is_written() -> None:
    """Who waited behind the one that gets it may start when that one is gone."""
    spare = NullModel(null_options(max_adapters=2))
    engine = few_slots(3, 2, model_type=Failing, fallbacks=[spare])
    model = null_model(engine)
    assert isinstance(model, Failing)
    submit(engine, "a", PROMPT, lengths(60), adapter="0")
    checked_step(engine)
    submit(engine, "b", PROMPT, lengths(6), adapter="1")
    checked_step(engine)
    submit(engine, "wants", PROMPT, adapter="2")
    checked_step(engine)
    submit(engine, "same", PROMPT, lengths(3), adapter="0")
    while len(engine._scheduler.running) > 1:
        checked_step(engine)
    assert engine._runtime.turns.bars is not NO_BARS
    model.failure = DeviceLostError("unplugged")
    engine.step()
    assert null_model(engine) is spare
    assert engine._scheduler._queues.bars == engine._runtime.turns.bars
    engine.abort("wants")
    deltas = run(engine)
    assert tokens(deltas["same"]) == alone_with(0, PROMPT, lengths(3))
    assert deltas["a"][-1].finish_reason == "length"


def test_unloading_and_replacing_while_a_request_waits_for_a_slot() -> None:
    engine = few_slots(3, 1)
    submit(engine, "a", PROMPT, lengths(9), adapter="0")
    checked_step(engine)
    submit(engine, "b", PROMPT, adapter="1")
    submit(engine, "c", PROMPT, adapter="2")
    submit(engine, "gone", PROMPT, adapter="2")
    checked_step(engine)
    engine.adapters.unload("1")
    assert engine.stats().num_adapters == 3  # it is still used
    with pytest.raises(CapacityError, match="all 3 places for adapters in host memory are taken"):
        engine.adapters.load("2", content(4), in_place=True)
    engine.abort("gone")
    deltas = run(engine)
    assert tokens(deltas["b"]) == alone_with(1, PROMPT)
    assert tokens(deltas["c"]) == alone_with(2, PROMPT)
    engine.adapters.load("2", content(4), in_place=True)
    submit(engine, "d", PROMPT, adapter="2")
    assert tokens(run(engine)["d"]) == alone_with(4, PROMPT)
    assert [one.name for one in engine.adapters.loaded] == ["0", "2"]
    assert engine.stats().num_adapters == 2


def test_fewer_places_than_slots_are_refused() -> None:
    with pytest.raises(CapacityError, match="is 1, and the model has 2 slots"):
        adapter_engine(max_adapters=2, config={"max_host_adapters": 1})
    with pytest.raises(CapacityError, match="max_host_adapters is 0"):
        adapter_engine(config={"max_host_adapters": 0})
