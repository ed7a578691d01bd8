"""Weights in FP8, read as floats: bytes of E4M3, and scales that rows and columns of a block share.

A tensor `NAME` [rows, columns] has them in `NAME_scale_inv` (DeepSeek V3's checkpoints, whose name
is a misnomer: it is multiplied) or in `NAME_scale` (compressed-tensors): one for all, one a row, or
one a block.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPE: Final = "F8_E4M3"  # safetensors' name
SUFFIXES: Final = ("_scale_inv", "_scale")

_NUMBERS: Final = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def block_of(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None: scales of this shape do not belong to the tensor.

    Args:
        shape: Of the tensor.
        scales: Of that with its scales.
        block: What the configuration says of blocks; None: there are none.
    """
    if len(shape) != 2:
        return None
    rows, columns = shape
    if scales in {(), (1,), (1, 1)}:
        return rows, columns
    if scales in {(rows,), (rows, 1)}:
        return 1, columns
    if block is not None and scales == (-(-rows // block[0]), -(-columns // block[1])):
        return block
    return None


def decode(
    values: NDArray[np.uint8],
    scales: NDArray[np.float32],
    block: tuple[int, int],
    first: int,
) -> NDArray[np.float32]:
    """The numbers that rows of a tensor stand for.

    Args:
        values: uint8 [rows, columns], bits of E4M3.
        scales: float32 [row blocks, column blocks], all of the tensor's.
        block: Rows and columns that share one.
        first: The first of these rows in the tensor.

    Returns:
        float32 [rows, columns]; NaN where the bits or a scale are none.
    """
    rows, columns = values.shape
    numbers: NDArray[np.float32] = _NUMBERS[values]
    own = scales[np.arange(first, first + rows) // block[0]]
    numbers *= np.repeat(own, block[1], axis=1)[:, :columns] if own.shape[1] > 1 else own
    return numbers
