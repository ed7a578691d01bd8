"""Rows of B as they lie in a slot: in panels, and of integers with the scales of rows.

In int8 each row over a projection's outputs is divided by a scale, its largest magnitude over 127.
In int4 columns have scales, too, which lie ahead of their panel's numbers (csrc/kernels.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.lora import INT4_ROWS, PANEL, in_panels
from onnxport.providers.packed_rows import LARGEST


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """B of a projection.

    Attributes:
        stored: as it lies in a slot, one-dimensional.
        scales: float32 [rank], of the rows; 1 of floats.
    """

    stored: NDArray[Any]
    scales: NDArray[np.float32] | float = 1


def in_floats(rows: NDArray[Any]) -> PackedColumns:
    """Rows [rank, out_features] as they are."""
    return PackedColumns(_panels(rows).swapaxes(0, 1).ravel())


def in_int8(rows: NDArray[np.float32]) -> PackedColumns:
    """Rows [rank, out_features], finite; none of the numbers is off by more than half a scale."""
    numbers, scales = quantized(rows)
    return PackedColumns(_panels(numbers).swapaxes(0, 1).ravel(), scales.astype(np.float32))


def quantized(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
    """Rows in int8, and the scale of each, float64 [len(rows)]; 0 where a row is 0."""
    largest = np.abs(rows).max(axis=1, initial=0).astype(np.float64)
    inverse = np.divide(LARGEST, largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(rows * inverse[:, None]).astype(np.int8), largest / LARGEST


def in_int4(rows: NDArray[np.float32], a: NDArray[np.float32]) -> PackedColumns:
    """Rows [rank, out_features], finite, of an adapter whose A is [rank, in_features].

    A number is a multiple, from -8 to 7, of its column's scale times its row's, and no further than
    that from the float it stands for. A row's is the root of its root mean square over that of A's
    row: factors and numbers, both of which are rounded, are as far apart then. A column's is its
    number of the largest magnitude over -8, rounded away from 0 to a multiple, from -127 to 127,
    of the largest.

    Raises:
        OverflowError: a scale is no float32.
    """
    rank, features = rows.shape
    own = np.sqrt(_spread(rows) / _spread(a))
    even = np.zeros((rank, in_panels(features)))
    even[:, :features] = rows / own[:, None]
    least, most = even.min(axis=0, initial=0), even.max(axis=0, initial=0)
    wanted = np.where(-least > most, least, most) / -8
    unit = np.abs(wanted).max(initial=0) / LARGEST
    counts = np.abs(wanted) / unit if unit > 0 else np.zeros_like(wanted)
    columns = np.copysign(np.ceil(counts.round(6)).clip(max=LARGEST), wanted)
    steps = columns * unit
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps != 0)
    numbers = np.rint(even * inverse).clip(-8, 7).astype(np.int8)
    with np.errstate(over="ignore"):
        scales = (own * unit).astype(np.float32)
    if not np.isfinite(scales).all():
        raise OverflowError("a scale is no float32")
    return PackedColumns(_joined(columns.astype(np.int8), numbers), scales)


def _spread(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """The root mean square of each row, and 1 for one that is 0."""
    found = np.sqrt(np.mean(np.square(rows, dtype=np.float64), axis=1))
    return np.where(found > 0, found, 1)


def _joined(columns: NDArray[np.int8], numbers: NDArray[np.int8]) -> NDArray[np.int8]:
    """Panels of scales [columns] and numbers [rank, columns]."""
    rank, width = numbers.shape
    groups = -(-rank // INT4_ROWS)
    filled = np.full((groups * INT4_ROWS, width), 8, np.uint8)
    filled[:rank] = (numbers + np.int8(8)).view(np.uint8)
    halves = filled.reshape(groups, 2, INT4_ROWS // 2, -1, PANEL)
    both = (halves[:, 0] | halves[:, 1] << 4).transpose(2, 0, 3, 1)  # panels, groups, columns, rows
    own = columns.view(np.uint8).reshape(-1, PANEL)
    return np.concatenate([own, both.reshape(len(own), -1)], axis=1).ravel().view(np.int8)


def _panels(rows: NDArray[Any]) -> NDArray[Any]:
    """[rank, panels, PANEL], with zeros behind the last numbers."""
    rank, features = rows.shape
    wide = np.zeros((rank, in_panels(features)), rows.dtype)
    wide[:, :features] = rows
    return wide.reshape(rank, wide.shape[1] // PANEL, PANEL)
