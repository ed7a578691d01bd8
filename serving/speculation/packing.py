"""Packing rows for a draft model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxport.kv.table import blocks_for
from onnxport.providers.base import StepInputs
from onnxport.serving.step_buffer import StepBuffer, fill_tables

ROOM = 64  # rows and tokens that there is room for at first


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What one sequence computes in a run."""

    tokens: Sequence[int]  # at least one
    num_past: int  # tokens before them, whose K/V are in the cache
    blocks: array[int]  # of the sequence: as many as hold both, or more
    exact_logits: int = 0  # of the last token's logits, as in `StepInputs`
    race: tuple[float, float] = (0.0, 0.0)  # likewise, a row of its `races`


@dataclass(frozen=True, slots=True)
class HeadStates:
    """What only a draft head takes, as in `StepInputs`."""

    target: NDArray[np.float32] | None = None
    own: NDArray[np.float32] | None = None
    made: NDArray[np.float32] | None = None


NO_STATES = HeadStates()


class DraftPacker:
    """Packs rows into arrays that the next `pack` overwrites, the same ones for the same shapes.

    A model that keeps them bound finds the next run's numbers in them.
    """

    def __init__(self, block_size: int) -> None:
        """Make the buffers, which grow; `block_size` is in tokens."""
        self._block_size = block_size
        self._input_ids = StepBuffer(np.int64, ROOM)
        self._block_table = StepBuffer(np.int32, 16 * ROOM)
        self._cumulative = StepBuffer(np.int32, ROOM)
        self._past = StepBuffer(np.int32, ROOM)
        self._metadata = StepBuffer(np.int32, 3)
        self._logits_indices = StepBuffer(np.int32, ROOM)
        self._exact_logits = StepBuffer(np.int32, ROOM)
        self._races = StepBuffer(np.float64, 2 * ROOM)

    def pack(self, rows: Sequence[DraftRow], states: HeadStates = NO_STATES) -> StepInputs:
        """Return the arrays of a run; logits are asked for after the last token of each row."""
        ids: array[int] = array("q")
        ends, past, total, exact, races = [0], [], [], [], []
        for row in rows:  # of which there are few: lists are faster than arrays
            ids.extend(row.tokens)
            ends.append(len(ids))
            past.append(row.num_past)
            total.append(row.num_past + len(row.tokens))
            exact.append(row.exact_logits)
            races.append(row.race)
        tables = [
            row.blocks[: blocks_for(length, self._block_size)]
            for row, length in zip(rows, total, strict=True)
        ]
        longest = max(len(row.tokens) for row in rows)
        wants = any(exact)
        has_races = wants and any(factor for _, factor in races)
        return StepInputs(
            input_ids=self._input_ids.fill(ids),
            block_table=fill_tables(self._block_table, tables, max(map(len, tables))),
            cumulative_sequence_lengths=self._cumulative.fill(ends),
            past_sequence_lengths=self._past.fill(past),
            attention_metadata=self._metadata.fill([longest, max(total), max(total)]),
            logits_indices=self._logits_indices.fill([end - 1 for end in ends[1:]]),
            exact_logits=self._exact_logits.fill(exact) if wants else None,
            races=self._pack_races(races) if has_races else None,
            target_hidden_states=states.target,
            draft_hidden_states=states.own,
            last_hidden_states=states.made,
        )

    def _pack_races(self, races: list[tuple[float, float]]) -> NDArray[np.float64]:
        packed = self._races.shaped((len(races), 2))
        packed[:] = races
        return packed


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
