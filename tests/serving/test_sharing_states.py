"""Prompts with states that begin alike and arrive together: exact rows, stops and slots."""

from __future__ import annotations

import pytest

from onnxport.kv.states import StatePool
from onnxport.serving.params import SamplingParams
from tests.serving.bench import Bench, rows
from tests.serving.helpers import GREEDY, alone, null_engine, run, submit, tokens

PREFIX = list(range(100, 228))  # 32 blocks


def prompt(number: int, length: int = 10) -> list[int]:
    return [*PREFIX, *(1000 * (1 + number) + place for place in range(length))]


def bench(budget: int = 64, num_rows: int = 16, num_blocks: int = 800, **options: object) -> Bench:
    states = StatePool(2 * num_rows + 8)
    return Bench(num_blocks, rows=num_rows, budget=budget, states=states, **options)  # type: ignore[arg-type]


def test_one_prefix_of_sixteen_requests_is_computed_once() -> None:
    states = bench()
    for number in range(16):
        states.submit(f"r{number}", prompt(number), cached=True)
    assert rows(states.step()) == [("r0", 0, 64)]
    assert rows(states.step()) == [("r0", 64, 64)]
    plan = states.step()  # each stops behind its own last whole block
    assert rows(plan)[:3] == [("r0", 128, 8), ("r1", 128, 8), ("r2", 128, 8)]
    computed = 128 + plan.num_tokens
    while states.scheduler.num_running < 16 or states.requests["r15"].num_output_tokens < 1:
        computed += sum(
            new for past, new in zip(*_prompts(states.step()), strict=True) if past < 138
        )
    assert computed == 128 + 16 * 10
    assert [states.requests[f"r{i}"].num_cached_tokens for i in range(16)] == [0] + [128] * 15
    assert states.scheduler.num_found == 15 * 128


