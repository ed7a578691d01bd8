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


def pack(rows: Sequence[DraftRow], block_size: int) -> StepInputs:
    """Return the arrays of a run; logits are asked for after the last token of each row."""
    ids = array("q")
    for row in rows:
        ids.extend(row.tokens)
    past = np.array([row.num_past for row in rows], np.int32)
    new = np.array([len(row.tokens) for row in rows], np.int32)
    total = past + new
    cumulative = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(new, out=cumulative[1:])
    used = [blocks_for(int(length), block_size) for length in total]
    table = np.zeros((len(rows), max(used)), np.int32)
    for line, (row, count) in enumerate(zip(rows, used, strict=True)):
        table[line, :count] = row.blocks[:count]
    return StepInputs(
        input_ids=np.array(ids, np.int64),
        block_table=table,
        cumulative_sequence_lengths=cumulative,
        past_sequence_lengths=past,
        attention_metadata=np.array([new.max(), total.max(), total.min()], np.int32),
        logits_indices=cumulative[1:] - 1,
    )
