"""Block-wise weight quantization, in the layout of com.microsoft.MatMulNBits.

A row [K] is cut into blocks of `block_size` input features that share one scale; the last block
may be ragged, and is then padded with zeros. A value is `(quant - zero_point) * scale`. What is
rounded here is symmetric, its zero point 2^(bits - 1), unless the format is asymmetric; integers of
a checkpoint that need another one may have it, too. See `offsets` for blocks of which no
integer stands for zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEAR = 2.0**-10  # of a step, how far what float16 makes of it may be
_TILE_ELEMENTS = 1 << 17  # 512 KiB of float32: a tile and its scratch stay in the L2 cache
# Of the value farthest from zero, or of the range of a block's values, what quants are tried to
# cover: values beyond become the nearest end, and all others are rounded more finely. Quants of 4
# bits reach further below zero than above, so either side is tried for the farthest value.
_SHARES = (1.0, 0.92, 0.85, -1.0, -0.92, -0.85)
_RANGES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a matrix is quantized."""

    bits: int  # 4 or 8
    block_size: int  # input features that share a scale: 32, 64 or 128
    is_fp4: bool = False  # numbers are those of `mxfp4`, kept as a checkpoint has them
    is_asymmetric: bool = False  # blocks have the zero points that change their values the least

    @property
    def zero_point(self) -> int:
        """The quant that stands for zero, where a block has none of its own."""
        return 1 << (self.bits - 1)

    @property
    def blob_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.bits // 8

    def num_blocks(self, k: int) -> int:
        """Blocks in a row of `k` input features."""
        return -(-k // self.block_size)

    def size_bytes(self, n: int, k: int, scale_bytes: int) -> int:
        """Bytes of an [n, k] matrix, quants and scales; those of MXFP4 are bytes anyway."""
        scale_bytes = 1 if self.is_fp4 else scale_bytes
        return n * self.num_blocks(k) * (self.blob_bytes + scale_bytes)

    def zero_point_bytes(self, n: int, k: int) -> int:
        """Bytes of the zero points of an [n, k] matrix, where it has them."""
        return n * -(-self.num_blocks(k) * self.bits // 8)

    def offset_bytes(self, n: int, k: int, scale_bytes: int) -> int:
        """Bytes of the offsets of an [n, k] matrix, where it has them."""
        return n * self.num_blocks(k) * scale_bytes


def quantize_rows(
    values: NDArray[np.float32],
    block: BlockFormat,
    quants: NDArray[np.uint8],
    scales: NDArray[Any],
    dequantized: NDArray[np.float32] | None = None,
    steps: NDArray[np.float32] | None = None,
    zero_points: NDArray[np.uint8] | None = None,
) -> int:
    """Quantize rows of a weight matrix, writing into the given arrays.

    4 bits: the scale is the one, of some, with the least squares of errors (it may be negative,
    which MatMulNBits allows), in an asymmetric format scale and zero point. 8 bits: the scale is
    the largest magnitude over 127. Quants are chosen against the scale as stored. A scale too small
    for its dtype is zero, and so are its values.

    Args:
        values: float32 [n, K]; left unchanged.
        block: Bits and block size.
        quants: Out, uint8 [n, blocks, blob_bytes].
        scales: Out, float16 or float32 [n, blocks]. Not finite where a value is not, or where
            it is out of range: the caller checks, for it knows the tensor's name.
        dequantized: Out, float32 [n, K], what the stored numbers mean; None: not wanted.
        steps: float32 [n, blocks], what the values of a block are multiples of: such a step is the
            scale wherever its multiples are quants; None: nothing is known.
        zero_points: Out, uint8 [n, blocks], not packed: 2^(bits - 1), or, where a block's multiples
            are quants only beside another one, the nearest to it, or what an asymmetric format
            takes. None: there is no other one.

    Returns:
        How many blocks have their step for a scale.
    """
    n, k = values.shape
    height = max(1, _TILE_ELEMENTS // k)
    kept = 0
    for start in range(0, n, height):
        rows = slice(start, min(n, start + height))
        kept += _quantize_tile(
            values[rows],
            block,
            quants[rows],
            scales[rows],
            None if dequantized is None else dequantized[rows],
            None if steps is None else steps[rows],
            None if zero_points is None else zero_points[rows],
        )
    return kept


def pack_zero_points(
    zero_points: NDArray[np.uint8], block: BlockFormat
) -> NDArray[np.uint8] | None:
    """Pack [n, blocks] as MatMulNBits has them, [n, ceil(blocks * bits / 8)].

    None: all are those of a symmetric format, which it does not need to be told.
    """
    if (zero_points == block.zero_point).all():
        return None
    if block.bits == 8:
        return zero_points
    odd = zero_points.shape[1] % 2
    return pack_nibbles(np.pad(zero_points, ((0, 0), (0, odd)), constant_values=block.zero_point))


def _quantize_tile(
    values: NDArray[np.float32],
    block: BlockFormat,
    quants: NDArray[np.uint8],
    scales: NDArray[Any],
    dequantized: NDArray[np.float32] | None,
    steps: NDArray[np.float32] | None,
    zero_points: NDArray[np.uint8] | None,
) -> int:
    n, k = values.shape
    blocks = block.num_blocks(k)
    if blocks * block.block_size != k:
        values = np.pad(values, ((0, 0), (0, blocks * block.block_size - k)))
    grouped = values.reshape(n, blocks, block.block_size)
    if zero_points is not None:
        zero_points[...] = block.zero_point
    kept = 0
    with np.errstate(over="ignore", invalid="ignore"):  # seen as scales that are not finite
        wanted = _scales(grouped, block.bits)
        if block.is_asymmetric and zero_points is not None:
            _choose(grouped, block, scales.dtype, wanted, zero_points)
        if steps is not None:
            kept = _keep_steps(grouped, block, steps, scales.dtype, wanted, zero_points)
        scales[...] = wanted
        stored = scales.astype(np.float32)[..., None]
        inverse = np.divide(1, stored, out=np.zeros_like(stored), where=stored != 0)
        scaled = grouped * inverse
    zeros: np.float32 | NDArray[np.float32] = np.float32(block.zero_point)
    if zero_points is not None:
        zeros = zero_points[..., None].astype(np.float32)
    scaled += zeros + np.float32(0.5)
    # Rounding makes subnormal scales smaller by up to a half: -128 would be nearer then.
    least = 1 if block.bits == 8 and steps is None and zero_points is None else 0
    np.clip(scaled, least, (1 << block.bits) - 0.5, out=scaled)
    with np.errstate(invalid="ignore"):
        levels = scaled.astype(np.uint8)  # truncation after adding one half: round half up
    quants[...] = pack_nibbles(levels) if block.bits == 4 else levels
    if dequantized is not None:
        np.subtract(levels, zeros, out=scaled)
        with np.errstate(invalid="ignore"):
            scaled *= stored
        dequantized[...] = scaled.reshape(n, -1)[:, :k]
    return kept


def _choose(
    grouped: NDArray[np.float32],
    block: BlockFormat,
    dtype: np.dtype[Any],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8],
) -> None:
    """Replace scale and zero point of each block where others change its values less."""
    low, high = grouped.min(-1, initial=0), grouped.max(-1, initial=0)
    top = np.float32(2 * block.zero_point - 1)
    least = _squares(grouped, scales, zero_points, top, dtype)
    for share in _RANGES:
        tried = (high - low) * np.float32(share / top)
        inverse = np.divide(1, tried, out=np.zeros_like(tried), where=tried != 0)
        zeros = np.clip(np.rint(-low * np.float32(share) * inverse), 0, top)
        errors = _squares(grouped, tried, zeros, top, dtype)
        nearer = errors < least  # of what is not finite nothing is
        np.copyto(least, errors, where=nearer)
        np.copyto(scales, tried, where=nearer)
        np.copyto(zero_points, zeros, where=nearer, casting="unsafe")


def _squares(
    grouped: NDArray[np.float32],
    scales: NDArray[np.float32],
    zero_points: NDArray[Any],
    top: np.float32,
    dtype: np.dtype[Any],
) -> NDArray[np.float32]:
    """What rounding changes of each block, the sum of squares, [n, blocks]."""
    stored = scales.astype(dtype).astype(np.float32)[..., None]
    inverse = np.divide(1, stored, out=np.zeros_like(stored), where=stored != 0)
    zeros = zero_points[..., None].astype(np.float32)
    errors = grouped * inverse
    errors += zeros + np.float32(0.5)
    np.floor(errors, out=errors)
    np.clip(errors, 0, top, out=errors)
    errors -= zeros
    errors *= stored
    errors -= grouped
    found: NDArray[np.float32] = np.einsum("nbi,nbi->nb", errors, errors)
    return found


def _keep_steps(
    grouped: NDArray[np.float32],
    block: BlockFormat,
    steps: NDArray[np.float32],
    dtype: np.dtype[Any],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8] | None,
) -> int:
    """Put steps in place of scales where all values are then quants; returns how many these are.

    Of 4 bits, whose scales may be negative, -step is one where 8 steps are wanted and -8 are not.
    What neither has room for gets a zero point of its own, where there may be one. A step that
    `dtype` has only half of the digits of, or none, is not taken.
    """
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps != 0)
    levels = np.rint(grouped * inverse[..., None])
    # A zero point is a quant itself, so a block that lacks the level 0 needs room for it.
    low, high = levels.min(-1, initial=0), levels.max(-1, initial=0)
    end, top = block.zero_point, 2 * block.zero_point - 1
    near = np.abs(steps.astype(dtype).astype(np.float32) - steps) <= np.abs(steps) * NEAR
    fits = near & (low >= -end) & (high < end)
    turned = near & ~fits & (low > -end) & (high <= end) & (block.bits == 4)
    if zero_points is not None:
        np.copyto(zero_points, end, where=fits | turned)
        moved = near & ~fits & ~turned & (high - low <= top)
        np.copyto(zero_points, np.clip(end, -low, top - high), where=moved, casting="unsafe")
        fits |= moved
    np.copyto(scales, steps, where=fits)
    np.copyto(scales, -steps, where=turned)
    return int(fits.sum() + turned.sum())


