"""Rows of A in int8, as the weights of a product: what csrc/lora.h and csrc/matmul.h read.

Every `block_size` numbers of a row share a scale. At 8 bits a number is a multiple of it from -127
to 127. At 4 bits it is 16 * (first - 8) + (second - 8) of two unsigned halves, from -119 to 119, so
that none needs a first half of 16.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.lora import PRODUCT_PANEL, LoraProduct, a_rows

LARGEST: Final = 127
LARGEST_OF_HALVES: Final = 119


def packed(product: LoraProduct, rows: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return the bytes of rows [rank, in_features] of all projections of a product.

    No number is further from the float it stands for than half its block's scale, the block's
    largest magnitude over 127 or 119.

    Args:
        product: whose activations they are multiplied with.
        rows: finite; any number of them, also none.
    """
    panels = -(-len(rows) // a_rows(product))
    blocks = -(-rows.shape[1] // product.block_size)
    filled = np.zeros((panels * a_rows(product), blocks * product.block_size), np.float32)
    filled[: len(rows), : rows.shape[1]] = rows
    numbers, scales = _rounded(
        filled.reshape(len(filled), blocks, product.block_size),
        LARGEST_OF_HALVES if product.bits == 4 else LARGEST,
    )
    if product.bits == 4:
        numbers, scales = _halves(numbers, scales, panels)
    words = _words(numbers, product.bits).reshape(panels, PRODUCT_PANEL, blocks, -1)
    quants = np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.int8)
    ends = np.ascontiguousarray(scales.reshape(panels, PRODUCT_PANEL, blocks).transpose(0, 2, 1))
    joined = [quants.reshape(panels, blocks, -1), ends.view(np.int8).reshape(panels, blocks, -1)]
    return np.concatenate(joined, axis=2).ravel()


def _rounded(
    values: NDArray[np.float32], largest: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Integers of each block, and its scale."""
    top = np.abs(values).max(axis=2, initial=0).astype(np.float64)
    scales = (top / largest).astype(np.float32)
    inverse = np.divide(1, scales, out=np.zeros_like(top), where=scales > 0)
    numbers = np.rint(values * inverse[:, :, None]).clip(-largest, largest)
    return numbers.astype(np.int32), scales


def _halves(
    numbers: NDArray[np.int32], scales: NDArray[np.float32], panels: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Two outputs, unsigned, for each row: of a panel the first halves, then the second ones."""
    first = (numbers + 8) >> 4
    halves = np.stack([first + 8, numbers - 16 * first + 8])
    both = np.stack([16 * scales, scales])
    return tuple(  # type: ignore[return-value]
        x.reshape(2, panels, -1, *x.shape[2:]).swapaxes(0, 1).reshape(-1, *x.shape[2:])
        for x in (halves, both)
    )


def _words(numbers: NDArray[np.int32], bits: int) -> NDArray[Any]:
    """Each output's numbers, so many together in 32 bits: uint32 [outputs, blocks, words]."""
    if bits == 8:
        return numbers.astype(np.int8).view(np.uint32)
    pairs = numbers.astype(np.uint8).reshape(*numbers.shape[:2], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(np.uint32)
