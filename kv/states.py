"""The slots for states of sequences: which are free, who holds the others, what a step writes.

A state is what layers without keys and values know of all tokens of a sequence so far. It is never
changed once it has been committed: a step reads the slot that a sequence holds and writes another
one, which the sequence holds from then on. So a step that fails can be run again, and sequences
that have begun alike can hold one slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from onnxport.errors import CapacityError

NO_TOKENS: Final = 0  # the slot that is the state of no tokens; nobody owns it or writes it
SLOTS_PER_SEQUENCE: Final = 2  # the one that it holds, and the one that a step writes


@dataclass(frozen=True, slots=True)
class StateStep:
    """The slots of one step, row by row, until it is committed or rolled back."""

    reads: tuple[int, ...]  # slots that sequences hold
    writes: tuple[int, ...]  # distinct ones, which nobody held


class StatePool:
    """Ref-counted state slots in plain ints, numbered from 1; knows neither requests nor tensors.

    The slot that was released last is handed out first.
    """

    __slots__ = ("_free", "_refs", "num_slots")

    def __init__(self, num_slots: int) -> None:
        """Begin with all slots free.

        Raises:
            CapacityError: not even one sequence can run.
        """
        if num_slots < SLOTS_PER_SEQUENCE:
            raise CapacityError(
                f"there is room for {num_slots} states of sequences, and one sequence needs "
                f"{SLOTS_PER_SEQUENCE}: the one that a step reads and the one that it writes; give "
                "them more memory"
            )
        self.num_slots = num_slots
        self._refs = [0] * (num_slots + 1)
        self._free = list(range(num_slots, 0, -1))  # a stack

    @property
    def num_sequences(self) -> int:
        """How many sequences can run at once, each of which every step may go on with."""
        return self.num_slots // SLOTS_PER_SEQUENCE

    @property
    def num_free(self) -> int:
        """Slots that a step can write now."""
        return len(self._free)

    def free_slots(self) -> tuple[int, ...]:
        """The free slots, the next to be handed out first."""
        return tuple(reversed(self._free))

    def share(self, slot: int) -> int:
        """Add one owner to a slot that has some, or to the state of no tokens; returns it."""
        if slot != NO_TOKENS:
            assert self._refs[slot] > 0, f"slot {slot} is free and cannot be shared"
            self._refs[slot] += 1
        return slot

    def release(self, slot: int) -> int:
        """Take one owner from a slot, which is free without another; returns NO_TOKENS."""
        if slot != NO_TOKENS:
            assert self._refs[slot] > 0, f"slot {slot} is free and cannot be released"
            self._refs[slot] -= 1
            if not self._refs[slot]:
                self._free.append(slot)
        return NO_TOKENS

    def reserve(self, reads: Sequence[int]) -> StateStep:
        """Take a slot to write for each row of a step.

        Callers look at `num_sequences` before; asking for more than are free is a bug of theirs.

        Args:
            reads: of each row, the slot that its sequence holds.
        """
        assert len(reads) <= len(self._free), f"{len(reads)} rows, {len(self._free)} slots free"
        assert all(slot == NO_TOKENS or self._refs[slot] for slot in reads), "a free slot is read"
        writes = tuple(self._free.pop() for _ in reads)
        for slot in writes:
            self._refs[slot] = 1
        return StateStep(tuple(reads), writes)

    def commit(self, step: StateStep) -> None:
        """The step ran: sequences hold what it wrote, and let go of what it read."""
        for slot in step.reads:
            self.release(slot)

    def rollback(self, step: StateStep) -> None:
        """Give back what the step was to write; sequences hold what they held."""
        for slot in reversed(step.writes):
            self.release(slot)

    def check(self, owners: Iterable[int]) -> None:
        """Assert that every slot is free or owned exactly as often as its count says.

        Args:
            owners: the slot of every owner there is.
        """
        counts = Counter(slot for slot in owners if slot != NO_TOKENS)
        assert all(1 <= slot <= self.num_slots for slot in counts), "a slot outside the pool"
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        for slot in range(1, self.num_slots + 1):
            refs = self._refs[slot]
            assert refs == counts[slot], f"slot {slot}: ref count {refs}, owned {counts[slot]}"
            assert (slot in free) == (refs == 0), f"slot {slot}: free?"
