"""Rows of A in int8, as the weights of a product: what csrc/lora.h and csrc/matmul.h read.

Every `block_size` numbers of a row share a scale. At 8 bits a number is a multiple of it from -127
to 127. At 4 bits it is 16 * (first - 8) + (second - 8) of two unsigned halves, from -119 to 119, so
that none needs a first half of 16.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.lora import PRODUCT_PANEL, LoraProduct, a_panels

LARGEST: Final = 127
LARGEST_OF_HALVES: Final = 119
SMALLEST: Final = 1e-36  # as for activations: 127 over it is a float


def packed(product: LoraProduct, rows: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return the bytes of rows [rank, in_features] of all projections of a product.

    No number is further from the float it stands for than half its block's scale, the block's
    largest magnitude over 127 or 119; blocks of magnitudes below SMALLEST are 0.

    Args:
        product: whose activations they are multiplied with.
        rows: finite; any number of them, also none.
    """
    if len(rows) == 0:
        return np.zeros(0, np.int8)
    outputs_of_row = 2 if product.bits == 4 else 1
    whole, half = (count // outputs_of_row for count in a_panels(product, len(rows)))
    blocks = -(-rows.shape[1] // product.block_size)
    filled = np.zeros((whole + half, blocks * product.block_size), np.float32)
    filled[: len(rows), : rows.shape[1]] = rows
    numbers, scales = _rounded(
        filled.reshape(len(filled), blocks, product.block_size),
        LARGEST_OF_HALVES if product.bits == 4 else LARGEST,
    )
    parts = [
        _in_panels(numbers[:whole], scales[:whole], product.bits, PRODUCT_PANEL),
        _in_panels(numbers[whole:], scales[whole:], product.bits, PRODUCT_PANEL // 2),
    ]
    return np.concatenate(parts)


def _in_panels(
    numbers: NDArray[Any], scales: NDArray[np.float32], bits: int, outputs: int
) -> NDArray[np.int8]:
    """The bytes of rows that fill panels of so many outputs.

    Args:
        numbers: int8 [rows, blocks, block_size].
        scales: [rows, blocks].
        bits: of a stored number.
        outputs: of a panel.
    """
    rows, blocks, _ = numbers.shape
    panels = rows * (2 if bits == 4 else 1) // outputs
    if panels == 0:
        return np.zeros(0, np.int8)
    if bits == 4:
        numbers, scales = _halves(numbers, panels), _of_halves(scales, panels)
    words = numbers.view(np.uint32).reshape(panels, outputs, blocks, -1)
    quants = np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.int8)
    ends = np.ascontiguousarray(scales.reshape(panels, outputs, blocks).transpose(0, 2, 1))
    joined = [quants.reshape(panels, blocks, -1), ends.view(np.int8).reshape(panels, blocks, -1)]
    return np.concatenate(joined, axis=2).ravel()


def _rounded(values: NDArray[np.float32], largest: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Integers of each block, int8, and its scale. Changes what it is given."""
    top = np.maximum(values.max(axis=2, initial=0), -values.min(axis=2, initial=0))
    scales = np.where(top >= SMALLEST, top / np.float32(largest), np.float32(0))
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    np.multiply(values, inverse[:, :, None], out=values)
    return np.rint(values, out=values).astype(np.int8), scales


def _halves(numbers: NDArray[Any], panels: int) -> NDArray[Any]:
    """Two outputs for each row, their inputs in pairs; of a panel the first halves come first."""
    numbers += 8
    halves = np.stack([(numbers >> 4) + 8, numbers & 15]).view(np.uint8)
    pairs = halves[..., 0::2] | halves[..., 1::2] << 4
    return _by_panel(pairs, panels)


def _of_halves(scales: NDArray[np.float32], panels: int) -> NDArray[np.float32]:
    return _by_panel(np.stack([np.float32(16) * scales, scales]), panels)


def _by_panel(halves: NDArray[Any], panels: int) -> NDArray[Any]:
    """What is [halves, rows, ...] in the order of outputs, [outputs, ...]."""
    first, second, *more = halves.shape
    by_panel = halves.reshape(first, panels, second // panels, *more).swapaxes(0, 1)
    return np.ascontiguousarray(by_panel).reshape(first * second, *more)
