"""State slots: exact numbers, and what a step leaves behind."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from onnxport.errors import CapacityError
from onnxport.kv.states import NO_TOKENS, Kept, StatePool, StateStep
from tests.tiers import examples


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
    pool.check([1, 2, 2, 1, 3, 4])
    pool.commit(second)
    pool.release(2)
    pool.release(1)
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
    assert pool.release(1) == NO_TOKENS
    pool.check([1])
    pool.release(1)
    pool.commit(pool.reserve([NO_TOKENS, NO_TOKENS]))
    pool.check([1, 2])
    pool.release(1)
    pool.commit(pool.reserve([2]))
    pool.check([2, 1])
    pool.commit(pool.reserve([1]))
    pool.release(1)
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
    with pytest.raises(AssertionError, match="slot 2 "):
        getattr(StatePool(2), name)(2)


def test_a_free_slot_is_not_read() -> None:
    with pytest.raises(AssertionError, match="slot 2 holds nothing"):
        StatePool(2).reserve([2])


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keeping(*numbers: int, num_slots: int = 4) -> tuple[StatePool, list[Kept]]:
    """A pool that keeps states under these numbers, in slots 1, 2 and so on."""
    pool = StatePool(num_slots)
    writes = pool.reserve([NO_TOKENS] * len(numbers)).writes
    kept = []
    for slot, number in zip(writes, numbers, strict=True):
        kept.append(pool.register(slot, key(number)))
        pool.release(slot)
    pool.check([])
    return pool, kept


def test_kept_states_are_handed_out_last_the_longest_unused_first() -> None:
    pool, _ = keeping(7, 8, 9)
    assert (pool.num_free, pool.blank_slots(), pool.free_slots()) == (4, (4,), (4, 1, 2, 3))
    pool.share(1)
    pool.release(1)
    assert pool.free_slots() == (4, 2, 3, 1)
    assert pool.reserve([1, NO_TOKENS]).writes == (4, 2)
    assert [pool.find(key(number)) for number in (7, 8, 9)] == [1, None, 3]
    pool.check([1, 2, 4])


def test_what_a_step_reads_is_not_handed_out_for_it() -> None:
    pool, _ = keeping(7, 8, num_slots=2)
    step = pool.reserve([1])
    assert step == StateStep((1,), (2,))
    pool.rollback(step)
    pool.check([])
    assert (pool.find(key(7)), pool.find(key(8))) == (1, None)


def test_an_order_can_be_changed() -> None:
    pool, (_, _, last) = keeping(7, 8, 9)
    pool.hand_out_first(last)
    assert pool.free_slots() == (4, 3, 1, 2)
    pool.hand_out_last(last)
    assert pool.free_slots() == (4, 1, 2, 3)
    pool.share(3)
    pool.hand_out_first(last)  # it is used
    pool.hand_out_last(last)
    pool.check([3])
    pool.pass_by(last)
    assert pool.find(key(9)) is None
    pool.check([3])


def test_what_is_gone_changes_nothing_of_what_came_in_its_place() -> None:
    """Of the same number, under the same key: another sequence's all the same."""
    pool, [gone, *_] = keeping(7, 8, num_slots=4)
    pool.hide(key(7))
    [slot] = pool.reserve([NO_TOKENS]).writes
    own = pool.register(slot, key(7))
    assert (own.slot, own.key) == (gone.slot, gone.key)
    pool.release(slot)
    before = pool.free_slots()
    for change in (pool.hand_out_first, pool.hand_out_last, pool.pass_by, pool.settle):
        change(gone)
    assert pool.free_slots() == before
    assert pool.find(key(7)) == slot


@pytest.mark.parametrize("first_ends", [True, False])
def test_the_state_where_one_has_ended_stays_when_another_goes_on(first_ends: bool) -> None:
    pool = StatePool(6)
    first, second = pool.reserve([NO_TOKENS] * 2).writes
    both = pool.register(first, key(7)), pool.register(second, key(7))
    assert both[0] is both[1]
    pool.release(first)
    pool.release(second)
    pool.settle(both[0])
    pool.hand_out_first(both[1])
    assert pool.find(key(7)) == first
    assert pool.free_slots()[-1] == first
    pool.pass_by(both[1])
    assert pool.find(key(7)) == first
    pool.check([])


def test_a_state_on_the_way_of_two_is_found_until_both_have_a_later_one() -> None:
    pool = StatePool(6)
    first, second = pool.reserve([NO_TOKENS] * 2).writes
    kept = pool.register(first, key(7))
    pool.register(second, key(7))
    pool.pass_by(kept)
    assert pool.find(key(7)) == first
    pool.pass_by(kept)
    assert pool.find(key(7)) is None
    pool.check([first, second])


def test_a_state_where_one_stops_outlives_those_on_whose_way_it_is() -> None:
    pool = StatePool(6)
    first, second = pool.reserve([NO_TOKENS] * 2).writes
    kept = pool.register(first, key(7))
    pool.register(second, key(7), stays=True)
    pool.pass_by(kept)
    assert pool.find(key(7)) == first
    pool.check([first, second])


