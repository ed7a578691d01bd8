"""GGUF's blocks of four bits that have a minimum beside their scale: Q4_1 and Q4_K.

A number is `level * step + minimum`, with a level from 0 to 15, and 32 numbers of a row share step
and minimum. In Q4_1 both are float16, ahead of the levels. A block of Q4_K has eight times 32
numbers, and float16 d and dmin: a step is d times an integer of six bits, and a minimum -dmin times
another one. Layouts: ggml's `block_q4_1` and `block_q4_K`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 32  # numbers that share step and minimum
NAMES: Final = frozenset({"Q4_1", "Q4_K"})

_Q4_1_BYTES: Final = 20  # of a block
_Q4_K_BYTES: Final = 144


class Minima(NamedTuple):
    """Rows in parts."""

    levels: NDArray[np.uint8]  # [rows, groups, GROUP]
    steps: NDArray[np.float32]  # [rows, groups]
    minima: NDArray[np.float32]  # [rows, groups]

    def decode(self) -> NDArray[np.float32]:
        """The numbers, float32 [rows, columns]."""
        numbers = self.levels.astype(np.float32)
        numbers *= self.steps[..., None]
        numbers += self.minima[..., None]
        return numbers.reshape(len(numbers), -1)


def read(name: str, data: NDArray[np.uint8]) -> Minima:
    """Take rows apart.

    Args:
        name: The type, one of NAMES.
        data: uint8 [rows, bytes of a row].
    """
    return _q4_1(data) if name == "Q4_1" else _q4_k(data)


def _q4_1(data: NDArray[np.uint8]) -> Minima:
    blocks = data.reshape(len(data), -1, _Q4_1_BYTES)
    steps, minima = _halves(blocks)
    packed = blocks[..., 4:]
    return Minima(np.concatenate([packed & 15, packed >> 4], axis=-1), steps, minima)


def _q4_k(data: NDArray[np.uint8]) -> Minima:
    blocks = data.reshape(len(data), -1, _Q4_K_BYTES)
    d, dmin = _halves(blocks)
    # Six bits of each of the first four scales and minima, and two of each of the last four, whose
    # other four bits are behind them.
    scales, minima, low = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([scales & 63, (low & 15) | (scales >> 6) << 4], axis=-1)
    minima = np.concatenate([minima & 63, low >> 4 | (minima >> 6) << 4], axis=-1)
    packed = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, GROUP)  # two groups in each
    levels = np.stack([packed & 15, packed >> 4], axis=-2)
    return Minima(
        levels.reshape(len(data), -1, GROUP),
        (d[..., None] * scales).reshape(len(data), -1),
        -(dmin[..., None] * minima).reshape(len(data), -1),
    )


def _halves(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The two float16 that blocks begin with, [rows, blocks] of each."""
    both = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float32)
    return both[..., 0], both[..., 1]
