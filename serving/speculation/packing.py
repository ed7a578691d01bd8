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
    race: tuple[float, float] = (0.0, 0.0)  # likewise, a row of its `races`


def pack(rows: Sequence[DraftRow], block_size: int) -> StepInputs:
    """Return the arrays of a run; logits are asked for after the last token of each row."""
    ids: array[int] = array("q")
    ends, past, total = [0], [], []
    for row in rows:  # of which there are few: lists are faster than arrays
        ids.extend(row.tokens)
        ends.append(len(ids))
        past.append(row.num_past)
        total.append(row.num_past + len(row.tokens))
    tables = [
        row.blocks[: blocks_for(length, block_size)]
        for row, length in zip(rows, total, strict=True)
    ]
    table = np.zeros((len(rows), max(map(len, tables))), np.int32)
    for line, blocks in enumerate(tables):
        table[line, : len(blocks)] = blocks
    longest = max(len(row.tokens) for row in rows)
    exact = [row.exact_logits for row in rows]
    has_races = any(exact) and any(factor for _, factor in (row.race for row in rows))
    return StepInputs(
        input_ids=np.array(ids, np.int64),
        block_table=table,
        cumulative_sequence_lengths=np.array(ends, np.int32),
        past_sequence_lengths=np.array(past, np.int32),
        attention_metadata=np.array([longest, max(total), min(total)], np.int32),
        logits_indices=np.array(ends[1:], np.int32) - 1,
        exact_logits=np.array(exact, np.int32) if any(exact) else None,
        races=np.array([row.race for row in rows]) if has_races else None,
    )


def room(rows: Sequence[DraftRow], block_size: int) -> int:
    """Return how many times the rows' arrays can be moved on, before one needs another block."""
    return min(-(row.num_past + len(row.tokens)) % block_size for row in rows)


def advance(
    inputs: StepInputs, tokens: Sequence[int], races: Sequence[tuple[float, float]]
) -> None:
    """Let the arrays of a run be those of the next one: each row goes on with one token.

    Args:
        inputs: of a run of one token a row, whose blocks have room for another one.
        tokens: the next ones, one a row.
        races: see `DraftRow.race`, likewise.
    """
    inputs.input_ids[:] = tokens
    if inputs.races is not None:
        inputs.races[:] = races
    past, bounds = inputs.past_sequence_lengths, inputs.attention_metadata[1:]
    past += 1
    bounds += 1
