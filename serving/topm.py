"""The few largest of many values, without sorting the many."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP = 64  # columns whose maximum stands for them
_SIGN = np.uint32(1 << 31)
_LOW_HALF = np.uint64((1 << 32) - 1)
_LAST = np.uint64((1 << 64) - 1)  # a key after those of all values


def top_m(values: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the `count` largest values of each row and their columns, largest first.

    Equal values come in the order of their columns. Rows hold no NaN.

    A bound is found that the `count`-th largest value reaches; what is below it is left out, and
    the rest, seldom much more than `count` values, is sorted. The `count`-th largest of the maxima
    of groups is such a bound, for each of those groups holds a value as large; and only groups
    whose maximum reaches it have to be looked at again. A group is every `groups`-th column: their
    maxima are element-wise maxima of long runs, which is fast. Where too few groups make a poor
    bound, the `count`-th largest value itself is selected.

    Args:
        values: [num_rows, num_columns].
        count: from 1 to num_columns.

    Returns:
        Values and int64 columns, both [num_rows, count].
    """
    num_rows, num_columns = values.shape
    groups = num_columns // GROUP
    if count < groups // 2:
        rows, columns = _large(values, count, groups)
    else:
        bounds = np.partition(values, num_columns - count, axis=1)[:, num_columns - count]
        rows, columns = np.nonzero(values >= bounds[:, None])
    counts = np.bincount(rows, minlength=num_rows)
    places = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    keys = np.full((num_rows, int(counts.max())), _LAST)
    keys[rows, places] = _keys(values[rows, columns], columns.astype(np.uint64))
    found = (np.sort(keys, axis=1)[:, :count] & _LOW_HALF).astype(np.int64)
    return np.take_along_axis(values, found, axis=1), found


def _large(
    values: NDArray[np.float32], count: int, groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows, ascending, and columns of the `count` largest values of each row and some more.

    Args:
        values: [num_rows, num_columns].
        count: less than `groups`.
        groups: how many; the columns that are left over, less than a group has, are no group.
    """
    whole = GROUP * groups
    grouped = values[:, :whole].reshape(len(values), GROUP, groups)
    maxima = grouped.max(axis=1)
    bounds = np.partition(maxima, groups - count, axis=1)[:, groups - count]
    rows, numbers = np.nonzero(maxima >= bounds[:, None])
    found, places = np.nonzero(grouped[rows, :, numbers] >= bounds[rows, None])
    rows, columns = rows[found], places * groups + numbers[found]
    more_rows, more_columns = np.nonzero(values[:, whole:] >= bounds[:, None])
    if not len(more_rows):
        return rows, columns
    rows = np.concatenate((rows, more_rows))
    order = np.argsort(rows, kind="stable")
    return rows[order], np.concatenate((columns, more_columns + whole))[order]


def _keys(values: NDArray[np.float32], columns: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return integers that sort as (largest value, lowest column); the low half is the column.

    The bits of floats sort like integers once the negative ones are inverted and the others get
    the highest bit; all of it inverted again sorts the largest first.
    """
    bits = (values + np.float32(0.0)).view(np.uint32)  # -0.0 becomes 0.0, which it equals
    descending = np.where(bits & _SIGN, bits, bits ^ ~_SIGN)
    return (descending.astype(np.uint64) << np.uint64(32)) | columns
