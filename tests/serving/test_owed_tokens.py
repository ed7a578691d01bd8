"""Guesses for models with states: what a wrong one makes a request compute again; exact slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from onnxport.kv.states import StatePool
from onnxport.serving.following import following
from onnxport.serving.guesses import MOST_OWED
from onnxport.serving.params import SamplingParams
from onnxport.serving.step_plan import StepPlan
from tests.serving.bench import Bench, name_of, names, rows, saying
from tests.serving.helpers import alone, checked_step, null_engine, null_model, run, submit, tokens
from tests.serving.prophet import Prophet

Slots = list[tuple[str, int, int]]


class Guessed(Bench):
    """Requests with states that decode, and are guessed for."""

    def __init__(
        self, *names: str, length: int = 3, num_blocks: int = 40, budget: int = 16
    ) -> None:
        super().__init__(num_blocks, rows=4, budget=budget, states=StatePool(8))
        for name in names:
            self.submit(name, length, cached=True)
        self.step()

    def check(
        self, guess: dict[str, list[int]], right: Sequence[int] = ()
    ) -> tuple[StepPlan, Slots]:
        """Step with guesses, of each of which so many are right; returns what was read and written.

        What follows the right ones is token 5.
        """
        drafts = {self.requests[name]: tokens for name, tokens in guess.items()}
        plan = self.scheduler.plan(guess=saying(drafts))
        reservation = self.scheduler.reserve(plan)
        accepted = {
            row: draft[:number]
            for (row, draft), number in zip(plan.drafts.items(), right, strict=True)
        }
        self.scheduler.commit(plan, reservation, accepted)
        for row in plan.sampled:
            plan.requests[row].tokens.extend([*accepted.get(row, ()), 5])
        self.scheduler.check()
        assert reservation.states is not None
        slots = zip(plan.requests, reservation.states.reads, reservation.states.writes, strict=True)
        return plan, [(name_of(one), read, write) for one, read, write in slots]


def test_behind_right_guesses_a_request_goes_on() -> None:
    bench = Guessed("a")
    plan, slots = bench.check({"a": [7, 7]}, [2])
    assert (rows(plan), slots) == ([("a", 3, 3)], [("a", 1, 2)])
    request = bench.requests["a"]
    assert (request.state, request.num_computed_tokens, request.num_owed_tokens) == (2, 6, 0)
    plan, slots = bench.check({})
    assert (rows(plan), slots) == ([("a", 6, 1)], [("a", 2, 1)])


@pytest.mark.parametrize("right", [0, 1, 2])
def test_behind_a_wrong_guess_the_state_before_the_step_is_gone_on_from(right: int) -> None:
    bench = Guessed("a")
    plan, slots = bench.check({"a": [7, 7, 7]}, [right])
    assert (rows(plan), slots) == ([("a", 3, 4)], [("a", 1, 2)])
    request = bench.requests["a"]
    assert (request.state, request.num_computed_tokens) == (1, 3)
    assert request.num_owed_tokens == 1 + right
    assert request.decodes
    assert bench.blocks("a") == [0]
    plan, slots = bench.check({})
    assert (rows(plan), slots) == ([("a", 3, 2 + right)], [("a", 1, 2)])
    assert (plan.num_decodes, plan.num_logits, plan.sampled) == (1, (1,), (0,))
    assert (request.state, request.num_owed_tokens) == (2, 0)
    plan, slots = bench.check({})
    assert (rows(plan), slots) == ([("a", 5 + right, 1)], [("a", 2, 1)])


def test_who_owes_may_be_guessed_for_and_owe_more() -> None:
    bench = Guessed("a")
    bench.check({"a": [7, 7]}, [1])
    plan, _ = bench.check({"a": [8, 8, 8]}, [0])
    assert rows(plan) == [("a", 3, 6)]
    assert plan.num_logits == (4,)
    assert bench.requests["a"].num_owed_tokens == 3
    plan, slots = bench.check({"a": [9]}, [1])
    assert (rows(plan), slots) == ([("a", 3, 5)], [("a", 1, 2)])
    assert bench.requests["a"].num_owed_tokens == 0


def test_full_blocks_are_known_when_their_state_is_right() -> None:
    bench = Guessed("a")
    keys = bench.requests["a"].keys
    assert keys is not None
    bench.check({"a": [7, 7]}, [1])
    assert len(keys) == 0
    bench.check({})
    assert bench.pool.find(keys.key(0)) == bench.blocks("a")[0]
    assert bench.requests["a"].num_computed_tokens == 6
    bench.check({"a": [7, 5]}, [2])
    assert bench.pool.find(keys.key(1)) == bench.blocks("a")[1]


def test_a_step_that_fails_owes_nothing() -> None:
    bench = Guessed("a")
    bench.check({"a": [7, 7]}, [1])
    request = bench.requests["a"]
    for guess in ({request: [7] * 6}, {}):
        plan = bench.scheduler.plan(guess=saying(guess))
        bench.scheduler.rollback(plan, bench.scheduler.reserve(plan))
        bench.scheduler.check()
        assert (request.num_owed_tokens, request.state) == (2, 1)
        assert bench.blocks("a") == [0]
    assert rows(bench.check({})[0]) == [("a", 3, 3)]


def test_what_is_owed_comes_before_prompts_and_after_a_token_for_each() -> None:
    bench = Guessed("a", "b", budget=8)
    bench.check({"a": [7, 7], "b": [7, 7, 7]}, [1, 2])
    bench.submit("c", 20)
    plan, _ = bench.check({})
    assert rows(plan) == [("a", 3, 3), ("b", 3, 4), ("c", 0, 1)]
    assert plan.num_decodes == 2


def test_of_what_is_owed_a_small_step_computes_a_part() -> None:
    bench = Guessed("a", "b")
    bench.check({"a": [7, 7, 7], "b": [7, 7]}, [2, 0])
    requests = list(bench.requests.values())
    plan = bench.scheduler.plan(budget_tokens=4, guess=lambda *_: {})
    assert rows(plan) == [("a", 3, 3), ("b", 3, 1)]
    assert (plan.sampled, plan.num_logits) == ((), (0, 0))
    bench.scheduler.commit(plan, bench.scheduler.reserve(plan))
    bench.scheduler.check()
    assert [one.num_owed_tokens for one in requests] == [0, 0]
    assert [one.num_computed_tokens for one in requests] == [6, 4]
    plan, _ = bench.check({})
    assert rows(plan) == [("a", 6, 1), ("b", 4, 1)]


def test_nobody_is_guessed_for_who_does_not_reach_the_last_token() -> None:
    bench = Guessed("a", "b")
    bench.check({"a": [7, 7, 7], "b": [7, 7]}, [2, 0])
    asked: list[list[str]] = []

    def guess(decoding: Any, budget: int) -> dict[Any, list[int]]:
        asked.append(names(decoding))
        return {one: [7] * budget for one in decoding}

    plan = bench.scheduler.plan(budget_tokens=6, guess=guess)
    assert rows(plan) == [("a", 3, 4), ("b", 3, 2)]
    assert not asked  # nothing is left
    plan = bench.scheduler.plan([bench.requests["b"]], budget_tokens=3, guess=guess)
    assert rows(plan) == [("b", 3, 3)]
    assert asked == [["b"]]
    plan = bench.scheduler.plan([bench.requests["a"]], budget_tokens=3, guess=guess)
    assert rows(plan) == [("a", 3, 3)]
    asked.clear()
    bench.submit("c", 3)
    some = [bench.requests["a"], bench.requests["c"]]
    plan = bench.scheduler.plan(some, some[1:], budget_tokens=4, guess=guess)
    assert rows(plan) == [("a", 3, 3)]  # c is being loaded, so a token is left
    assert asked == [[]]


def test_what_follows_a_step_with_owed_tokens_is_not_taken_for_known() -> None:
    bench = Guessed("a", "b")
    bench.check({"a": [7, 7], "b": [7]}, [0, 1])
    plan = bench.scheduler.plan()
    assert [new for _, _, new in rows(plan)] == [2, 1]
    assert following(plan, bench.scheduler._queues, bench.pool) is None
    bench.scheduler.rollback(plan, bench.scheduler.reserve(plan))
    part = bench.scheduler.plan(budget_tokens=2)
    assert (part.num_new, part.sampled) == ((1, 1), (1,))
    assert following(part, bench.scheduler._queues, bench.pool) is None


def test_who_yields_owes_nothing() -> None:
    bench = Guessed("a", "b", num_blocks=3)
    bench.check({"a": [], "b": [7]}, [0])
    assert bench.requests["b"].num_owed_tokens == 1
    plan, _ = bench.check({})  # a has four tokens, b five: each wants a second block
    while not plan.preempted:
        plan, _ = bench.check({})
    request = bench.requests["b"]
    assert names(plan.preempted) == ["b"]
    assert (request.num_owed_tokens, request.state, request.num_computed_tokens) == (0, 0, 0)


def test_who_owes_yields_when_its_blocks_are_gone() -> None:
    bench = Guessed("a", "b", length=4, num_blocks=4)
    bench.check({"a": [7], "b": [7, 7]}, [1, 0])
    assert bench.requests["b"].num_owed_tokens == 1
    assert (bench.blocks("a"), bench.blocks("b")) == ([0, 2], [1])
    bench.submit("c", 3)
    plan, _ = bench.check({})
    assert rows(plan) == [("a", 6, 1), ("b", 4, 2)]  # c finds no block
    plan, _ = bench.check({"b": [7, 7]}, [0])
    while not plan.preempted:
        plan, _ = bench.check({})
    assert names(plan.preempted) == ["b"]


def test_what_is_owed_is_counted_once_where_others_might_yield() -> None:
    bench = Bench(6, rows=3, budget=16, policy="priority", states=StatePool(6))
    for name in ("a", "b"):
        bench.submit(name, 4, priority=1)
    bench.step()
    plan = bench.scheduler.plan(guess=saying({bench.requests["a"]: [7]}))
    bench.scheduler.commit(plan, bench.scheduler.reserve(plan))
    for one in plan.requests:
        one.tokens.append(5)
    assert bench.requests["a"].num_owed_tokens == 1  # of the three free blocks it takes one
    bench.submit("urgent", 8, priority=0)
    plan = bench.step()
    assert rows(plan) == [("a", 4, 2), ("b", 5, 1), ("urgent", 0, 8)]
    assert plan.preempted == ()


def test_completions_part_where_one_of_them_owes() -> None:
    bench = Bench(40, rows=4, budget=16, states=StatePool(8))
    bench.submit("a", 6, n=2)
    bench.step()
    drafts = {bench.requests["a"]: [7, 7, 7]}
    plan = bench.scheduler.plan(guess=saying(drafts))
    assert plan.copied == {0}
    reservation = bench.scheduler.reserve(plan)
    bench.scheduler.commit(plan, reservation, {0: (7,)})
    bench.requests["a"].tokens.extend([7, 5])
    bench.requests["a1"].tokens.append(5)
    bench.scheduler.check()
    assert bench.requests["a"].state != bench.requests["a1"].state
    plan = bench.step()
    assert rows(plan) == [("a", 6, 3), ("a1", 7, 1)]
    assert plan.copied == frozenset()


def test_a_step_reads_blocks_that_more_than_one_column_lacks() -> None:
    bench = Guessed("a", length=4)
    bench.check({"a": [7] * 9}, [8])
    assert bench.blocks("a") == [0]
    plan, _ = bench.check({})
    assert (rows(plan), plan.num_new_columns) == ([("a", 4, 10)], (3,))


# The engine.

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPT = list(range(1, 8))


def test_what_is_owed_has_a_bound() -> None:
    prophet = Prophet(lambda one: alone(PROMPT, LONG, has_states=True))
    prophet.errs = 1
    engine = null_engine(state_slots=16, speculator=prophet)
    submit(engine, "a", PROMPT, LONG)
    lengths: list[int] = []
    model = null_model(engine)
    run_model = model.run

    def noted(inputs: Any) -> Any:
        lengths.append(len(inputs.input_ids))
        return run_model(inputs)

    model.run = noted  # type: ignore[method-assign]
    found = tokens(run(engine)["a"])
    assert found == alone(PROMPT, LONG, has_states=True)
    assert prophet.num_accepted == 0
    assert max(lengths[1:]) == MOST_OWED - 1 + 1 + prophet.length
    assert lengths[2 : 3 + MOST_OWED] == [*range(5, 5 + MOST_OWED), MOST_OWED + 1]


def test_metrics_count_guesses_and_not_what_is_computed_again() -> None:
    prophet = Prophet(lambda one: alone(PROMPT, LONG, has_states=True))
    prophet.errs = 3
    engine = null_engine(state_slots=16, speculator=prophet)
    submit(engine, "a", PROMPT, LONG)
    run(engine)
    assert engine.stats().generation_tokens == 60
    assert 0 < prophet.num_accepted < prophet.num_drafted
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_request_that_owes_and_ends_leaves_nothing() -> None:
    prophet = Prophet(lambda one: alone(PROMPT, LONG, has_states=True))
    prophet.errs = 1
    engine = null_engine(state_slots=16, speculator=prophet)
    submit(engine, "a", PROMPT, LONG)
    for _ in range(6):
        checked_step(engine)
    [request] = engine._scheduler.running
    assert request.num_owed_tokens > 0
    engine.abort("a")
    engine.check()
    assert not engine.has_work
    assert engine._runtime.states is not None
    assert engine._runtime.states.num_free == 16
