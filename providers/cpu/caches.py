"""The KV caches of the `cpu` provider: their types, their memory, and their canonical form.

Our kernel stores float32, float16, bfloat16, int8 or int4, tiled; the decomposed graph float32, as
the graph contract lays it out. Where the processor multiplies pairs of bfloat16, and products may
be less precise than float32 anyway, a bfloat16 cache lies in pairs. What float16 cannot hold
becomes the largest number that it can, on every way into a cache. An int8 cache has a float32 scale
for each token and KV head, of keys and of values: a 127th of the largest magnitude, so that nothing
has to be calibrated and nothing is clipped. An int4 cache has what an int8 cache would have, in
steps of its own for each 32 channels. The bytes of a token depend on that token alone.

Rows of latents, which are keys and values in one (`graphs.latent_spec`), lie in their order
whatever their type is, which is any of these but int4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.cache_rows import INT4, INT8, SCALE_BYTES, row_elements
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.blocks import (
    CacheCodec,
    CodedBlocks,
    HostBlocks,
    SeveralBlocks,
    paired_layout,
    plain_layout,
    tiled_layout,
)
from onnxport.providers.layer_groups import CacheKind, cache_kinds
from onnxport.providers.memory import huge_page_zeros
from onnxport.providers.pool import PoolPlan
from onnxport.providers.transfers import Blocks

# See csrc/attention.h. Plain is the contract's, for the decomposed graph; rows are as plain, for a
# kernel that makes tiles of latents, and so they lie where it makes pairs.
Layout = Literal["plain", "tiled", "paired", "rows"]
LayerCaches = tuple[NDArray[Any], ...]  # of one layer: key and value, or key alone
TILE: Final = 16  # tokens that lie side by side, so that one register holds a channel of them
# Of each layer's keys and values, what has small pages. A first prompt would make dozens of huge
# ones, of which it uses some per cent: a tenth of a second, and 100 MB.
SMALL_BYTES: Final = 2 << 20
QUAD: Final = 4  # neighbours in a product of int8, side by side in its cache
INTEGERS: Final = (INT8, INT4)
CACHE_DTYPES: Final[dict[str, Any]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    INT8: np.int8,
    INT4: np.uint8,
}


def supported_dtypes(*, custom: bool, latent: bool = False) -> tuple[str, ...]:
    """What the caches of our kernel, or of the decomposed graph, may hold; latents are not int4."""
    if not custom:
        return ("float32",)
    return tuple(dtype for dtype in CACHE_DTYPES if not latent or dtype != INT4)


def allocate(
    spec: ArchSpec, groups: LayerGroups, pool: PoolPlan, dtype: str, layout: Layout
) -> tuple[dict[CacheKind, LayerCaches], Blocks]:
    """Zeroed caches of the places that a block has, and what moves their blocks."""
    caches = {
        kind: _zeros(spec, kind, pool, dtype) for kind in sorted(set(cache_kinds(spec, groups)))
    }
    by_heads: dict[tuple[int, int], list[LayerCaches]] = {}
    for (_, *heads), arrays in caches.items():
        by_heads.setdefault((heads[0], heads[1]), []).append(arrays)
    moved = [_blocks(spec, own, size, dtype, layout) for (_, size), own in by_heads.items()]
    return caches, moved[0] if len(moved) == 1 else SeveralBlocks(moved)


def _zeros(spec: ArchSpec, kind: CacheKind, pool: PoolPlan, dtype: str) -> LayerCaches:
    _, heads, size = kind
    shape = (pool.num_blocks, pool.block_size, heads, row_elements(dtype, size))
    return tuple(
        huge_page_zeros(shape, CACHE_DTYPES[dtype], small_bytes=SMALL_BYTES)
        for _ in range(spec.cache_parts)
    )


def _blocks(
    spec: ArchSpec, caches: list[LayerCaches], head_size: int, dtype: str, layout: Layout
) -> Blocks:
    """What moves blocks of caches of one shape."""
    if spec.latent is not None:
        return HostBlocks(caches, plain_layout())
    if dtype in INTEGERS:
        return packed_blocks(caches, dtype, head_size)
    layouts = {"plain": plain_layout(), "tiled": tiled_layout(TILE), "paired": paired_layout(TILE)}
    return HostBlocks(caches, layouts[layout])


def packed_blocks(caches: Sequence[LayerCaches], dtype: str, head_size: int) -> CodedBlocks:
    """The transfers of caches of integers, [num_blocks, block_size, kv_heads, elements of a row].

    Their canonical rows are what the caches hold, bytes in another order, so that moving a block
    there and back changes nothing.
    """
    _, block_size, kv_heads, elements = caches[0][0].shape
    key, value = (_codec(tile_order(dtype, head_size, is_key=of_key)) for of_key in (True, False))
    shape = (kv_heads, block_size, elements)
    return CodedBlocks(caches, shape, key, value, CACHE_DTYPES[dtype])


def tile_order(dtype: str, head_size: int, *, is_key: bool) -> NDArray[np.intp]:
    """Where a tile has what is in sixteen rows: intp [TILE, elements of a row].

    Bytes of numbers, of which a row has `channels`, lie in quads: of keys, those of one token, of
    values, those of four tokens (`kTiled` in csrc/attention.h). What belongs to them lies behind
    them, token by token.
    """
    elements = row_elements(dtype, head_size)
    channels = head_size if dtype == INT8 else head_size // 2
    places = np.arange(TILE * elements)
    numbers, sides, scales = np.split(places, [TILE * channels, TILE * (elements - SCALE_BYTES)])
    if is_key:
        quads = numbers.reshape(channels // QUAD, TILE, QUAD).swapaxes(0, 1)
    else:
        quads = numbers.reshape(TILE // QUAD, channels, QUAD).swapaxes(1, 2)
    # of each group, the steps of all tokens, then their firsts
    groups = sides.reshape(-1, 2, TILE).transpose(2, 1, 0)
    parts = (quads, groups, scales)
    return np.concatenate([part.reshape(TILE, -1) for part in parts], axis=1)


def _codec(order: NDArray[np.intp]) -> CacheCodec:
    tile, elements = order.shape

    def tiles_of(stored: NDArray[Any]) -> NDArray[Any]:
        count, block_size, kv_heads, _ = stored.shape
        return stored.reshape(count, kv_heads, block_size // tile, tile * elements)

    def decode(stored: NDArray[Any]) -> NDArray[Any]:
        rows: NDArray[Any] = tiles_of(stored)[..., order]
        return rows.reshape(*rows.shape[:2], -1, elements)

    def encode(content: NDArray[Any], stored: NDArray[Any]) -> None:
        tiles = tiles_of(stored)
        tiles[..., order] = content.reshape(*tiles.shape[:-1], tile, elements)

    return CacheCodec(decode, encode)
