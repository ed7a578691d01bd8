"""The KV caches of the `cpu` provider: their types, their memory, and their canonical form.

Our kernel stores float32, float16, bfloat16 or int8, tiled; the decomposed graph float32, as the
graph contract lays it out. Where the processor multiplies pairs of bfloat16, and products may be
less precise than float32 anyway, a bfloat16 cache lies in pairs. What float16 cannot hold becomes
the largest number that it can, on every way into a cache. An int8 cache has a float32 scale for
each token and KV head, of keys and of values: a 127th of the largest magnitude, so that nothing has
to be calibrated and nothing is clipped. The bytes of a token depend on that token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.paged import TOKEN_SCALE_BYTES
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.blocks import (
    CacheCodec,
    CodedBlocks,
    HostBlocks,
    paired_layout,
    plain_layout,
    tiled_layout,
)
from onnxport.providers.memory import huge_page_zeros
from onnxport.providers.pool import PoolPlan
from onnxport.providers.transfers import Blocks

Layout = Literal["plain", "tiled", "paired"]  # see csrc/attention.h; plain is the contract's
CachePair = tuple[NDArray[Any], NDArray[Any]]  # of one layer: key, value
TILE: Final = 16  # tokens that lie side by side, so that one register holds a channel of them
# Of each layer's keys and values, what has small pages. A first prompt would make dozens of huge
# ones, of which it uses some per cent: a tenth of a second, and 100 MB.
SMALL_BYTES: Final = 2 << 20
INT8: Final = "int8"
QUAD: Final = 4  # neighbours in a product of int8, side by side in its cache
CACHE_DTYPES: Final[dict[str, Any]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    INT8: np.int8,
}
MOST: Final = np.float32(127)  # the largest int8 that is used, and its negative the smallest
# Rounds a positive float32 up to 16 significant bits: see `int8_scale` in csrc/cache_impl.h.
SCALE_MASK: Final = np.uint32(0xFF)
LARGEST_SCALE_BITS: Final = np.uint32(0x7C010200)  # MOST times that one is finite
SMALLEST_NORMAL: Final = np.finfo(np.float32).tiny


def supported_dtypes(*, custom: bool) -> tuple[str, ...]:
    """What the caches of our kernel, or of the decomposed graph, may hold."""
    return tuple(CACHE_DTYPES) if custom else ("float32",)


def canonical_dtype(dtype: str) -> str:
    """What `read_blocks` returns: int8 numbers are returned as what they stand for."""
    return "float32" if dtype == INT8 else dtype


def row_bytes(dtype: str, head_size: int) -> int:
    """Bytes of a token's key or value in one head, its scale included."""
    numbers = head_size * int(np.dtype(CACHE_DTYPES[dtype]).itemsize)
    return numbers + (TOKEN_SCALE_BYTES if dtype == INT8 else 0)


def allocate(
    spec: ArchSpec, num_places: int, pool: PoolPlan, dtype: str, layout: Layout
) -> tuple[list[CachePair], Blocks]:
    """Zeroed caches of the layers that a block has room for, and what moves their blocks."""
    kind = CACHE_DTYPES[dtype]
    elements = row_bytes(dtype, spec.head_size) // int(np.dtype(kind).itemsize)
    shape = (pool.num_blocks, pool.block_size, spec.num_kv_heads, elements)
    pairs = [
        (
            huge_page_zeros(shape, kind, small_bytes=SMALL_BYTES),
            huge_page_zeros(shape, kind, small_bytes=SMALL_BYTES),
        )
        for _ in range(num_places)
    ]
    if dtype == INT8:
        return pairs, int8_blocks(pairs)
    layouts = {"plain": plain_layout(), "tiled": tiled_layout(TILE), "paired": paired_layout(TILE)}
    return pairs, HostBlocks(pairs, layouts[layout])


def int8_blocks(pairs: Sequence[CachePair]) -> CodedBlocks:
    """The transfers of int8 caches [num_blocks, block_size, kv_heads, head_size + 4].

    Reading is exact: it returns the numbers that attention computes with. Writing rounds as the
    kernel does, and gives what was read from such a cache its very bytes again.
    """
    _, block_size, kv_heads, width = pairs[0][0].shape
    block_shape = (kv_heads, block_size, width - TOKEN_SCALE_BYTES)
    key, value = (_codec(is_key=is_key) for is_key in (True, False))
    return CodedBlocks(pairs, block_shape, key, value)


def _codec(*, is_key: bool) -> CacheCodec:
    def parts(stored: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Views of blocks: a tile's numbers, int8, and its scales, float32 [..., 16, 1].

        The numbers are [n, kv_heads, tiles, 16, head_size] but for one more axis: of keys the last
        one is divided into quads, of values the tokens are.
        """
        count, block_size, kv_heads, width = stored.shape
        size = width - TOKEN_SCALE_BYTES
        tiles = stored.reshape(count, kv_heads, block_size // TILE, TILE * width)
        tokens = (*tiles.shape[:3], TILE, 1)
        scales = tiles[..., TILE * size :].view(np.float32).reshape(tokens)
        flat = tiles[..., : TILE * size]
        if is_key:
            return flat.reshape(*tiles.shape[:3], size // QUAD, TILE, QUAD).swapaxes(3, 4), scales
        return flat.reshape(*tiles.shape[:3], TILE // QUAD, size, QUAD).swapaxes(4, 5), scales

    def decode(stored: NDArray[Any]) -> NDArray[np.float32]:
        numbers, scales = parts(stored)
        rows: NDArray[np.float32] = numbers.astype(np.float32).reshape(*scales.shape[:-1], -1)
        rows *= scales
        return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])

    def encode(content: NDArray[np.float32], stored: NDArray[Any]) -> None:
        numbers, scales = parts(stored)
        scales[...], rounded = quantize(content.reshape(*scales.shape[:-1], -1))
        numbers[...] = rounded.reshape(numbers.shape)

    return CacheCodec(decode, encode)


def quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Scales, float32 [..., 1], and numbers, int8 [..., head_size], of rows [..., head_size].

    The same bytes as the kernel's `encode`. A scale has 16 significant bits, so that a number
    times its scale is exact in float32. It is zero where a 127th of the largest magnitude is no
    normal float32, and NaN where that magnitude is not finite.
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)
    exact = largest / MOST
    bits = (exact.view(np.uint32) + SCALE_MASK) & ~SCALE_MASK
    scale = np.minimum(bits, LARGEST_SCALE_BITS).view(np.float32)
    scale = np.where(exact < SMALLEST_NORMAL, np.float32(0), scale)
    usable = np.isfinite(largest) & (scale > 0)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=usable)
    numbers = np.rint(np.where(usable, x, np.float32(0)) * inverse).astype(np.int8)
    return np.where(np.isfinite(largest), scale, np.float32(np.nan)), numbers