def test_what_is_hidden_is_found_no_more() -> None:
    pool, _ = keeping(7, 8)
    pool.share(2)
    for number in (7, 8, 9):
        pool.hide(key(number))
        assert pool.find(key(number)) is None
    pool.check([2])
    assert pool.blank_slots() == (1, 3, 4)
    pool.release(2)
    assert pool.blank_slots() == (2, 1, 3, 4)


def test_of_two_states_of_the_same_tokens_the_used_one_is_found() -> None:
    pool, [free] = keeping(7)
    [slot] = pool.reserve([NO_TOKENS]).writes
    assert pool.register(slot, key(7)) is free
    assert pool.find(key(7)) == free.slot == slot == 2
    assert pool.blank_slots() == (1, 3, 4)
    [other] = pool.reserve([NO_TOKENS]).writes
    assert pool.register(other, key(7)) is free
    assert pool.find(key(7)) == slot  # which is used, too
    pool.release(other)
    pool.check([slot])
    assert pool.blank_slots() == (1, 3, 4)


def test_a_reset_forgets_every_key() -> None:
    pool, _ = keeping(7, 8)
    pool.share(2)
    pool.reset_cache()
    pool.check([2])
    assert pool.blank_slots() == (1, 3, 4)
    with pytest.raises(AssertionError, match="slot 1 holds nothing"):
        pool.share(1)


def test_a_step_in_place_writes_what_it_reads() -> None:
    pool = StatePool(4, in_place=True)
    pool.commit(pool.reserve([NO_TOKENS, NO_TOKENS], [0, 1]))
    step = pool.reserve([1, 2], [0])
    assert step == StateStep((1, 2), (1, 3))
    assert step.in_place == (0,)
    pool.check([1, 2, *step.reads, *step.writes])
    pool.commit(step)
    pool.release(1)
    pool.release(2)
    pool.check(step.writes)
    assert pool.free_slots() == (2, 4)


def test_what_others_own_or_read_is_not_written_in_place() -> None:
    pool = StatePool(8, in_place=True)
    pool.commit(pool.reserve([NO_TOKENS, NO_TOKENS]))
    pool.share(1)
    assert pool.reserve([1, 2, 2], [0, 1, 2]).in_place == ()


def test_nothing_is_written_in_place_unless_it_may() -> None:
    pool = StatePool(4)
    pool.commit(pool.reserve([NO_TOKENS]))
    assert pool.reserve([1], [0]).in_place == ()


def test_a_state_in_place_is_kept_before_it_changes() -> None:
    pool = StatePool(4, in_place=True)
    pool.commit(pool.reserve([NO_TOKENS]))
    pool.register(1, key(7))
    step = pool.reserve([1], [0])
    assert step == StateStep((1,), (2,))
    pool.commit(step)
    pool.release(1)
    assert pool.find(key(7)) == 1
    assert pool.reserve([2], [0]).in_place == (0,)


def test_no_more_are_kept_than_may_be() -> None:
    pool, _ = keeping(7, 8, 9, num_slots=8)
    pool.max_kept = 2
    pool.share(1)
    pool.release(1)
    assert [pool.find(key(number)) for number in (7, 8, 9)] == [1, None, 3]
    pool.share(1)
    pool.share(3)
    pool.release(1)
    pool.release(3)
    pool.check([])
    assert pool.num_free - len(pool.blank_slots()) == 2


@pytest.mark.parametrize(("stays", "kept"), [(True, [4, 5, 6]), (False, [4])])
def test_many_that_go_on_at_once_keep_what_there_is_room_for(stays: bool, kept: list[int]) -> None:
    """The others are written in place, so that a step takes no more slots than are kept."""
    pool = StatePool(16, in_place=True, max_kept=3)
    held = list(pool.reserve([NO_TOKENS] * 6).writes)
    for slot in held[:3]:
        pool.register(slot, key(slot), stays=True)
        pool.release(slot)
    held = [*held[3:], *pool.reserve([NO_TOKENS] * 5).writes]
    for slot in held:
        pool.register(slot, key(slot), stays=stays)
    step = pool.reserve(held, range(len(held)))
    assert [read for read, write in zip(step.reads, step.writes, strict=True) if read != write] == (
        kept
    )
    pool.commit(step)
    for slot in held:
        pool.release(slot)
    pool.check(step.writes)
    found = [slot for slot in range(1, 17) if pool.find(key(slot)) is not None]
    assert found == sorted([*kept, *([] if stays else [2, 3])])