def _scales(grouped: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    position = np.abs(grouped).argmax(-1, keepdims=True)  # four times as fast as max and min
    farthest: NDArray[np.float32] = np.take_along_axis(grouped, position, -1)[..., 0]
    if bits == 4:
        return _nearest_scales(grouped, np.divide(farthest, np.float32(-8)))
    return np.divide(np.abs(farthest), np.float32(127))


def _nearest_scales(
    grouped: NDArray[np.float32], first: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The scales of 4 bits that change blocks the least.

    Each share of the first scale makes levels of a block's values x, and of all scales the one that
    suits these best is `sum(x * levels) / sum(levels^2)`, by least squares. It leaves
    `sum(x^2) - sum(x * levels)^2 / sum(levels^2)` of the squares of errors.

    Args:
        grouped: float32 [n, blocks, block_size].
        first: float32 [n, blocks], scales that have room for all values.
    """
    scales, most = first.copy(), np.zeros_like(first)
    levels = np.empty_like(grouped)
    for share in _SHARES:
        tried = (first * np.float32(share))[..., None]
        np.multiply(
            grouped, np.divide(1, tried, out=np.zeros_like(tried), where=tried != 0), levels
        )
        np.clip(np.rint(levels, levels), -8, 7, levels)
        product = np.einsum("nbi,nbi->nb", grouped, levels)
        squares = np.einsum("nbi,nbi->nb", levels, levels)
        suited = np.divide(product, squares, out=np.zeros_like(first), where=squares > 0)
        kept = suited * product
        nearer = kept > most  # of what is not finite nothing is
        np.copyto(scales, suited, where=nearer)
        np.copyto(most, kept, where=nearer)
    return scales


def pack_nibbles(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Join neighbours, the even element in the low nibble; [..., b] to [..., b / 2]."""
    pairs: NDArray[np.uint16] = levels.view("<u2")
    joined: NDArray[np.uint8] = (pairs | (pairs >> 4)).astype(np.uint8)
    return joined
