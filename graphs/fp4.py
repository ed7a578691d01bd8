"""Numbers of MXFP4 as integers of 8 bits, without rounding.

A number is E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign. A byte holds two, the even element of a
row in the low half. Twice a number is an integer of at most 12, so in the format of `MatMulNBits`
with 8 bits, whose zero is 128, it is 128 + that, with half of the block's scale. A scale is E8M0:
2^(byte - 127), or NaN for 255 (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ArtifactError

BLOCK_SIZE: Final = 32  # numbers that share a scale
BITS: Final = 4  # of a number
INT8_BITS: Final = 8  # of what is made of it

_TWICE: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.uint8)
_BYTES: Final = np.concatenate([128 + _TWICE, 128 - _TWICE])  # of each number
# Both numbers of a byte, the even element first.
_PAIRS: Final = np.stack([np.tile(_BYTES, 16), np.repeat(_BYTES, 16)], axis=-1)
_HALVES: Final = np.append(np.ldexp(1.0, np.arange(255) - 128), np.nan)  # float64, of scales
_CHUNK: Final = 1 << 20  # NumPy makes eight bytes of each index


def int8_numbers(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """128 + twice each number; uint8 [..., n] to uint8 [..., 2 * n]."""
    made = np.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), np.uint8)
    _look_up(_PAIRS.view(np.uint16).ravel(), blocks, made.view(np.uint16))
    return made


def int8_scales(name: str, scales: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Half of each scale, in a floating type.

    Below the smallest number that float16 has, it is rounded to that or to 0, as any weight is.

    Args:
        name: Of the tensor, for errors.
        scales: Any type of one byte, E8M0.
        dtype: What to make.

    Raises:
        ArtifactError: One is too large for the type.
    """
    exponents = scales.view(np.uint8)
    with np.errstate(over="ignore"):
        halves = _HALVES.astype(dtype)
    largest = int(exponents.max(initial=0))
    if not np.isfinite(halves[largest]):
        raise ArtifactError(
            f"the scales {name!r} of weights in MXFP4 go up to 2^{largest - 127}, half of which is "
            f"too large for {np.dtype(dtype).name}; run the model in a type of a wider range, such "
            "as float32"
        )
    made = np.empty(scales.shape, dtype)
    _look_up(halves, exponents, made)
    return made


def _look_up(table: NDArray[Any], indices: NDArray[np.uint8], made: NDArray[Any]) -> None:
    """Write `table[indices]`."""
    source, target = indices.reshape(-1), made.reshape(-1)
    for start in range(0, source.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        target[part] = table[source[part]]
