"""The states of a model without machine learning: a hash of all tokens so far, one a slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import Capabilities, StepInputs

STATE_BYTES = 16  # of a slot: the hash, and how many tokens it is of
_UNDEFINED = -1  # tokens of a slot that must not be read
_BITS = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15


class NullStates:
    """Slots of states, each a hash of the tokens of a sequence in their order.

    Each remembers of how many tokens it is, so that a slot which is another sequence's, an earlier
    one of the same or undefined is caught when it is read.
    """

    def __init__(self, num_slots: int) -> None:
        """Make slots 1 to `num_slots`, all undefined, and slot 0, the state of no tokens."""
        self._hashes = [0] * (num_slots + 1)
        self._num_tokens = [0, *([_UNDEFINED] * num_slots)]

    def step(self, inputs: StepInputs, marks: Sequence[int] | None = None) -> NDArray[np.uint64]:
        """Go on from the slots that a step reads; returns the state after each token, [num_tokens].

        Args:
            inputs: of the step.
            marks: what the adapter of each row adds to its tokens; None: nothing.

        Raises:
            AssertionError: a row reads a slot that is not of the tokens before it.
        """
        assert inputs.state_reads is not None
        assert inputs.state_writes is not None
        reads, writes = inputs.state_reads.tolist(), inputs.state_writes.tolist()
        past, ends = inputs.past_sequence_lengths.tolist(), inputs.cumulative_sequence_lengths
        tokens = inputs.input_ids.tolist()
        found: list[int] = []
        for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
            number = self._num_tokens[read]
            assert number == past[row], (
                f"row {row} goes on after {past[row]} tokens, and slot {read} is the state of "
                f"{'what is undefined' if number == _UNDEFINED else number}"
            )
            state, mark = self._hashes[read], marks[row] if marks else 0
            for token in tokens[ends[row] : ends[row + 1]]:
                state = _mix((state + token + mark + 1) * _FACTOR & _BITS)
                found.append(state)
            self._hashes[write] = state
            self._num_tokens[write] = past[row] + int(ends[row + 1] - ends[row])
        return np.array(found, np.uint64)

    def poison(self, slots: Iterable[int]) -> None:
        """Make slots undefined."""
        for slot in slots:
            assert slot, "slot 0 is never written"
            self._num_tokens[slot] = _UNDEFINED


def check_slots(inputs: StepInputs, limits: Capabilities) -> None:
    """Assert that the slots of a step keep the contract of `StepInputs`."""
    if not limits.state_slots:
        assert inputs.state_reads is None, "the model has no states"
        assert inputs.state_writes is None, "the model has no states"
        return
    batch = len(inputs.past_sequence_lengths)
    for slots, least in ((inputs.state_reads, 0), (inputs.state_writes, 1)):
        assert slots is not None, "the model has states"
        assert slots.dtype == np.int32
        assert slots.shape == (batch,)
        assert slots.flags.c_contiguous
        assert ((slots >= least) & (slots <= limits.state_slots)).all(), slots
    assert inputs.state_reads is not None
    assert inputs.state_writes is not None
    writes = inputs.state_writes.tolist()
    assert len(set(writes)) == batch, "two rows write one slot"
    for row, slot in enumerate(inputs.state_reads.tolist()):
        others = set(writes) - ({writes[row]} if limits.host_states else set())
        assert slot not in others, "a row reads what one writes"
    begins = inputs.past_sequence_lengths == 0
    assert ((inputs.state_reads == 0) == begins).all(), "rows that begin read slot 0, and no others"


def _mix(value: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _BITS
    return value ^ (value >> 31)
