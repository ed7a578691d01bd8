"""Rows of A in integers, as the weights of a product: what csrc/lora.h and csrc/matmul.h read.

Every `block_size` numbers of a row share a scale. Of int8 a number is a multiple of it from -127 to
127; beside weights of 4 bits it is 16 * (first - 8) + (second - 8) of two unsigned halves, from
-119 to 119, so that none needs a first half of 16. Of int4, beside weights of 4 bits, it is a
multiple from -8 to 7, and beside those of 8 bits what it is of int8.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.lora import PRODUCT_PANEL, LoraProduct, SlotDtype, a_panels, has_halves

LARGEST: Final = 127
LARGEST_OF_HALVES: Final = 119
SMALLEST: Final = 1e-36  # as for activations: 127 over it is a float


def packed(product: LoraProduct, rows: NDArray[np.float32], dtype: SlotDtype) -> NDArray[np.int8]:
    """Return the bytes of rows [rank, in_features] of all projections of a product.

    In int8 no number is further from the float it stands for than half its block's scale, the
    block's largest magnitude over 127 or 119. In int4 none is further than a scale, which is the
    number of the largest magnitude over -8. Blocks of magnitudes below SMALLEST are 0.

    Args:
        product: whose activations they are multiplied with.
        rows: finite; any number of them, also none.
        dtype: int8 or int4.
    """
    if len(rows) == 0:
        return np.zeros(0, np.int8)
    halves = has_halves(product, dtype)
    whole, half = (count // (2 if halves else 1) for count in a_panels(product, len(rows), dtype))
    blocks = -(-rows.shape[1] // product.block_size)
    filled = np.zeros((whole + half, blocks * product.block_size), np.float32)
    filled[: len(rows), : rows.shape[1]] = rows
    values = filled.reshape(len(filled), blocks, product.block_size)
    if product.bits == 4 and not halves:
        numbers, scales = rounded_to_int4(values)
        numbers = _pairs(numbers + np.int8(8))
    else:
        numbers, scales = _rounded(values, LARGEST_OF_HALVES if halves else LARGEST)
    parts = [
        _in_panels(numbers[:whole], scales[:whole], PRODUCT_PANEL, halves=halves),
        _in_panels(numbers[whole:], scales[whole:], PRODUCT_PANEL // 2, halves=halves),
    ]
    return np.concatenate(parts)


def rounded_to_int4(values: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Integers of each block from -8 to 7, int8, and its scale. Changes what it is given.

    Args:
        values: [rows, blocks, numbers].
    """
    least, most = values.min(axis=2, initial=0), values.max(axis=2, initial=0)
    top = np.where(-least > most, least, most)
    scales = np.where(np.abs(top) >= SMALLEST, top / np.float32(-8), np.float32(0))
    return multiples(values, scales).clip(-8, 7), scales


def multiples(values: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[Any]:
    """The multiple of its block's scale that is next to each number, int8; of 0 it is 0.

    Args:
        values: [rows, blocks, numbers]; changed.
        scales: [rows, blocks].
    """
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    np.multiply(values, inverse[:, :, None], out=values)
    return np.rint(values, out=values).astype(np.int8)


def _rounded(values: NDArray[np.float32], largest: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Integers of each block, int8, and its scale. Changes what it is given."""
    top = np.maximum(values.max(axis=2, initial=0), -values.min(axis=2, initial=0))
    scales = np.where(top >= SMALLEST, top / np.float32(largest), np.float32(0))
    return multiples(values, scales), scales


def _in_panels(
    numbers: NDArray[Any], scales: NDArray[np.float32], outputs: int, *, halves: bool
) -> NDArray[np.int8]:
    """The bytes of rows that fill panels of so many outputs.

    Args:
        numbers: [rows, blocks, bytes of a block].
        scales: [rows, blocks].
        outputs: of a panel.
        halves: whether a row is two outputs, whose numbers are not stored yet.
    """
    rows, blocks, _ = numbers.shape
    panels = rows * (2 if halves else 1) // outputs
    if panels == 0:
        return np.zeros(0, np.int8)
    if halves:
        numbers, scales = _halves(numbers, panels), _of_halves(scales, panels)
    words = numbers.view(np.uint32).reshape(panels, outputs, blocks, -1)
    quants = np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.int8)
    ends = np.ascontiguousarray(scales.reshape(panels, outputs, blocks).transpose(0, 2, 1))
    joined = [quants.reshape(panels, blocks, -1), ends.view(np.int8).reshape(panels, blocks, -1)]
    return np.concatenate(joined, axis=2).ravel()


def _pairs(numbers: NDArray[Any]) -> NDArray[Any]:
    """Two numbers from 0 to 15 in a byte, the first one's bits below."""
    unsigned = numbers.view(np.uint8)
    return unsigned[..., 0::2] | unsigned[..., 1::2] << 4


def _halves(numbers: NDArray[Any], panels: int) -> NDArray[Any]:
    """Two outputs for each row, their inputs in pairs; of a panel the first halves come first."""
    numbers += 8
    return _by_panel(_pairs(np.stack([(numbers >> 4) + 8, numbers & 15])), panels)


def _of_halves(scales: NDArray[np.float32], panels: int) -> NDArray[np.float32]:
    return _by_panel(np.stack([np.float32(16) * scales, scales]), panels)


def _by_panel(halves: NDArray[Any], panels: int) -> NDArray[Any]:
    """What is [halves, rows, ...] in the order of outputs, [outputs, ...]."""
    first, second, *more = halves.shape
    by_panel = halves.reshape(first, panels, second // panels, *more).swapaxes(0, 1)
    return np.ascontiguousarray(by_panel).reshape(first * second, *more)
