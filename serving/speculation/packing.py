"""Packing rows for a draft model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxport.kv.table import blocks_for
from onnxport.providers.base import StepInputs


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What one sequence computes in a run."""

    tokens: Sequence[int]  # at least one
    num_past: int  # tokens before them, whose K/V are in the cache
    blocks: array[int]  # of the sequence: as many as hold both, or more
    exact_logits: int = 0  # of the last token's logits, as in `StepInputs`


def pack(rows: Sequence[DraftRow], block_size: int) -> StepInputs:
    """Return the arrays of a run; logits are asked for after the last token of each row."""
    ids: array[int] = array("q")
    ends, past, total = [0], [], []
    for row in rows:  # of which there are few: lists are faster than arrays
        ids.extend(row.tokens)
        ends.append(len(ids))
        past.append(row.num_past)
        total.append(row.num_past + len(row.tokens))
    width = blocks_for(max(total), block_size)
    table = np.zeros((len(rows), width), np.int32)
    for line, row in enumerate(rows):
        used = blocks_for(total[line], block_size)
        table[line, :used] = row.blocks[:used]
    longest = max(len(row.tokens) for row in rows)
    exact = [row.exact_logits for row in rows]
    return StepInputs(
        input_ids=np.array(ids, np.int64),
        block_table=table,
        cumulative_sequence_lengths=np.array(ends, np.int32),
        past_sequence_lengths=np.array(past, np.int32),
        attention_metadata=np.array([longest, max(total), min(total)], np.int32),
        logits_indices=np.array(ends[1:], np.int32) - 1,
        exact_logits=np.array(exact, np.int32) if any(exact) else None,
    )
