"""Steps that follow from the last one: planned and packed while the model runs, or for little."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.kv.table import Reservation
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel
from onnxport.serving.batch import BatchPacker
from onnxport.serving.beside import MANY_ROWS
from onnxport.serving.following import following
from onnxport.serving.params import SamplingParams
from onnxport.serving.planner import Planner
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.step_plan import StepPlan
from tests.serving.bench import Bench, group, rows, saying
from tests.serving.helpers import alone, null_engine, run, submit, tokens
from tests.waiting import PATIENCE_S


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return the plans that are looked for from now on, as they are."""
    looked: list[StepPlan] = []
    plain = Planner.plan

    def plan(self: Planner, *args: object) -> StepPlan:
        looked.append(plain(self, *args))  # type: ignore[arg-type]
        return looked[-1]

    monkeypatch.setattr(Planner, "plan", plan)
    return looked


def decoding(num_blocks: int = 40, names: str = "ab", num_tokens: int = 5) -> Bench:
    """A bench whose requests have computed their prompts."""
    bench = Bench(num_blocks, rows=4)
    for name in names:
        bench.submit(name, num_tokens)
    while any(len(one.tokens) == num_tokens for one in bench.requests.values()):
        bench.step()
    return bench


def test_requests_that_decode_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine()
    submit(engine, "a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))
    submit(engine, "b", [4, 5], SamplingParams(temperature=0.0, max_tokens=30))
    looked = count_looks(monkeypatch)
    while engine.has_work:
        engine.step()
    assert len(looked) == 2  # the prompts, and the first tokens behind them
    assert engine.stats().num_steps == 30


def test_a_step_that_follows_shares_what_stays_the_same() -> None:
    bench = decoding()
    first = bench.step()
    second = bench.scheduler.plan()
    assert rows(second) == [("a", 6, 1), ("b", 6, 1)]
    assert second.requests is first.requests
    assert second.num_new is first.num_new
    assert second.num_new_columns == (0, 0)
    bench.step()
    bench.step()
    assert bench.scheduler.plan().num_new_columns == (1, 1)  # behind 8 tokens, in blocks of 4


@pytest.mark.parametrize(
    "event",
    [
        lambda bench: bench.submit("c", 3),
        lambda bench: bench.finish("a"),
        lambda bench: bench.fail(),
    ],
    ids=["a request comes", "one ends", "a step fails"],
)
def test_after_anything_else_a_step_is_looked_for(
    event: Callable[[Bench], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = decoding()
    bench.step()
    event(bench)
    looked = count_looks(monkeypatch)
    plan = bench.scheduler.plan()
    assert looked == [plan]


def test_nothing_follows_prompts_and_guesses() -> None:
    bench = Bench(num_blocks=40, budget=4)
    bench.submit("a", 7)
    plan = bench.step()
    assert following(plan, bench.scheduler._queues, bench.pool) is None
    bench.step()
    request = bench.requests["a"]
    plan = bench.scheduler.plan(guess=saying({request: (3,)}))
    bench.scheduler.commit(plan, bench.scheduler.reserve(plan))
    assert plan.drafts
    assert following(plan, bench.scheduler._queues, bench.pool) is None


def test_nothing_follows_a_prompt_whose_last_token_makes_siblings() -> None:
    """It has one token left, as rows that decode have, and they fork while one is planned."""
    bench = Bench(num_blocks=40, budget=4)
    bench.submit("a", 5, n=2)
    bench.step()
    plan = bench.scheduler.plan()
    assert rows(plan) == [("a", 4, 1)]
    reservation = bench.scheduler.reserve(plan)
    bench.scheduler.plan_ahead(plan)
    ends = group(bench.requests["a"])
    bench.scheduler.commit(plan, reservation)
    for one in ends:
        one.tokens.append(7)
    assert rows(bench.scheduler.plan()) == [("a", 5, 1), ("a1", 5, 1)]


def test_guesses_are_not_passed_over() -> None:
    bench = decoding()
    bench.step()
    request = bench.requests["a"]
    assert bench.scheduler.plan(guess=saying({request: (3,)})).drafts == {0: (3,)}


def test_suspects_of_a_failure_run_alone() -> None:
    bench = decoding()
    bench.step()
    assert rows(bench.scheduler.plan([bench.requests["b"]])) == [("b", 6, 1)]


def test_blocks_that_run_out_are_looked_for() -> None:
    bench = decoding(num_blocks=4)
    for _ in range(2):
        bench.step()
    assert bench.pool.num_free == 0
    assert [len(one.tokens) for one in bench.requests.values()] == [8, 8]
    bench.step()
    plan = bench.scheduler.plan()
    assert [one.request_id for one in plan.preempted] == ["b"]


def test_a_block_that_siblings_share_is_copied_first() -> None:
    bench = Bench(num_blocks=40)
    bench.submit("a", 6, n=2)
    bench.step()
    plan = bench.step()
    assert plan.copied == {0}
    assert bench.step().copied == frozenset()
    assert following(plan, bench.scheduler._queues, bench.pool) is not None


def test_a_plan_made_ahead_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = decoding()
    last = bench.scheduler.plan()
    reservation = bench.scheduler.reserve(last)
    bench.scheduler.plan_ahead(last)
    commit(bench, last, reservation)
    monkeypatch.setattr("onnxport.serving.following.following", None)
    assert rows(bench.scheduler.plan()) == [("a", 6, 1), ("b", 6, 1)]


def test_a_plan_made_ahead_of_an_end_is_not() -> None:
    bench = decoding()
    last = bench.scheduler.plan()
    reservation = bench.scheduler.reserve(last)
    bench.scheduler.plan_ahead(last)
    commit(bench, last, reservation)
    bench.finish("a")
    assert rows(bench.scheduler.plan()) == [("b", 6, 1)]


def test_planning_goes_on_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model returns only when the step after the one it runs has been planned."""
    planned = threading.Event()
    plain, plan_ahead = NullModel.run, Scheduler.plan_ahead

    def wait(self: NullModel, inputs: StepInputs) -> NDArray[np.float32]:
        if len(inputs.past_sequence_lengths) >= MANY_ROWS:
            assert planned.wait(PATIENCE_S)
        return plain(self, inputs)

    def plan(self: Scheduler, running: StepPlan) -> None:
        plan_ahead(self, running)
        planned.set()

    monkeypatch.setattr(NullModel, "run", wait)
    monkeypatch.setattr(Scheduler, "plan_ahead", plan)
    engine = null_engine(
        num_blocks=8 * MANY_ROWS, max_num_seqs=MANY_ROWS, max_num_batched_tokens=2 * MANY_ROWS
    )
    for index in range(MANY_ROWS):
        submit(engine, str(index), [index + 1, 2])
    deltas = run(engine)
    assert planned.is_set()
    for index in range(MANY_ROWS):
        assert tokens(deltas[str(index)]) == alone([index + 1, 2])
    engine.close()


def commit(bench: Bench, plan: StepPlan, reservation: Reservation) -> None:
    bench.scheduler.commit(plan, reservation)
    for row in plan.sampled:
        plan.requests[row].tokens.append(7)


@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    events=st.lists(st.sampled_from(["step", "step", "step", "finish", "submit"]), max_size=40),
)
def test_what_is_packed_is_what_a_fresh_packer_packs(prompts: list[int], events: list[str]) -> None:
    bench = Bench(num_blocks=200, rows=8, budget=24)
    packer = BatchPacker(8, 24)
    names = iter(range(1000))
    for length in prompts:
        bench.submit(str(next(names)), length)
    for event in events:
        running = list(bench.scheduler.running)
        if event == "submit":
            bench.submit(str(next(names)), 3)
        elif event == "finish" and running:
            bench.finish(running[0].request_id)
        plan = bench.scheduler.plan()
        if not plan.requests:
            continue
        reservation = bench.scheduler.reserve(plan)
        found, fresh = packer.pack(plan), BatchPacker(8, 24).pack(plan)
        for name in fresh.__slots__:
            np.testing.assert_array_equal(getattr(found, name), getattr(fresh, name), name)
        commit(bench, plan, reservation)


def test_states_are_told_in_the_steps_in_which_somebody_reads_them() -> None:
    bench = decoding()
    packer = BatchPacker(4, 64, features=3)
    for reads in (True, True, False, False, True):
        plan = bench.scheduler.plan()
        inputs = packer.pack(plan, reads_states=reads)
        states = inputs.hidden_states
        assert (None if states is None else states.shape) == ((2, 3) if reads else None)
        assert inputs.input_ids.tolist() == [one.tokens[-1] for one in plan.requests]
        bench.step()
    assert BatchPacker(4, 64).pack(bench.scheduler.plan()).hidden_states is None