def _prompts(plan: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return plan.num_past, plan.num_new  # type: ignore[attr-defined]


def test_a_prompt_stops_for_those_that_nothing_is_left_for_yet() -> None:
    """Its own tokens are enough for each step, so nobody else is admitted before it has passed."""
    states = bench(budget=100)
    states.submit("a", prompt(0, 300), cached=True)
    states.submit("b", prompt(1, 6), cached=True)
    assert rows(states.step()) == [("a", 0, 100)]
    plan = states.step()
    assert rows(plan) == [("a", 100, 28)]
    assert plan.stopped == {0}
    assert rows(states.step()) == [("a", 128, 100)]
    while not states.requests["b"].running:
        plan = states.step()
    assert rows(plan)[-1][:2] == ("b", 128)


def test_a_prompt_that_is_there_already_is_not_waited_for_behind_the_parting() -> None:
    states = bench(budget=200)
    states.submit("a", prompt(0, 300), cached=True)
    assert rows(states.step()) == [("a", 0, 200)]
    states.submit("b", prompt(1, 60), cached=True)
    plan = states.step()
    assert rows(plan) == [("a", 200, 200)]
    assert rows(states.step()) == [("a", 400, 24), ("b", 0, 128)]  # where K/V part, a third goes on


@pytest.mark.parametrize(("shared", "waits"), [(60, False), (64, True)])
def test_waiting_has_to_spare_enough(shared: int, waits: bool) -> None:
    states = bench(budget=256)
    for number, name in enumerate("ab"):
        states.submit(name, [*PREFIX[:shared], *(7 * (number + 1) for _ in range(20))], cached=True)
    plan = states.step()
    assert rows(plan) == ([("a", 0, 64)] if waits else [("a", 0, 76), ("b", 0, 76)])


@pytest.mark.parametrize("how", ["abort", "fail", "alone"])
def test_the_next_one_takes_over_where_the_first_is_gone(how: str) -> None:
    states = bench()
    for number, name in enumerate("abc"):
        states.submit(name, prompt(number), cached=True)
    assert rows(states.step()) == [("a", 0, 64)]
    if how == "fail":
        assert rows(states.fail()) == [("a", 64, 64)]
    if how == "alone":  # the others of a step that failed are tried by themselves
        assert rows(states.step(only=["b", "c"])) == [("b", 64, 64)]
        assert rows(states.step(only=["b", "c"])) == [("b", 128, 8), ("c", 128, 8)]
        assert ("a", 64, 64) in rows(states.step(only=["a"]))
        return
    states.finish("a")
    # It begins anew where a's state has gone, or goes on from it.
    past = states.scheduler.plan().num_past[0]
    assert rows(states.step()) == [("b", past, 64)]
    while not states.requests["c"].running:
        plan = states.step()
    assert ("c", 128, 8) in rows(plan)


def test_one_that_yields_is_not_waited_for() -> None:
    states = bench(num_blocks=40, num_rows=4, budget=40)
    states.submit("old", range(300, 310))
    states.step()
    states.submit("a", prompt(0), cached=True)
    states.submit("b", prompt(1), cached=True)
    states.step()
    while not states.requests["a"].num_preemptions:
        states.step(only=["old"])
    assert not states.requests["b"].running
    states.finish("old")
    for name in "ab":
        while states.requests[name].num_output_tokens < 1:
            states.step()
        states.finish(name)
    assert states.requests["b"].num_cached_tokens == 128


def test_nobody_waits_for_a_lower_priority() -> None:
    states = bench(policy="priority")
    states.submit("low", prompt(0), cached=True, priority=1)
    assert rows(states.step()) == [("low", 0, 64)]
    states.submit("high", prompt(1), cached=True, priority=0)
    plan = states.step()
    assert rows(plan)[0] == ("high", 64, 64)  # its state on the way was found
    assert rows(states.step())[0] == ("high", 128, 8)


def test_a_lower_priority_waits_for_what_a_higher_one_reaches_in_this_step() -> None:
    states = bench(budget=300, policy="priority")
    states.submit("high", prompt(0), cached=True, priority=0)
    states.submit("low", prompt(1), cached=True, priority=1)
    assert rows(states.step()) == [("high", 0, 128)]  # it stops for the lower one
    assert rows(states.step()) == [("high", 128, 8), ("low", 128, 8)]
    states = bench(budget=300, policy="priority")
    states.submit("high", PREFIX + [7] * 3, cached=True, priority=0)
    states.submit("low", prompt(1), cached=True, priority=1)
    assert rows(states.step()) == [("high", 0, 128)]  # where it stops anyway
    assert rows(states.step()) == [("high", 128, 3), ("low", 128, 8)]


def test_who_has_a_state_of_its_own_goes_on_from_it() -> None:
    states = bench(budget=128)
    for number, name in enumerate("ab"):
        states.submit(name, prompt(number), cached=True)
        states.scheduler._planner._max_num_batched_tokens = 64
        states.step(only=[name])
        states.pool.reset_cache()
        assert states.states is not None
        states.states.reset_cache()
    states.scheduler._planner._max_num_batched_tokens = 128
    assert rows(states.step()) == [("a", 64, 72), ("b", 64, 56)]


def test_of_two_the_one_with_more_in_common_is_waited_for() -> None:
    states = bench(budget=400)
    longer = [*prompt(0, 100), 1]
    states.submit("a", prompt(1, 100), cached=True)
    states.submit("b", longer, cached=True)
    states.submit("c", [*longer[:210], 5, 5, 5], cached=True)
    assert rows(states.step()) == [("a", 0, 128)]  # b and c wait for that
    plan = states.step()
    assert rows(plan) == [("a", 128, 96), ("b", 128, 80)]
    plan = states.step()
    assert rows(plan)[-1] == ("c", 208, 4)


def test_stops_that_are_near_each_other_are_one() -> None:
    states = bench(budget=400)
    base = prompt(0, 200)
    states.submit("a", base, cached=True)
    for number in range(8):
        states.submit(f"r{number}", [*base[: 200 + 8 * number], 5, 6, 7, 8, 9], cached=True)
    stopped = []
    while states.requests["a"].num_output_tokens < 1:
        plan = states.step()
        stopped += [past + new for name, past, new in rows(plan) if name == "a"]
    assert stopped == [200, 324, 328]
    while states.requests["r7"].num_output_tokens < 1:
        states.step()
    assert all(states.requests[f"r{i}"].num_cached_tokens >= 200 for i in range(8))


def test_who_does_not_read_the_cache_waits_for_nobody() -> None:
    engine = null_engine(
        state_slots=40, num_blocks=200, max_num_batched_tokens=512, max_num_seqs=16
    )
    blind = SamplingParams(temperature=0.0, max_tokens=5, skip_reading_prefix_cache=True)
    words = [one % 500 for one in PREFIX]
    submit(engine, "a", [*words, 1, 2, 3, 4, 5], GREEDY)
    submit(engine, "b", [*words, 6, 7, 8, 9, 10], blind)
    submit(engine, "c", [*words, 11, 12, 13, 14, 15], GREEDY)
    deltas = run(engine)
    assert tokens(deltas["b"]) == alone([*words, 6, 7, 8, 9, 10], blind, has_states=True)
    assert engine.stats().prefix_cache_hits == 128  # c's


def test_many_prompts_that_begin_alike_get_their_own_tokens() -> None:
    engine = null_engine(
        state_slots=40, num_blocks=800, max_num_batched_tokens=100, max_num_seqs=16
    )
    prompts = {
        str(number): [*PREFIX, *(number * 7 + place for place in range(5 + number))]
        for number in range(16)
    }
    for name, one in prompts.items():
        submit(engine, name, one, GREEDY)
    deltas = run(engine)
    for name, one in prompts.items():
        assert tokens(deltas[name]) == alone(one, has_states=True)
    assert engine.stats().prefix_cache_hits == 15 * 128
