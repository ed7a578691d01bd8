"""Events of every path, timeouts, and the bounded queue."""

import math

import pytest

from onnxport.errors import OverloadedError
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from tests.serving.helpers import (
    GREEDY,
    Clock,
    alone,
    checked_step,
    null_engine,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.watch import Watch

PROMPT = list(range(100, 122))


def test_a_life_in_events() -> None:
    engine = null_engine(clock=Clock(tick_s=0.5), max_num_batched_tokens=16)
    watch = Watch(engine)
    submit(engine, "a", PROMPT)
    run(engine)
    assert watch.kinds("a") == ["queued", "scheduled", "first_token", "finished"]
    [*_, last] = watch.events["a", 0]
    record = last.finished
    assert record is not None
    assert (record.reason, record.num_prompt_tokens, record.num_output_tokens) == ("length", 22, 12)
    assert (record.max_tokens, record.n, record.num_cached_tokens) == (12, 1, 0)
    assert [step.num_tokens for step in watch.steps] == [16, 6] + [1] * 11
    assert [len(step.inter_token_s) for step in watch.steps] == [0, 0] + [1] * 11
    assert [step.num_sampled for step in watch.steps] == [0] + [1] * 12


def test_completions_begin_where_they_leave_the_prompt() -> None:
    engine = null_engine(clock=Clock(tick_s=0.5), max_num_batched_tokens=16)
    watch = Watch(engine)
    submit(engine, "a", PROMPT, SamplingParams(temperature=0.0, max_tokens=3, n=3))
    run(engine)
    assert watch.kinds("a", 0) == ["queued", "scheduled", "first_token", "finished"]
    for index in (1, 2):
        assert watch.kinds("a", index) == ["scheduled", "first_token", "finished"]
        assert watch.events["a", index][0].time_s > watch.events["a", 0][1].time_s


def test_preempted_and_scheduled_take_turns() -> None:
    engine = null_engine(clock=Clock(tick_s=0.1), num_blocks=8)
    watch = Watch(engine)
    for index in range(4):
        submit(engine, str(index), [index] * 6, SamplingParams(temperature=0.0, max_tokens=16))
    run(engine)
    watch.check_all_ended()
    assert engine.stats().num_preemptions > 0
    kinds = [watch.kinds(str(index)) for index in range(4)]
    assert sum(one.count("preempted") for one in kinds) == engine.stats().num_preemptions
    assert all(one.count("scheduled") == one.count("preempted") + 1 for one in kinds)


def test_requests_that_never_began_end_too() -> None:
    clock = Clock()
    engine = null_engine(clock=clock, max_num_seqs=1)
    watch = Watch(engine)
    submit(engine, "a", PROMPT)
    checked_step(engine)
    submit(engine, "aborted", PROMPT)
    submit(engine, "late", PROMPT, timeout_s=1.0)
    engine.abort("aborted")
    clock.now_s += 2
    run(engine)
    assert watch.kinds("aborted") == watch.kinds("late") == ["queued", "finished"]
    assert watch.finished == {"length": 1, "abort": 1, "timeout": 1}


def test_events_of_failures() -> None:
    engine = null_engine(clock=Clock(tick_s=0.1), fails=lambda run: run in (0, 4))
    watch = Watch(engine)
    submit(engine, "a", PROMPT)
    run(engine)
    assert watch.kinds("a") == ["queued", "finished"]  # its first step left no trace
    submit(engine, "b", PROMPT)
    run(engine)
    assert watch.kinds("b") == ["queued", "scheduled", "first_token", "finished"]
    assert watch.finished == {"error": 2}


# Timeouts.


def test_a_timeout_ends_waiting_and_running_requests_where_they_are() -> None:
    clock = Clock()
    engine = null_engine(clock=clock, max_num_seqs=1, max_num_batched_tokens=32)
    submit(engine, "runs", PROMPT, timeout_s=5.0)
    submit(engine, "waits", PROMPT, timeout_s=6.0)
    submit(engine, "stays", PROMPT)
    submit(engine, "ends", PROMPT, timeout_s=7.0)
    for _ in range(3):
        checked_step(engine)
    clock.now_s += 4.9
    assert reasons(checked_step(engine)) == []
    clock.now_s += 0.1
    deltas = checked_step(engine)
    assert [(d.request_id, d.finish_reason) for d in deltas if d.finish_reason] == [
        ("runs", "timeout")
    ]
    clock.now_s += 10
    rest = run(engine)
    assert reasons(rest["waits"]) == reasons(rest["ends"]) == ["timeout"]
    assert tokens(rest["stays"]) == alone(PROMPT)
    assert engine.stats().finished["timeout"] == 3


def test_a_timeout_ends_all_completions() -> None:
    clock = Clock()
    engine = null_engine(clock=clock, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0.0, max_tokens=12, n=3)
    submit(engine, "early", PROMPT, params, timeout_s=1.0)
    checked_step(engine)
    clock.now_s += 1
    assert reasons(run(engine)["early"]) == ["timeout"] * 3
    submit(engine, "late", PROMPT, params, timeout_s=1.0)
    for _ in range(4):
        checked_step(engine)
    clock.now_s += 1
    deltas = run(engine)["late"]
    assert reasons(deltas) == ["timeout"] * 3
    assert sorted(delta.index for delta in deltas) == [0, 1, 2]


def test_deadlines_of_requests_that_ended_are_forgotten() -> None:
    clock = Clock()
    engine = null_engine(clock=clock, max_num_batched_tokens=32)
    for index in range(400):
        submit(engine, str(index), [1], SamplingParams(max_tokens=1), timeout_s=1000.0)
        run(engine)
    assert len(engine._sequences._deadlines) <= 2 + 64
    submit(engine, "a", [1], timeout_s=1.0)
    clock.now_s += 2
    assert reasons(run(engine)["a"]) == ["timeout"]


# The queue.


def test_a_full_queue_refuses_and_has_room_again() -> None:
    engine = null_engine(max_num_seqs=1, max_queued_requests=2)
    for name in "ab":
        submit(engine, name, PROMPT)
    assert engine.queue_room() == 0
    with pytest.raises(OverloadedError, match="2 requests are waiting already") as caught:
        submit(engine, "c", PROMPT)
    assert 1.0 <= caught.value.retry_after_s <= 60.0
    assert engine.stats().prompt_tokens == 0  # of prompts that were computed
    checked_step(engine)  # a begins
    assert (engine.num_queued, engine.queue_room()) == (1, 1)
    submit(engine, "c", PROMPT)
    with pytest.raises(OverloadedError):
        submit(engine, "d", PROMPT)
    deltas = run(engine)
    assert deltas.keys() == {"a", "b", "c"}
    assert engine.stats().prompt_tokens == 66
    submit(engine, "d", PROMPT)
    run(engine)


def test_a_flood_leaves_room_in_the_queue_for_others() -> None:
    engine = null_engine(max_num_seqs=1, max_queued_requests=12, scheduling_policy="fair")
    for index in range(6):  # half of the queue: one tenant, and one more that may come
        submit(engine, f"flood-{index}", PROMPT, tenant="flood")
    with pytest.raises(OverloadedError, match="shared by its tenants"):
        submit(engine, "flood-6", PROMPT, tenant="flood")
    for index in range(4):  # a third: there are two now
        submit(engine, f"light-{index}", PROMPT, tenant="light")
    with pytest.raises(OverloadedError):
        submit(engine, "light-4", PROMPT, tenant="light")
    submit(engine, "late", PROMPT, tenant="late")
    order = [delta.request_id for delta in _firsts(engine)]
    assert order[:3] == ["flood-0", "light-0", "late"]  # one row: each tenant in turn
    assert engine.stats().num_refused == 2


def test_what_is_on_its_way_counts_for_who_sent_it() -> None:
    """A burst that the engine was not given yet takes nothing from what others may queue."""
    engine = null_engine(max_num_seqs=1, max_queued_requests=12, scheduling_policy="fair")
    flood, light = (RequestOptions(tenant=one) for one in ("flood", "light"))
    coming = {"flood": 5}
    assert engine.queue_room(flood, coming) == 1  # of a half
    assert engine.queue_room(light, coming) == 4  # of a third: there would be two
    submit(engine, "light-0", PROMPT, tenant="light")
    assert engine.queue_room(light, coming) == 3
    assert engine.queue_room(light, {"flood": 11}) == 0  # the queue is full
    assert "7 requests are waiting" in str(engine.overload(6))


def test_under_other_policies_tenants_are_one() -> None:
    engine = null_engine(max_num_seqs=1, max_queued_requests=4)
    for index in range(4):
        submit(engine, str(index), PROMPT, tenant="flood")
    with pytest.raises(OverloadedError):
        submit(engine, "light", PROMPT, tenant="light")
    run(engine)


def _firsts(engine: Engine) -> list[CompletionDelta]:
    """Run to the end; the first delta of each request, in order."""
    seen: dict[str, CompletionDelta] = {}
    while engine.has_work:
        for delta in checked_step(engine):
            seen.setdefault(delta.request_id, delta)
    return list(seen.values())


def test_preempted_requests_and_completions_do_not_fill_the_queue() -> None:
    engine = null_engine(num_blocks=8, max_queued_requests=2)
    for name in "ab":
        submit(engine, name, PROMPT[:6], SamplingParams(temperature=0.0, max_tokens=20, n=2))
        checked_step(engine)
    while not engine.stats().num_preemptions:
        checked_step(engine)
    assert engine.stats().num_requests_waiting > 0
    assert engine.num_queued == 0
    run(engine)


def test_retry_after_follows_the_time_between_ends() -> None:
    clock = Clock()
    engine = null_engine(clock=clock, max_num_seqs=1)
    assert engine.overload().retry_after_s == 1.0
    for index in range(12):
        submit(engine, str(index), [1], SamplingParams(max_tokens=1))
    while engine.has_work:
        clock.now_s += 7
        checked_step(engine)
    error = engine.overload()
    assert math.isclose(error.retry_after_s, 7)
    assert "again in 7 s" in str(error) or "again in 8 s" in str(error)
    clock.now_s += 10_000  # nothing to do, which tells nothing of how long things take
    submit(engine, "z", [1], GREEDY)
    run(engine)
    assert math.isclose(engine.overload().retry_after_s, 7)
    for name in "yx":
        submit(engine, name, [1], SamplingParams(max_tokens=1))
    while engine.has_work:
        clock.now_s += 10_000
        checked_step(engine)
    assert engine.overload().retry_after_s == 60.0
