"""Sequences on a loaded model with states, in blocks and slots as an engine has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import Model, StepInputs


class Stateful:
    """Several sequences; slots are handed out anew in every step, in another order each time."""

    def __init__(self, model: Model, num_sequences: int, seed: int = 0) -> None:
        limits = model.capabilities
        self.model = model
        self._rng = np.random.default_rng(seed)
        blocks = self._rng.permutation(limits.num_blocks)
        self._tables = np.array_split(blocks, num_sequences)
        self.lengths = [0] * num_sequences
        self.slots = [0] * num_sequences
        self.adapters: list[int] | None = None  # the slot of each sequence's, 0 for none

    def inputs(self, new: Mapping[int, Sequence[int]], writes: Sequence[int]) -> StepInputs:
        """A step with the next tokens of some sequences."""
        lengths = [len(tokens) for tokens in new.values()]
        past = [self.lengths[row] for row in new]
        totals = np.array(past) + lengths
        width = -(-int(totals.max()) // self.model.capabilities.block_size)
        adapters = None
        if self.adapters is not None:
            adapters = np.array([self.adapters[row] for row in new], np.int32)
        return StepInputs(
            input_ids=np.concatenate([np.array(tokens, np.int64) for tokens in new.values()]),
            block_table=np.array([self._tables[row][:width] for row in new], np.int32),
            cumulative_sequence_lengths=np.cumsum([0, *lengths]).astype(np.int32),
            past_sequence_lengths=np.array(past, np.int32),
            attention_metadata=np.array([max(lengths), totals.max(), totals.max()], np.int32),
            logits_indices=np.arange(sum(lengths), dtype=np.int32),
            state_reads=np.array([self.slots[row] for row in new], np.int32),
            state_writes=np.array(writes, np.int32),
            adapter_slots=adapters,
        )

    def run(
        self, new: Mapping[int, Sequence[int]], *, tries: int = 1, in_place: bool = False
    ) -> dict[int, NDArray[np.float32]]:
        """Compute the next tokens of some sequences; returns the logits of each, all of its tokens.

        Args:
            new: tokens by sequence.
            tries: how often the step is run; what all but the last write is thrown away.
            in_place: whether a sequence that has a state writes it where it is read.
        """
        for left in range(tries, 0, -1):
            free = sorted(set(range(1, self.model.capabilities.state_slots + 1)) - set(self.slots))
            writes = self._rng.permutation(free)[: len(new)].tolist()
            if in_place:
                pairs = zip(new, writes, strict=True)
                writes = [self.slots[row] or write for row, write in pairs]
            asked = new if left == 1 else {row: np.flip(tokens) for row, tokens in new.items()}
            inputs = self.inputs(asked, writes)
            logits = self.model.run(inputs).copy()
        for row, slot in zip(new, writes, strict=True):
            self.slots[row] = slot
            self.lengths[row] += len(new[row])
        parts = np.split(logits, inputs.cumulative_sequence_lengths[1:-1])
        return dict(zip(new, parts, strict=True))

    def fork(self, source: int, target: int) -> None:
        """Let a sequence go on from where another one is: its slot, and copies of its blocks."""
        count = -(-self.lengths[source] // self.model.capabilities.block_size)
        copied, to = (self._tables[row][:count].tolist() for row in (source, target))
        self.model.copy_blocks(copied, to)
        self.slots[target], self.lengths[target] = self.slots[source], self.lengths[source]
