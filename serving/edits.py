"""Changes to single logits of a few rows, made for as long as a token is drawn, then undone.

Of 152k logits a request touches the hundreds that its own tokens name. Changing these in place,
and putting the old values back, costs what they are, where a copy of the rows costs the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Rows = Sequence[tuple[int, "RowEdits"]]  # row number, and what changes in it


NO_IDS: Ids = np.empty(0, np.int64)
NO_VALUES: Floats = np.empty(0, np.float32)


def address_of(kept: NDArray[Any]) -> int:
    """Return where an array is in memory."""
    assert kept.flags.c_contiguous
    return kept.ctypes.data


class Addresses(NamedTuple):
    """Where the arrays of a `RowEdits` are, for native code; they are contiguous.

    To ask an array for its address costs as much as all else that a step does for a row, so whoever
    keeps an array keeps its address too.
    """

    bias_ids: int
    bias: int
    banned: int
    seen: int
    counts: int
    allowed: int  # 0: all are


class RowEdits(NamedTuple):
    """What changes in one row of logits; the defaults change nothing."""

    bias_ids: Ids = NO_IDS  # [num_biased], each once
    bias: Floats = NO_VALUES  # [num_biased], added
    banned: Ids = NO_IDS  # [num_banned], never drawn
    seen: Ids = NO_IDS  # [num_seen], each once: tokens to penalize
    counts: Floats = NO_VALUES  # [num_seen], how often in the output
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    allowed: Ids | None = None  # ascending, the only tokens that are drawn; None: all
    addresses: Addresses | None = None  # None: nobody keeps them


@contextmanager
def edited(logits: Floats, rows: Rows) -> Iterator[Floats]:
    """Give the changed logits, and put the old ones back at the end.

    First biases are added, then tokens banned, then penalties taken, each from what the one before
    left. `allowed` is left to the sampler.

    Args:
        logits: float32 [num_rows, vocab]; changed meanwhile, or copied if it is read-only.
        rows: the rows to change, each once.
    """
    if not logits.flags.writeable:
        logits = logits.copy()
    undo: list[tuple[Ids, Ids, Floats]] = []
    try:
        for edit in (_add_biases, _ban, _penalize):
            undo += edit(logits, rows)
        yield logits
    finally:
        for numbers, columns, values in reversed(undo):
            logits[numbers, columns] = values


def _add_biases(logits: Floats, rows: Rows) -> list[tuple[Ids, Ids, Floats]]:
    """Add `bias`; return what was there."""
    rows = [(row, edits) for row, edits in rows if len(edits.bias_ids)]
    if not rows:
        return []
    numbers, columns = _places([(row, edits.bias_ids) for row, edits in rows])
    before = logits[numbers, columns]
    logits[numbers, columns] = before + np.concatenate([edits.bias for _, edits in rows])
    return [(numbers, columns, before)]


def _ban(logits: Floats, rows: Rows) -> list[tuple[Ids, Ids, Floats]]:
    """Make `banned` impossible; return what was there."""
    rows = [(row, edits) for row, edits in rows if len(edits.banned)]
    if not rows:
        return []
    numbers, columns = _places([(row, edits.banned) for row, edits in rows])
    before = logits[numbers, columns]
    logits[numbers, columns] = -np.inf
    return [(numbers, columns, before)]


def _penalize(logits: Floats, rows: Rows) -> list[tuple[Ids, Ids, Floats]]:
    """Make the tokens that were `seen` less likely; return what was there.

    Repetition (Keskar et al., CTRL, 2019, section 4.1) divides positive logits and multiplies
    negative ones; frequency and presence are subtracted as in OpenAI's API reference.
    """
    rows = [(row, edits) for row, edits in rows if len(edits.seen)]
    if not rows:
        return []
    numbers, columns = _places([(row, edits.seen) for row, edits in rows])
    lengths = [len(edits.seen) for _, edits in rows]
    counts = np.concatenate([edits.counts for _, edits in rows])

    def spread(values: list[float]) -> Floats:
        return np.repeat(np.array(values, np.float32), lengths)

    before = logits[numbers, columns]
    repetition = spread([edits.repetition for _, edits in rows])
    values = np.where(before > 0, before / repetition, before * repetition)
    values -= spread([edits.frequency for _, edits in rows]) * counts
    values -= spread([edits.presence for _, edits in rows]) * (counts > 0)
    logits[numbers, columns] = values
    return [(numbers, columns, before)]


def _places(rows: Sequence[tuple[int, Ids]]) -> tuple[Ids, Ids]:
    """Return the row numbers and the columns of all tokens of all rows, int64 [num_places]."""
    numbers = np.repeat([row for row, _ in rows], [len(ids) for _, ids in rows])
    return numbers, np.concatenate([ids for _, ids in rows])
