"""States in host memory: written where they were read, as few kept as K/V, lost if a step fails."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from onnxport.kv.states import StatePool
from onnxport.providers.base import Capabilities
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving import sampling
from onnxport.serving.fallback import describe
from onnxport.serving.linear_attention import LEAST_KEPT, most_kept
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from tests.serving.bench import BLOCK_SIZE, saying
from tests.serving.helpers import alone, checked_step, null_engine, reasons, run, submit, tokens
from tests.serving.test_states import PROMPT, StateBench
from tests.serving.watch import Watch

LONG = SamplingParams(temperature=0.0, max_tokens=20)


def bench(rows: int = 4, max_kept: int | None = None) -> StateBench:
    pool = StatePool(2 * rows + 2, in_place=True, max_kept=max_kept)
    return StateBench(80, rows=rows, budget=16, states=pool)


def test_a_sequence_stays_in_one_slot() -> None:
    states = bench()
    states.submit("a", 20)
    states.submit("b", 3)
    assert states.slots() == [("a", 0, 1)]
    assert states.slots() == [("a", 1, 1), ("b", 0, 2)]
    assert states.slots() == [("a", 1, 1), ("b", 2, 2)]


def test_completions_part_from_one_slot_before_they_stay_in_theirs() -> None:
    states = bench()
    states.submit("a", 3, n=2)
    assert states.slots() == [("a", 0, 1)]
    assert states.slots() == [("a", 1, 2), ("a1", 1, 3)]
    assert states.slots() == [("a", 2, 2), ("a1", 3, 3)]


def test_a_prompt_leaves_the_state_that_is_kept() -> None:
    states = bench()
    states.submit("a", range(14), cached=True)
    assert states.slots() == [("a", 0, 1)]  # 12 tokens of it
    assert states.slots() == [("a", 1, 2)]
    assert states.slots() == [("a", 2, 2)]
    states.submit("b", [*range(14), 50], cached=True)
    assert states.slots()[1] == ("b", 1, 3)  # found, and another may find it again
    assert states.pool_of_states.find(keys_of(states.requests["a"], 3)) == 1


def keys_of(request: Request, blocks: int) -> bytes:
    assert request.keys is not None
    return request.keys.key(blocks - 1)


def test_who_yields_takes_no_state_from_who_starts() -> None:
    """As many are kept as may be, so that its own takes the place of the one that is found."""
    pool = StatePool(8, in_place=True, max_kept=1)
    states = StateBench(5, policy="priority", rows=4, states=pool)
    states.submit("a", 9, cached=True)
    assert [states.slots(), states.slots()] == [[("a", 0, 1)], [("a", 1, 2)]]
    states.finish("a")
    states.submit("low", [90, 91, 92], cached=True, priority=1)
    assert [states.slots(), states.slots()] == [[("low", 0, 2)], [("low", 2, 2)]]
    states.submit("high", [*range(8), *range(50, 62)], cached=True)
    assert states.slots() == [("high", 1, 3)]
    assert not states.requests["low"].running


def test_few_that_are_kept_let_many_stay_in_their_slots() -> None:
    """All come by the end of a block together; one slot more is used, half of two."""
    states = bench(max_kept=2)
    for name in "abcd":
        states.submit(name, array("q", [ord(name), 1, 2]), cached=True)
    used: set[int] = set()
    for _ in range(4 * BLOCK_SIZE):
        used |= {write for _, _, write in states.slots()}
    assert len(used) == 5


def test_a_row_with_guesses_keeps_what_it_reads() -> None:
    states = bench()
    for name in "ab":
        states.submit(name, 3)
    states.slots()
    plan = states.scheduler.plan(guess=saying({states.requests["a"]: [7, 7]}))
    reservation = states.scheduler.reserve(plan)
    assert reservation.states is not None
    assert dict(zip(reservation.states.reads, reservation.states.writes, strict=True)) == {
        1: 3,
        2: 2,
    }
    [lost] = states.scheduler.rollback(plan, reservation)
    assert lost is states.requests["b"]
    states.scheduler.check()


def test_whose_step_failed_is_computed_again_and_leaves_what_it_reads() -> None:
    states = bench()
    for name in "ab":
        states.submit(name, 3)
    states.slots()
    states.fail()
    a, b = states.requests.values()
    assert [one.state for one in (a, b)] == [0, 0]
    assert [one.running for one in (a, b)] == [False, False]
    assert [(name, read) for name, read, _ in states.slots()] == [("a", 0), ("b", 0)]
    before = a.state, b.state
    plan = states.fail()
    assert list(plan.requests) == [a, b]
    assert (a.state, b.state) == before  # a second failure changes nothing
    states.finish("a", "b")
    states.submit("c", 3)
    states.slots()
    assert states.slots() == [("c", 1, 1)]


@pytest.mark.parametrize("state_slots", [16, 20])
def test_steps_that_fail_end_only_who_fails_alone(state_slots: int) -> None:
    engine = null_engine(
        state_slots=state_slots, host_states=True, fails=lambda number: number % 5 == 3
    )
    for name in "abcd":
        submit(engine, name, [ord(name), *PROMPT[:7]], LONG)
    deltas = run(engine)
    assert engine.stats().num_failed_steps > 2
    for name in "abcd":
        expected = alone([ord(name), *PROMPT[:7]], LONG, has_states=True)
        found = tokens(deltas[name])
        assert found == expected[: len(found)]
        assert reasons(deltas[name]) in (["length"], ["error"])


@pytest.mark.parametrize("params", [{}, {"n": 3}, {"n": 3, "use_beam_search": True}])
def test_one_that_always_fails_is_found(
    params: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails far behind its prompt, so it has to get there beside the others and alone."""
    engine = null_engine(state_slots=16, host_states=True, enable_prefix_caching=False)
    sample_step = sampling.sample_step

    def sample(plan, *arguments):  # type: ignore[no-untyped-def]
        for request in plan.requests:
            if request.request_id == "bad" and request.num_computed_tokens >= 12:
                raise ZeroDivisionError("a bad request")
        return sample_step(plan, *arguments)

    monkeypatch.setattr(sampling, "sample_step", sample)
    submit(engine, "bad", PROMPT[:4], LONG)
    asked = SamplingParams(temperature=0.0, max_tokens=20, **params)  # type: ignore[arg-type]
    submit(engine, "good", PROMPT[:9], asked)
    deltas = run(engine)
    assert reasons(deltas["bad"]) == ["error"]
    assert "a bad request" in str(deltas["bad"][-1].error)
    for index in range(asked.num_sequences):
        assert tokens(deltas["good"], index) == alone(PROMPT[:9], asked, index, has_states=True)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_failed_steps < 8


