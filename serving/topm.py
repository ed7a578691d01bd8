"""The few largest of many values, without sorting the many."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 128


def top_m(values: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the `count` largest values of each row and their columns, largest first.

    Equal values come in the order of their columns. Rows hold no NaN.

    The `count`-th largest of the maxima of chunks is at most the `count`-th largest value, for
    each chunk has one value as large. What is below it is left out, and the rest, seldom much more
    than `count` values, is sorted.

    Args:
        values: [num_rows, num_columns].
        count: from 1 to num_columns.

    Returns:
        Values and int64 columns, both [num_rows, count].
    """
    num_rows, num_columns = values.shape
    chunks = -(-num_columns // CHUNK)
    if count >= chunks:
        return _sorted(values, None, count)
    maxima = np.maximum.reduceat(values, np.arange(0, num_columns, CHUNK), axis=1)
    thresholds = np.partition(maxima, chunks - count, axis=1)[:, chunks - count]
    rows, columns = np.nonzero(values >= thresholds[:, None])
    counts = np.bincount(rows, minlength=num_rows)
    starts = np.cumsum(counts) - counts
    # One padded row of candidates for each row, in the order of the columns.
    candidates = np.full((num_rows, int(counts.max())), -np.inf, values.dtype)
    candidate_columns = np.zeros(candidates.shape, np.int64)
    places = np.arange(len(rows)) - starts[rows]
    candidates[rows, places] = values[rows, columns]
    candidate_columns[rows, places] = columns
    return _sorted(candidates, candidate_columns, count)


def _sorted(
    values: NDArray[np.float32], columns: NDArray[np.int64] | None, count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the first `count` of each row, sorted; `columns` are their indices unless given."""
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    found = order if columns is None else np.take_along_axis(columns, order, axis=1)
    return np.take_along_axis(values, order, axis=1), found
