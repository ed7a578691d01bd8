"""Blocks with an offset: a value is `(quant - 2^(bits - 1)) * scale + offset`.

So are the blocks of a checkpoint whose values are multiples of a step above a minimum, of which no
integer stands for zero, as GGUF's Q4_1 and Q4_K have them. The offset is what the middle of the
range means: `minimum + 2^(bits - 1) * step`. It is mostly small beside the values, which a minimum
is not, so a float16 of it is off by little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.quantize import NEAR, BlockFormat, pack_nibbles, quantize_rows

_TILE_ELEMENTS: Final = 1 << 17  # as in `quantize`

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OffsetBlocks:
    """What rows [n, K] of a matrix become, K of whole blocks of four bits."""

    quants: NDArray[np.uint8]  # [n, blocks, blob_bytes]
    scales: NDArray[Any]  # float16 or float32 [n, blocks]
    offsets: NDArray[Any]  # likewise

    def meant(self) -> Array:
        """What they mean, float32 [n, K]."""
        levels = np.stack([self.quants & 15, self.quants >> 4], axis=-1)
        values = levels.reshape(*self.scales.shape, -1).astype(np.float32)
        values -= np.float32(8)
        values *= self.scales[..., None].astype(np.float32)
        values += self.offsets[..., None].astype(np.float32)
        return values.reshape(len(values), -1)


def keep_minima(
    values: Array, steps: Array, minima: Array, out: OffsetBlocks, meant: Array | None = None
) -> int:
    """Store rows that are levels of four bits, times steps, above minima.

    A level changes only where what float16 makes of step and offset is far from them.

    Args:
        values: float32 [n, K]; left unchanged.
        steps: float32 [n, blocks], of each block; 0 where all its values are the minimum.
        minima: float32 [n, blocks].
        out: Where they go. Scales or offsets are not finite where a value is not, or where one is
            out of range: the caller checks, for it knows the tensor's name.
        meant: Out, float32 [n, K], what the stored numbers mean; None: not wanted.

    Returns:
        How many blocks are as they were, but for the rounding of step and offset.
    """
    n, k = values.shape
    height = max(1, _TILE_ELEMENTS // k)
    kept = 0
    for start in range(0, n, height):
        rows = slice(start, min(n, start + height))
        tile = OffsetBlocks(out.quants[rows], out.scales[rows], out.offsets[rows])
        kept += _keep_tile(values[rows], steps[rows], minima[rows], tile)
        if meant is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                meant[rows] = tile.meant()
    return kept


def _keep_tile(values: Array, steps: Array, minima: Array, out: OffsetBlocks) -> int:
    with np.errstate(over="ignore", invalid="ignore"):  # seen as numbers that are not finite
        out.scales[...] = steps
        out.offsets[...] = minima + np.float32(8) * steps
        stored = out.scales.astype(np.float32)
        inverse = np.divide(1, stored, out=np.zeros_like(stored), where=stored != 0)
        levels = values.reshape(*steps.shape, -1) - out.offsets[..., None].astype(np.float32)
        levels *= inverse[..., None]
        levels += np.float32(8.5)
        np.clip(levels, 0, 15.5, out=levels)
        out.quants[...] = pack_nibbles(levels.astype(np.uint8))  # round half up
        return int((np.abs(stored - steps) <= np.abs(steps) * NEAR).sum())


def quantize_offsets(
    values: Array,
    block: BlockFormat,
    out: OffsetBlocks,
    meant: Array | None = None,
    steps: Array | None = None,
) -> int:
    """Quantize rows without minima, for a matrix whose other rows have some.

    The offset is 0, or what a zero point of `quantize_rows` amounts to, which see.
    """
    zero_points = np.empty(out.scales.shape, np.uint8)
    kept = quantize_rows(values, block, out.quants, out.scales, None, steps, zero_points)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.float32(block.zero_point) - zero_points
        out.offsets[...] = moved * out.scales.astype(np.float32)
        if meant is not None:
            meant[...] = out.meant()
    return kept
