"""The slots for states of sequences: which are free, who holds the others, what a step writes.

A state is what layers without keys and values know of all tokens of a sequence so far. A step reads
the slot that a sequence holds and writes another one, which the sequence holds from then on. So a
step that fails can be run again, sequences that have begun alike can hold one slot, and a state can
be kept for those that will begin so. Where none of this is wanted, a step may write the slot that
it reads: half the memory, and half of what goes to it and comes from it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from onnxport.errors import CapacityError

NO_TOKENS: Final = 0  # the slot that is the state of no tokens; nobody owns it or writes it
SLOTS_PER_SEQUENCE: Final = 2  # the one that it holds, and the one that a step writes


@dataclass(frozen=True, slots=True)
class StateStep:
    """The slots of one step, row by row, which it owns until it is committed or rolled back."""

    reads: tuple[int, ...]
    # Distinct ones, which nobody else owns; a row in place writes what it reads, and no other does.
    writes: tuple[int, ...]

    @property
    def in_place(self) -> tuple[int, ...]:
        """The rows whose state is lost if the step fails."""
        both = zip(self.reads, self.writes, strict=True)
        return tuple(row for row, (read, write) in enumerate(both) if read == write)


@dataclass(slots=True, eq=False)
class Kept:
    """A state that can be found, for as long as the pool has it under its key.

    Attributes:
        slot: that has it.
        key: under which it is found.
        num_passing: sequences on whose way it is, which do without it when they have a later one.
        stays: whether it can be found all the same when these have gone on.
    """

    slot: int
    key: bytes
    num_passing: int = 0
    stays: bool = False


class StatePool:
    """Ref-counted state slots in plain ints, numbered from 1; knows neither requests nor tensors.

    A slot is used (ref count >= 1) or free. A used slot may have a key: the hash of all tokens that
    it is the state of. When its last owner releases it, it stays findable under that key, among the
    free slots, until it is handed out again. Those without a key are handed out first, the last
    released one first; then the kept ones, the longest unused first.
    """

    __slots__ = (
        "_blank",
        "_by_key",
        "_kept",
        "_keys",
        "_refs",
        "in_place",
        "max_kept",
        "num_slots",
    )

    def __init__(
        self, num_slots: int, *, in_place: bool = False, max_kept: int | None = None
    ) -> None:
        """Begin with all slots free.

        Args:
            num_slots: that there are.
            in_place: whether a step may write what it reads.
            max_kept: free slots that keep their key at most; None: as many as there are.

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
        self.in_place = in_place
        self.max_kept = max_kept
        self._refs = [0] * (num_slots + 1)
        self._keys: list[bytes | None] = [None] * (num_slots + 1)
        self._by_key: dict[bytes, Kept] = {}
        self._blank = list(range(num_slots, 0, -1))  # a stack
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, the longest unused first

    @property
    def num_sequences(self) -> int:
        """How many sequences can run at once, each of which every step may go on with."""
        return self.num_slots // SLOTS_PER_SEQUENCE

    @property
    def num_free(self) -> int:
        """Slots that a step can write now."""
        return len(self._blank) + len(self._kept)

    def free_slots(self) -> tuple[int, ...]:
        """The free slots, the next to be handed out first."""
        return (*reversed(self._blank), *self._kept)

    def blank_slots(self) -> tuple[int, ...]:
        """The free slots whose content is of no use, the next to be handed out first."""
        return tuple(reversed(self._blank))

    def find(self, key: bytes) -> int | None:
        """The slot, used or free, that is the state of the tokens up to `key`."""
        kept = self._by_key.get(key)
        return None if kept is None else kept.slot

    def stays(self, key: bytes) -> bool:
        """Whether there is a state under a key that outlives those on whose way it is."""
        kept = self._by_key.get(key)
        return kept is not None and kept.stays

    def share(self, slot: int) -> int:
        """Add one owner to a slot that is used or has a key, or is NO_TOKENS; returns it."""
        if slot != NO_TOKENS:
            if self._refs[slot] == 0:
                assert slot in self._kept, f"slot {slot} holds nothing and cannot be shared"
                del self._kept[slot]
            self._refs[slot] += 1
        return slot

    def release(self, slot: int) -> int:
        """Take one owner from a slot, which is free without another; returns NO_TOKENS."""
        if slot != NO_TOKENS:
            assert self._refs[slot] > 0, f"slot {slot} is free and cannot be released"
            self._refs[slot] -= 1
            if self._refs[slot] == 0:
                if self._keys[slot] is None:
                    self._blank.append(slot)
                else:
                    self._kept[slot] = None
                    self._forget_beyond(self.max_kept)
        return NO_TOKENS

    def register(self, slot: int, key: bytes, *, stays: bool = False) -> Kept:
        """Make a used slot findable.

        If another one is found under its key already, that stays if it is used. A free one gives
        up the key: it may be handed out before this one, which then could not be found.

        Args:
            slot: the state.
            key: of the tokens that it is the state of.
            stays: whether it outlives those on whose way it is, of whom the caller is not one.
        """
        assert self._refs[slot] > 0, f"slot {slot} is free and cannot be registered"
        kept = self._by_key.get(key)
        if kept is None:
            kept = self._by_key[key] = Kept(slot, key)
            self._keys[slot] = key
        elif kept.slot in self._kept:
            self._forget(kept.slot)
            kept.slot = slot
            self._keys[slot] = key
        if stays:
            kept.stays = True
        else:
            kept.num_passing += 1
        return kept

    def hide(self, key: bytes) -> None:
        """Make the slot under a key, used or free, unfindable, if there is one."""
        kept = self._by_key.pop(key, None)
        if kept is not None:
            self._forget(kept.slot)

    def pass_by(self, kept: Kept) -> None:
        """One on whose way it is has a later state: with the last one it is found no more."""
        kept.num_passing -= 1
        if not kept.num_passing and not kept.stays and self._has(kept):
            self.hide(kept.key)

    def settle(self, kept: Kept) -> None:
        """One on whose way it is has ended there, so that it stays."""
        kept.num_passing -= 1
        kept.stays = True

    def hand_out_first(self, kept: Kept) -> None:
        """Let it, if nobody uses it and it does not stay, go before all else that is kept."""
        if not kept.stays and self._has(kept) and kept.slot in self._kept:
            self._kept.move_to_end(kept.slot, last=False)

    def hand_out_last(self, kept: Kept) -> None:
        """Let it, if nobody uses it, go after all else that is kept."""
        if self._has(kept) and kept.slot in self._kept:
            self._kept.move_to_end(kept.slot)

    def reset_cache(self) -> None:
        """Forget every key."""
        for key in list(self._by_key):
            self.hide(key)

    def reserve(self, reads: Sequence[int], losable: Collection[int] = ()) -> StateStep:
        """Own what each row of a step reads, and take a slot for it to write.

        Callers look at `num_sequences` before; asking for more than are free is a bug of theirs.

        Args:
            reads: slots that are used or have a key, or NO_TOKENS.
            losable: rows that read what their sequence owns and can do without, should the step
                fail. They write it in place if nobody else owns or reads it, and it is not kept.
        """
        times = Counter(reads)
        alone = {
            row
            for row in losable
            if self.in_place and self._refs[reads[row]] == 1 and times[reads[row]] == 1
        }
        for slot in reads:
            self.share(slot)
        assert len(reads) <= self.num_free, f"{len(reads)} rows, {self.num_free} slots free"
        for row in self._kept_of(reads, sorted(alone)):
            alone.remove(row)
        writes = (
            self.share(slot) if row in alone else self._allocate() for row, slot in enumerate(reads)
        )
        return StateStep(tuple(reads), tuple(writes))

    def commit(self, step: StateStep) -> None:
        """The step ran: what it wrote is whoever's it was for, and it lets go of what it read."""
        for slot in step.reads:
            self.release(slot)

    def rollback(self, step: StateStep) -> None:
        """Give everything back."""
        for slot in reversed(step.writes):
            self.release(slot)
        for slot in step.reads:
            self.release(slot)

    def check(self, owners: Iterable[int]) -> None:
        """Assert that every slot is blank, kept or owned exactly as often as its count says.

        Args:
            owners: the slot of every owner there is.
        """
        counts = Counter(slot for slot in owners if slot != NO_TOKENS)
        assert all(1 <= slot <= self.num_slots for slot in counts), "a slot outside the pool"
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a slot is free twice"
        for slot in range(1, self.num_slots + 1):
            refs, key = self._refs[slot], self._keys[slot]
            assert refs == counts[slot], f"slot {slot}: ref count {refs}, owned {counts[slot]}"
            assert (slot in blank) == (refs == 0 and key is None), f"slot {slot}: blank?"
            assert (slot in self._kept) == (refs == 0 and key is not None), f"slot {slot}: kept?"
            assert key is None or self._by_key[key].slot == slot, f"slot {slot}: key"
        assert self.max_kept is None or len(self._kept) <= self.max_kept, "too many are kept"
        assert len(self._by_key) == sum(key is not None for key in self._keys), "a stray key"

    def _has(self, kept: Kept) -> bool:
        """Whether it can be found; its slot may have been handed out, and be another state."""
        return self._by_key.get(kept.key) is kept

    def _kept_of(self, reads: Sequence[int], alone: Iterable[int]) -> list[int]:
        """Return those of some rows whose states are kept, as many as may be; others lose the key.

        They go before what is kept already, those that stay first. Of those that others only pass
        by there are never more than half, for the many rows of a step would leave nothing of what
        stays.
        """
        keyed = [(row, kept) for row in alone if (kept := self._kept_in(reads[row])) is not None]
        if self.max_kept is None or not keyed:
            return [row for row, _ in keyed]
        keyed.sort(key=lambda one: not one[1].stays)
        passed = (kept for kept in map(self._kept_in, self._kept) if kept is not None)
        room = max(1, self.max_kept // 2) - sum(not kept.stays for kept in passed)
        found: list[int] = []
        for row, kept in keyed:
            if len(found) < self.max_kept and (kept.stays or room > 0):
                found.append(row)
                room -= not kept.stays
            else:
                self.hide(kept.key)
        self._forget_beyond(self.max_kept - len(found))
        return found

    def _kept_in(self, slot: int) -> Kept | None:
        """Return what is found in a slot."""
        key = self._keys[slot]
        return None if key is None else self._by_key[key]

    def _forget_beyond(self, max_kept: int | None) -> None:
        """Take their keys from free slots until no more than so many have one."""
        while max_kept is not None and len(self._kept) > max_kept:
            oldest = self._kept_in(next(iter(self._kept)))
            assert oldest is not None
            self.hide(oldest.key)

    def _forget(self, slot: int) -> None:
        """Take its key from a slot."""
        self._keys[slot] = None
        if slot in self._kept:
            del self._kept[slot]
            self._blank.append(slot)

    def _allocate(self) -> int:
        if self._blank:
            slot = self._blank.pop()
        else:
            slot = self._kept.popitem(last=False)[0]
            key = self._keys[slot]
            assert key is not None
            del self._by_key[key]
            self._keys[slot] = None
        self._refs[slot] = 1
        return slot
