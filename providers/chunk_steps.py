"""Run a step in parts of which no row has more than a few new tokens.

Where a state is computed of several tokens at once (graphs.passes.chunk_linear), a run takes as
many of a row as that pass does, and all its rows are padded to the longest. So a step is cut: a row
of more tokens goes on, in the next run, from what it has left in the slot that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import StepInputs

MOST_PLACES: Final = 1024  # rows times the tokens of the longest, where there is more than one row


class Piece(NamedTuple):
    """New tokens of a row that a run takes."""

    row: int
    first: int
    end: int


def cut(
    new: Sequence[int],
    most_tokens: int,
    most_places: int = MOST_PLACES,
    *,
    width: Callable[[int], int] = lambda longest: longest,
    most_rows: int | None = None,
) -> list[list[Piece]]:
    """Cut rows into runs, in which each has its next tokens, and rows are in order.

    Rows of like lengths run together: those with the most tokens first, for others wait for none.

    Args:
        new: tokens of each row.
        most_tokens: of a row in a run.
        most_places: see MOST_PLACES.
        width: what the rows of a run are padded to, by the tokens of its longest.
        most_rows: of a run; None: any number.
    """
    runs: list[list[Piece]] = []
    for first in range(0, max(new), most_tokens):
        pieces = [
            Piece(row, first, min(first + most_tokens, count))
            for row, count in enumerate(new)
            if count > first or (count == 0 and first == 0)
        ]
        pieces.sort(key=lambda piece: piece.first - piece.end)  # stable: the longest first
        while pieces:
            longest = max(1, pieces[0].end - pieces[0].first)
            count = max(1, most_places // width(longest))
            if most_rows is not None:
                count = min(count, most_rows)
            runs.append(sorted(pieces[:count]))
            pieces = pieces[count:]
    return runs


def chunk_parts(
    inputs: StepInputs, runs: Sequence[Sequence[Piece]], block_size: int
) -> Iterator[tuple[StepInputs, NDArray[np.intp], NDArray[np.intp]]]:
    """Yield runs as steps of their own, which of the step's tokens and of its logits are theirs.

    Each asks for some logits, as every step does, be it one that nobody wants, and for hidden
    states in memory of its own.

    Args:
        inputs: a step of a model that has states.
        runs: of it, by `cut`.
        block_size: tokens of a block.
    """
    assert inputs.state_reads is not None
    assert inputs.state_writes is not None
    begins = inputs.cumulative_sequence_lengths
    for run in runs:
        rows = np.array([piece.row for piece in run])
        first, end = (np.array(one, np.int32) for one in zip(*(p[1:] for p in run), strict=True))
        starts, new = begins[rows] + first, end - first
        tokens = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, new, strict=True)])
        past = inputs.past_sequence_lengths[rows] + first
        lengths = past + new
        width = -(-int(lengths.max()) // block_size)
        places = np.full(len(inputs.input_ids), -1, np.int32)
        places[tokens] = np.arange(len(tokens), dtype=np.int32)
        wanted = places[inputs.logits_indices]
        own = np.flatnonzero(wanted >= 0)
        last = np.array([len(tokens) - 1], np.int32)
        table, *others = (
            np.ascontiguousarray(one[rows, :width])
            for one in (inputs.block_table, *inputs.more_block_tables)
        )
        begun = np.where(first > 0, inputs.state_writes[rows], inputs.state_reads[rows])
        part = StepInputs(
            input_ids=inputs.input_ids[tokens],
            block_table=table,
            cumulative_sequence_lengths=np.cumsum([0, *new], dtype=np.int32),
            past_sequence_lengths=past,
            attention_metadata=np.array([new.max(), lengths.max(), lengths.max()], np.int32),
            logits_indices=wanted[own] if len(own) else last,
            more_block_tables=tuple(others),
            state_reads=begun.astype(np.int32),
            state_writes=inputs.state_writes[rows],
            adapter_slots=None if inputs.adapter_slots is None else inputs.adapter_slots[rows],
        )
        if inputs.hidden_states is not None:
            told = np.empty((len(tokens), inputs.hidden_states.shape[1]), np.float32)
            part = replace(part, hidden_states=told)
        yield part, tokens, own