def test_a_step_that_is_interrupted_is_computed_again() -> None:
    def interrupt(number: int) -> bool:
        if number == 3:
            raise KeyboardInterrupt
        return False

    engine = null_engine(state_slots=16, host_states=True, fails=interrupt)
    submit(engine, "a", PROMPT, LONG)
    found = [*checked_step(engine), *checked_step(engine), *checked_step(engine)]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    found += run(engine)["a"]
    assert tokens(found) == alone(PROMPT, LONG, has_states=True)


@pytest.mark.parametrize("failing", [3, 4, 6])
def test_beams_are_told_to_yield_whichever_of_them_was_in_place(failing: int) -> None:
    """The first one is not where two go on from it."""
    engine = null_engine(state_slots=16, host_states=True, fails=lambda number: number == failing)
    watch = Watch(engine)
    params = SamplingParams(max_tokens=12, n=3, use_beam_search=True)
    submit(engine, "beams", [5, 2, 3, 4, 5], params)
    submit(engine, "other", [5, 2, 3, 4, 9])
    deltas = run(engine)
    for index in range(3):
        found = tokens(deltas["beams"], index)
        assert found == alone([5, 2, 3, 4, 5], params, index, has_states=True)
    told = watch.kinds("beams").count("preempted") + watch.kinds("other").count("preempted")
    assert told == engine.stats().num_preemptions > 0
    watch.check_all_ended()


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "kept"), [(10, 100, 10), (10, 99, 9), (1, 150, LEAST_KEPT)]
)
def test_kept_states_take_as_much_as_the_cache(
    num_blocks: int, block_bytes: int, kept: int
) -> None:
    limits: Capabilities = NullModel(NullOptions(state_slots=8, host_states=True)).capabilities
    chosen = dataclasses.replace(
        limits, num_blocks=num_blocks, kv_block_bytes=block_bytes, state_bytes=100
    )
    assert most_kept(chosen) == kept
    assert f"at most {kept} of them kept for prefixes" in describe(chosen)
    chosen = dataclasses.replace(chosen, host_states=False)
    assert most_kept(chosen) is None
    assert "kept" not in describe(chosen)