def test_of_many_that_go_on_at_once_those_that_stay_are_kept_first() -> None:
    """Rows that decode come before prompts, and only pass by."""
    pool = StatePool(10, in_place=True, max_kept=2)
    held = pool.reserve([NO_TOKENS] * 4).writes
    for slot in held:
        pool.register(slot, key(slot), stays=slot > 2)
    pool.commit(pool.reserve(held, range(4)))
    for slot in held:
        if pool.find(key(slot)) is not None:
            pool.release(slot)
    assert [pool.find(key(slot)) for slot in held] == [None, None, 3, 4]


class StateMachine(RuleBasedStateMachine):
    """Sequences that begin, go on, fork, are kept and end: no slot is lost or owned by two."""

    @initialize(
        sequences=st.integers(1, 4),
        extra=st.integers(0, 3),
        in_place=st.booleans(),
        max_kept=st.none() | st.integers(0, 4),
    )
    def start(self, sequences: int, extra: int, in_place: bool, max_kept: int | None) -> None:
        self.sequences = sequences
        self.pool = StatePool(2 * sequences + extra, in_place=in_place, max_kept=max_kept)
        self.held: list[int] = []
        self.content: dict[int, int] = {}  # slot -> what was written to it
        self.marks: list[Kept] = []  # of sequences on whose way these are
        self.number = 0

    @rule(data=st.data(), fails=st.booleans())
    def step(self, data: st.DataObject, fails: bool) -> None:
        chosen = [at for at in range(len(self.held)) if data.draw(st.booleans())]
        room = self.sequences - len(self.held)
        numbers = [one for one in range(self.number) if self.pool.find(key(one)) is not None]
        begins = [
            data.draw(st.sampled_from([None, *numbers]))
            for _ in range(data.draw(st.integers(0, room)))
        ]
        found = [NO_TOKENS if one is None else self.pool.find(key(one)) or 0 for one in begins]
        for one, slot in zip(begins, found, strict=True):
            assert one is None or self.content[slot] == one
        reads = [*(self.held[at] for at in chosen), *found]
        losable = [row for row in range(len(chosen)) if data.draw(st.booleans())]
        before = {slot: self.content[slot] for slot in reads if slot != NO_TOKENS}
        step = self.pool.reserve(reads, losable)
        assert {*step.in_place} <= {*losable}
        others = [*self.held, *reads, NO_TOKENS]
        for row in step.in_place:
            assert others.count(reads[row]) == 2, "it is held once, and read once"
        fresh = {write for row, write in enumerate(step.writes) if row not in step.in_place}
        assert not fresh & {*others}
        assert len({*step.writes}) == len(reads)
        self.pool.check([*self.held, *step.reads, *step.writes])
        for slot in step.writes:
            self.number += 1
            self.content[slot] = self.number // 2  # some are of the same tokens
        for one, slot in self._found(before):
            assert self.content[slot] == one, "what is found is what was kept"
        if fails:
            self.pool.rollback(step)
            for row in step.in_place:
                self.pool.release(step.reads[row])
                self.held.remove(step.reads[row])
            return
        self.pool.commit(step)
        for at, slot in zip(chosen, step.writes, strict=False):
            self.pool.release(self.held[at])
            self.held[at] = slot
        self.held += step.writes[len(chosen) :]

    def _found(self, content: dict[int, int]) -> list[tuple[int, int]]:
        """What was in slots, and which of these are found under its key."""
        return [(one, slot) for slot, one in content.items() if self.pool.find(key(one)) == slot]

    @precondition(lambda self: 0 < len(self.held) < self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.held.append(self.pool.share(data.draw(st.sampled_from(self.held))))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), stays=st.booleans())
    def keep(self, data: st.DataObject, stays: bool) -> None:
        slot = data.draw(st.sampled_from(self.held))
        kept = self.pool.register(slot, key(self.content[slot]), stays=stays)
        assert self.pool.find(key(self.content[slot])) == kept.slot
        assert kept.stays or not stays
        if not stays:
            self.marks.append(kept)

    @precondition(lambda self: self.marks)
    @rule(data=st.data(), settles=st.booleans())
    def leave(self, data: st.DataObject, settles: bool) -> None:
        kept = self.marks.pop(data.draw(st.integers(0, len(self.marks) - 1)))
        before = self.pool.find(kept.key)
        stays = kept.stays or kept in self.marks
        if settles:
            self.pool.settle(kept)
        else:
            self.pool.pass_by(kept)
        if settles or stays:
            assert self.pool.find(kept.key) == before

    @precondition(lambda self: self.marks)
    @rule(data=st.data(), first=st.booleans())
    def order(self, data: st.DataObject, first: bool) -> None:
        kept = data.draw(st.sampled_from(self.marks))
        (self.pool.hand_out_first if first else self.pool.hand_out_last)(kept)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(at))

    @rule(number=st.integers(0, 5))
    def hide(self, number: int) -> None:
        self.pool.hide(key(number))

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.held)
            assert sorted(self.pool.free_slots()) == [
                slot for slot in range(1, self.pool.num_slots + 1) if slot not in self.held
            ]


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=examples(200), stateful_step_count=30, deadline=None
)
