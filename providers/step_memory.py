"""What a step of decomposed attention takes beside the pool, and how it is kept within that.

Each tile of queries gathers the keys and values of its sequence, padded to the step's longest
(graphs.passes.decompose). One long sequence among many short ones thus takes the memory of as many
long ones. Such a step runs in parts, of rows that stand beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.passes.decompose import DEFAULT_TILE_TOKENS
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import StepInputs
from onnxport.providers.hidden_states import slice_states
from onnxport.providers.pool import UNKNOWN_BYTES, PoolPlan

if TYPE_CHECKING:
    from onnxport.providers.buckets import Buckets

SHARE: Final = 0.5  # of what weights and pool leave; all else that a step takes is in the rest
LEAST_BYTES: Final = 256 << 20  # that a step may always take
# Measured on the CPU with ONNX Runtime 1.31.1: gathered, transposed, and values chosen.
GATHERED: Final = 4  # copies of the keys that are there at once, or of as many values
SCORES: Final = 3  # copies: the products, those that are visible, and their weights


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What rows of a step take together, and may take."""

    key_bytes: int  # of a token in one layer
    score_bytes: int  # of a query and a key, over all heads
    block_size: int  # tokens
    most_bytes: int
    buckets: Buckets | None = None  # to whose shapes steps are padded; None: they are not

    @classmethod
    def plan(
        cls,
        spec: ArchSpec,
        pool: PoolPlan,
        item_bytes: int,
        left_bytes: int | None,
        buckets: Buckets | None = None,
    ) -> StepMemory:
        """Plan what steps may take.

        Args:
            spec: the model.
            pool: of the same memory.
            item_bytes: of an element of activations and cache.
            left_bytes: what the weights leave; None: not known, and UNKNOWN_BYTES beside the pool.
            buckets: to whose shapes steps are padded; None: they are not.
        """
        pool_bytes = pool.num_blocks * pool.block_bytes
        beside = UNKNOWN_BYTES if left_bytes is None else left_bytes - pool_bytes
        most = max(LEAST_BYTES, int(beside * SHARE))
        heads = [spec.heads_of(layer) for layer in spec.cached_layers]
        keys = max(one.num_kv_heads * one.head_size for one in heads) * item_bytes
        return cls(keys, spec.num_heads * item_bytes, pool.block_size, most, buckets)

    def step_bytes(self, num_rows: int, num_tokens: int, longest_chunk: int, longest: int) -> int:
        """What a step takes.

        Args:
            num_rows: sequences.
            num_tokens: new ones, of all.
            longest_chunk: new tokens of a sequence.
            longest: tokens of a sequence, with the new ones.

        Raises:
            ProviderError: It is larger than the buckets.
        """
        tile, blocks = longest_chunk, -(-longest // self.block_size)
        if self.buckets is not None:
            shape = self.buckets.shape(num_tokens, num_rows, longest_chunk, blocks)
            num_rows, num_tokens = shape.num_rows, shape.num_tokens
            tile, blocks = shape.query_tile, shape.table_width
        tile = max(1, min(tile, num_tokens, DEFAULT_TILE_TOKENS))
        rows = min(num_rows, num_tokens)
        tiles = rows + (num_tokens - rows) // tile  # see graphs.passes.paged_plan
        keys = tiles * blocks * self.block_size
        return keys * (GATHERED * self.key_bytes + SCORES * tile * self.score_bytes)

    def parts(self, new: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Cut a step into as few ranges of rows as keep within `most_bytes`, or are one row.

        Args:
            new: tokens of each row.
            lengths: of each row's sequence, with the new ones.
        """
        ranges: list[tuple[int, int]] = []
        first = num_tokens = chunk = longest = 0
        for row, (count, length) in enumerate(zip(new, lengths, strict=True)):
            grown = num_tokens + count, max(chunk, count), max(longest, length)
            if row > first and self.step_bytes(row + 1 - first, *grown) > self.most_bytes:
                ranges.append((first, row))
                first, grown = row, (count, count, length)
            num_tokens, chunk, longest = grown
        return [*ranges, (first, len(new))]

    def split(self, inputs: StepInputs) -> list[tuple[int, int]]:
        """Cut a step as `parts` does."""
        new = np.diff(inputs.cumulative_sequence_lengths)
        lengths = new + inputs.past_sequence_lengths
        rows, tokens = len(new), len(inputs.input_ids)
        if self.step_bytes(rows, tokens, int(new.max()), int(lengths.max())) <= self.most_bytes:
            return [(0, rows)]
        return self.parts(new.tolist(), lengths.tolist())


def parts_of(
    inputs: StepInputs, ranges: Sequence[tuple[int, int]], block_size: int
) -> Iterator[tuple[StepInputs, NDArray[np.intp]]]:
    """Yield ranges of a step's rows as steps of their own, and which of its logits are theirs.

    Each asks for some logits, as every step does, be it one that nobody wants.
    """
    ends = inputs.cumulative_sequence_lengths
    for first, end in ranges:
        begin, stop = ends[[first, end]].tolist()
        starts = ends[first : end + 1] - np.int32(begin)
        past, new = inputs.past_sequence_lengths[first:end], np.diff(starts)
        lengths = past + new
        width = -(-int(lengths.max()) // block_size)
        indices = inputs.logits_indices
        own = np.flatnonzero((indices >= begin) & (indices < stop))
        wanted = indices[own] if len(own) else np.array([stop - 1], np.int32)
        table, *others = (
            np.ascontiguousarray(one[first:end, :width])
            for one in (inputs.block_table, *inputs.more_block_tables)
        )
        part = StepInputs(
            input_ids=inputs.input_ids[begin:stop],
            block_table=table,
            cumulative_sequence_lengths=starts,
            past_sequence_lengths=past,
            attention_metadata=np.array([new.max(), lengths.max(), lengths.max()], np.int32),
            logits_indices=wanted - np.int32(begin),
            adapter_slots=_rows_of(inputs.adapter_slots, first, end),
            more_block_tables=tuple(others),
            # No row reads what another one writes, be it in a part before.
            state_reads=_rows_of(inputs.state_reads, first, end),
            state_writes=_rows_of(inputs.state_writes, first, end),
        )
        yield slice_states(inputs, part, slice(begin, stop), own), own


def _rows_of(slots: NDArray[np.int32] | None, first: int, end: int) -> NDArray[np.int32] | None:
    return None if slots is None else slots[first:end]
