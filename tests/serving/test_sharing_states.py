"""Prompts with states that begin alike and arrive together: exact rows, stops and slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from onnxport.kv.states import StatePool
from onnxport.kv.table import Found
from onnxport.serving.draft import Draft
from onnxport.serving.engine import Engine
from onnxport.serving.hits import Hits
from onnxport.serving.params import SamplingParams
from onnxport.serving.planner import MOST_FORESEEN
from onnxport.serving.request import Request
from tests.serving.bench import Bench, make_request, rows
from tests.serving.helpers import GREEDY, alone, null_engine, run, submit, tokens
from tests.serving.prophet import Prophet

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
    assert states.scheduler.hit_counts.found == 15 * 128


def _prompts(plan: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return plan.num_past, plan.num_new  # type: ignore[attr-defined]


def test_a_prompt_stops_for_those_that_nothing_is_left_for_yet() -> None:
    """Its own tokens are enough for each step, so nobody else is admitted before it has passed."""
    states = bench(budget=80)
    states.submit("a", prompt(0, 300), cached=True)
    states.submit("b", prompt(1, 6), cached=True)
    assert rows(states.step()) == [("a", 0, 80)]
    plan = states.step()
    assert rows(plan) == [("a", 80, 48)]
    assert plan.stopped == {0}
    assert rows(states.step()) == [("a", 128, 80)]
    while not states.requests["b"].running:
        plan = states.step()
    assert rows(plan)[-1][:2] == ("b", 128)


def test_a_stop_has_to_spare_more_than_it_costs() -> None:
    """The step would be shorter by 72 of 100 tokens, to spare one prompt 128."""
    states = bench(budget=100)
    states.submit("a", prompt(0, 300), cached=True)
    states.submit("b", prompt(1, 6), cached=True)
    assert [rows(states.step()) for _ in range(4)] == [
        [("a", past, 100)] for past in (0, 100, 200, 300)
    ]
    assert rows(states.step()) == [("a", 400, 24), ("b", 0, 76)]


def test_many_partings_do_not_cut_a_prompt_into_small_steps() -> None:
    """Stops are about a step apart, and others compute what they have between them meanwhile."""
    states = bench(budget=2048, num_rows=64, num_blocks=60_000)
    long = range(8192)
    states.submit("lead", long, cached=True)
    for number in range(62):
        own = range(20_000 + 100 * number, 20_020 + 100 * number)
        states.submit(f"r{number}", [*long[: 128 * (number + 1)], *own], cached=True)
    num_steps, num_tokens, first = 0, 0, 0
    while any(one.num_output_tokens < 1 for one in states.requests.values()):
        num_tokens += states.step().num_tokens
        num_steps += 1
        if states.requests["lead"].num_output_tokens == 1:
            first = first or num_steps
    assert first <= 8  # five without others, 64 if it stopped for each of them
    assert num_steps <= 17
    assert num_tokens < 18_000  # of 260,000 without what they share


def test_a_prompt_that_stops_leaves_the_rest_of_its_step_to_others() -> None:
    states = bench(budget=300)
    states.submit("a", prompt(0, 1000), cached=True)
    states.submit("b", [*PREFIX, *PREFIX, *range(9)], cached=True)
    states.submit("c", range(5000, 5400), cached=True)
    states.submit("d", [*prompt(0, 112), *range(9)], cached=True)
    # It stops for d, which parts from it late; b has less in common, and computes it by itself.
    assert rows(states.step()) == [("a", 0, 240), ("b", 0, 60)]


def test_a_prompt_does_not_stop_for_lower_priorities_that_wait() -> None:
    states = bench(budget=80, policy="priority")
    states.submit("a", prompt(0, 300), cached=True, priority=1)
    states.submit("b", prompt(1, 6), cached=True, priority=2)
    assert rows(states.step()) == [("a", 0, 80)]
    assert rows(states.step()) == [("a", 80, 80)]


def test_a_prompt_stops_for_one_that_no_block_is_left_for() -> None:
    states = bench(budget=80, num_blocks=120)
    states.submit("a", prompt(0, 300), cached=True)
    assert rows(states.step()) == [("a", 0, 80)]
    states.submit("b", prompt(1, 100), cached=True)
    assert rows(states.step()) == [("a", 80, 48)]


@pytest.mark.parametrize("levels", [1, 100])
def test_a_plan_looks_at_few_waiting_requests_once(
    monkeypatch: pytest.MonkeyPatch, levels: int
) -> None:
    states = bench(budget=80, num_rows=256, num_blocks=4000, policy="priority")
    states.submit("lead", prompt(0, 300), cached=True)
    for number in range(200):
        states.submit(f"r{number}", prompt(1 + number), cached=True, priority=number % levels)
    states.step(only=["lead"])
    looked: list[object] = []
    foresee = Hits.foresee

    def counted(hits: Hits, draft: Draft, waiting: Iterable[Request]) -> None:
        given = list(waiting)
        looked.extend(given)
        foresee(hits, draft, given)

    monkeypatch.setattr(Hits, "foresee", counted)
    states.scheduler.plan()
    assert 0 < len(looked) <= MOST_FORESEEN
    assert len(set(looked)) == len(looked)


def test_a_plan_looks_up_nothing_of_requests_that_a_prompt_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = bench(budget=200, num_rows=64, num_blocks=4000)
    states.submit("lead", prompt(0, 2000), cached=True)
    states.step()
    for number in range(60):
        states.submit(f"r{number}", prompt(1 + number), cached=True)
    asked: list[Request] = []
    of = Hits.of

    def counted(hits: Hits, request: Request) -> Found:
        asked.append(request)
        return of(hits, request)

    monkeypatch.setattr(Hits, "of", counted)
    stops: list[Request] = []
    monkeypatch.setattr(Hits, "_stop", lambda _, __, request, *___: stops.append(request))
    assert rows(states.scheduler.plan()) == [("lead", 200, 200)]
    assert asked == [states.requests["lead"]]
    assert not stops


def test_of_those_that_wait_for_one_state_the_first_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = bench(budget=1000, num_rows=64, num_blocks=4000)
    for number in range(60):
        states.submit(f"r{number}", prompt(number), cached=True)
    asked: list[Request] = []
    of = Hits.of

    def counted(hits: Hits, request: Request) -> Found:
        asked.append(request)
        return of(hits, request)

    monkeypatch.setattr(Hits, "of", counted)
    assert rows(states.scheduler.plan()) == [("r0", 0, 128)]
    assert asked == [states.requests["r0"], states.requests["r1"]]


def test_a_prompt_with_more_in_the_cache_does_not_wait_with_others() -> None:
    states = bench(budget=1000)
    states.submit("old", prompt(3, 100), cached=True)
    while states.requests["old"].num_output_tokens < 1:
        states.step()
    states.finish("old")
    for number, name in enumerate("abc"):
        states.submit(name, prompt(number), cached=True)
    states.submit("d", prompt(3, 120), cached=True)
    assert rows(states.step()) == [("a", 0, 128), ("d", 228, 16)]


def test_a_prompt_that_is_computed_as_a_whole_stops_for_nobody() -> None:
    states = bench()
    hits = Hits(states.pool, states.states)
    whole = make_request("a", prompt(0), cached=True)
    whole.pooler = object()  # type: ignore[assignment]
    whole.params = dataclasses.replace(whole.params, skip_reading_prefix_cache=True)
    other = make_request("b", prompt(1), cached=True)
    draft = Draft(states.pool, 512, 8)
    assert hits.look_up(draft, whole)
    assert hits.look_up(draft, other)
    assert draft.stops[whole] == ()
    hits.withdraw(draft, whole)


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
    assert rows(states.step()) == [("high", 0, 136), ("low", 0, 136)]  # none stops for a lower one
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


def test_a_step_of_owed_tokens_alone_is_told_to_who_guesses() -> None:
    """All that decode owe too much to be guessed for, so nobody is asked before it."""
    expected = tokens(run(_submitted(null_engine(state_slots=8)))["a"])
    prophet = Prophet(lambda _: expected, length=20)
    prophet.errs = 20
    engine = _submitted(null_engine(state_slots=8, speculator=prophet))
    assert tokens(run(engine)["a"]) == expected
    assert (1, 21) in prophet.steps  # a token, and 20 guesses, the last of them wrong
    owed = prophet.steps.index((1, 21)) + 1
    assert prophet.steps[owed] == (1, 21)  # a token, and the 20 that came before
    assert len(prophet.budgets) < len(prophet.steps)


def _submitted(engine: Engine) -> Engine:
    submit(engine, "a", PREFIX[:20], SamplingParams(temperature=0.0, max_tokens=60))
    return engine
