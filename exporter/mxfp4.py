"""MXFP4 as gpt-oss's checkpoints store it, read as floats.

A row is cut into blocks of 32 numbers. Each number has four bits, a sign and one of eight
magnitudes, and a block has a power of two that all of them are multiplied with, as eight bits of
exponent (OCP Microscaling Formats, version 1.0: E2M1 elements, E8M0 scales). A tensor `NAME` is two
of bytes: `NAME_blocks` [..., blocks, 16], the even element in the low nibble, and `NAME_scales`
[..., blocks].
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs import fp4

BLOCK_SIZE: Final = fp4.BLOCK_SIZE
BLOCK_BYTES: Final = BLOCK_SIZE // 2
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS: Final = np.array([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], np.float32)
# Both numbers of a byte.
_PAIRS: Final = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=-1)
# What an exponent (E8M0) stands for; the last one is no number.
POWERS: Final = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def decode(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers that blocks stand for, exactly.

    Args:
        blocks: uint8 [rows, blocks, 16].
        scales: uint8 [rows, blocks].

    Returns:
        float32 [rows, blocks * 32]; NaN where a scale is none, infinity beyond the largest.
    """
    pairs = _PAIRS[blocks]
    with np.errstate(over="ignore"):
        pairs *= POWERS[scales][..., None, None]
    return pairs.reshape(len(blocks), -1)
