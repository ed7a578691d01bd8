"""State slots: exact numbers, and what a step leaves behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.errors import CapacityError
from onnxport.kv.states import NO_TOKENS, StatePool, StateStep


@pytest.mark.parametrize(("num_slots", "sequences"), [(2, 1), (3, 1), (4, 2), (9, 4)])
def test_a_sequence_needs_two_slots(num_slots: int, sequences: int) -> None:
    assert StatePool(num_slots).num_sequences == sequences


@pytest.mark.parametrize("num_slots", [0, 1])
def test_too_few_slots_are_refused(num_slots: int) -> None:
    with pytest.raises(CapacityError, match=f"room for {num_slots} states .* needs 2"):
        StatePool(num_slots)


def test_a_step_reads_what_is_held_and_writes_what_is_free() -> None:
    pool = StatePool(4)
    assert pool.free_slots() == (1, 2, 3, 4)
    first = pool.reserve([NO_TOKENS, NO_TOKENS])
    assert first == StateStep((0, 0), (1, 2))
    pool.commit(first)
    pool.check([1, 2])
    second = pool.reserve([2, 1])
    assert second == StateStep((2, 1), (3, 4))
    assert pool.num_free == 0
    pool.commit(second)
    pool.check([3, 4])
    assert pool.free_slots() == (1, 2)  # that released last is the next


def test_a_step_that_is_rolled_back_can_be_taken_again() -> None:
    pool = StatePool(4)
    pool.commit(pool.reserve([NO_TOKENS]))
    before = pool.free_slots()
    step = pool.reserve([1, NO_TOKENS])
    pool.rollback(step)
    pool.check([1])
    assert pool.free_slots() == before
    assert pool.reserve([1, NO_TOKENS]) == step


def test_a_shared_slot_is_free_when_its_last_owner_lets_go() -> None:
    pool = StatePool(6)
    pool.commit(pool.reserve([NO_TOKENS]))
    assert pool.share(1) == 1
    step = pool.reserve([1, 1])
    assert step.writes == (2, 3)
    pool.check([1, 1, 2, 3])
    pool.commit(step)
    pool.check([2, 3])
    assert pool.release(2) == NO_TOKENS
    pool.check([3])


def test_nobody_owns_the_state_of_no_tokens() -> None:
    pool = StatePool(2)
    assert pool.share(NO_TOKENS) == pool.release(NO_TOKENS) == NO_TOKENS
    pool.check([NO_TOKENS, NO_TOKENS])


@pytest.mark.parametrize("owners", [[], [1, 1], [1, 2], [3]])
def test_check_sees_what_leaks(owners: list[int]) -> None:
    pool = StatePool(2)
    pool.commit(pool.reserve([NO_TOKENS]))
    pool.check([1])
    with pytest.raises(AssertionError):
        pool.check(owners)


@pytest.mark.parametrize("name", ["share", "release"])
def test_a_free_slot_is_nobodys(name: str) -> None:
    with pytest.raises(AssertionError, match="slot 2 is free"):
        getattr(StatePool(2), name)(2)


def test_a_free_slot_is_not_read() -> None:
    with pytest.raises(AssertionError, match="a free slot is read"):
        StatePool(2).reserve([2])


@given(st.data())
def test_whatever_happens_every_slot_is_free_or_owned(data: st.DataObject) -> None:
    sequences = data.draw(st.integers(1, 4))
    pool = StatePool(2 * sequences)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 20))):
        begin = data.draw(st.integers(0, sequences - len(held)))
        forks = data.draw(st.integers(0, sequences - len(held) - begin)) if held else 0
        held += [pool.share(held[-1]) for _ in range(forks)]
        chosen = [at for at in range(len(held)) if data.draw(st.booleans())]
        reads = [*(held[at] for at in chosen), *[NO_TOKENS] * begin]
        step = pool.reserve(reads)
        assert not {*step.writes} & {*held, NO_TOKENS}
        pool.check([*held, *step.writes])
        if data.draw(st.booleans()):
            pool.rollback(step)
        else:
            pool.commit(step)
            for at, slot in zip(chosen, step.writes, strict=False):
                held[at] = slot
            held += step.writes[len(chosen) :]
        pool.check(held)
        while held and data.draw(st.integers(0, 2)) == 0:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        pool.check(held)
