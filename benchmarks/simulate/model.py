"""A model that costs virtual time and hardly any real time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate.cost import CostModel, VirtualClock
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions

VOCAB_SIZE = 256  # so that a byte is a token; units of 16 of them never collide by chance
ANSWER = 7  # the token that the model always says


class SimulatedModel(NullModel):
    """Says `ANSWER` whatever it is asked, and moves the clock by what the step would cost."""

    def __init__(self, options: NullOptions, cost: CostModel, clock: VirtualClock) -> None:
        super().__init__(options)
        self._cost = cost
        self._clock = clock
        self._limits = self.capabilities
        self._answers: NDArray[np.float32] = np.zeros((1, options.vocab_size), np.float32)
        self._answers[:, ANSWER] = 1.0

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Return constant logits, float32 [num_logits, vocab].

        Raises:
            AssertionError: shapes or ranges break the contract.
        """
        ends, past = inputs.cumulative_sequence_lengths, inputs.past_sequence_lengths
        new = ends[1:] - ends[:-1]
        total = past + new
        rows, tokens, longest = len(past), len(inputs.input_ids), int(total.max())
        table, limits = inputs.block_table, self._limits
        assert rows <= (limits.max_batch_rows or rows), f"{rows} rows"
        assert ends[-1] == tokens, "the rows do not add up to the tokens"
        assert new.min() >= 1, "a row without new tokens"
        assert longest <= limits.max_model_len, f"a sequence of {longest} tokens"
        assert len(table) == rows
        assert table.shape[1] * limits.block_size >= longest, "the block table is too narrow"
        assert 0 <= table.min() <= table.max() < limits.num_blocks, "a block outside the pool"
        pairs = int(np.dot(new.astype(np.int64), 2 * past + new + 1)) // 2
        self._clock.now_s += self._cost.seconds(tokens, rows, int(total.sum()), pairs)
        count = len(inputs.logits_indices)
        if count > len(self._answers):
            self._answers = np.repeat(self._answers[:1], count, axis=0)
        return self._answers[:count]

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `NullModel.read_blocks`; takes the time of saving."""
        self._clock.now_s += self._cost.save_block_s * len(blocks)
        return super().read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `NullModel.write_blocks`; takes the time of loading."""
        self._clock.now_s += self._cost.load_block_s * len(blocks)
        super().write_blocks(blocks, content)
