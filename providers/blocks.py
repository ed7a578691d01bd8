"""KV caches in host memory, read and written as canonical blocks.

A layout is nothing but a view: the same memory with its axes in canonical order. Reading and
writing are then one indexed assignment a cache, for any number of blocks. Where a cache is
quantized there is no such view, and a codec takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from onnxport.errors import ProviderError
from onnxport.providers.transfers import Blocks

_STAY: Final = (
    "stay where they are: their caches have several shapes, see Capabilities.moves_blocks"
)

# Takes a cache, [num_blocks, block_size, kv_heads, head_size] as the graph declares it, and
# returns a view of the same memory: [num_blocks, kv_heads, …, …], where the axes after the heads
# make up the tokens of a block in their order, and then the channels of a token in theirs.
CacheView = Callable[[NDArray[np.generic]], NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where keys and values lie inside their caches."""

    key: CacheView
    value: CacheView


def plain_layout() -> CacheLayout:
    """The layout that the graph contract declares: a token's heads side by side."""

    def by_head(cache: NDArray[np.generic]) -> NDArray[np.generic]:
        return cache.transpose(0, 2, 1, 3)

    return CacheLayout(by_head, by_head)


def tiled_layout(tile: int) -> CacheLayout:
    """The layout of our CPU kernel (`kTiled` in cpu/csrc/attention.h).

    A block holds its heads in turn. A head's keys are [block_size / tile][head_size][tile], its
    values [block_size][head_size]. `tile` is in tokens and divides the block size.
    """

    def key(cache: NDArray[np.generic]) -> NDArray[np.generic]:
        num_blocks, block_size, kv_heads, head_size = cache.shape
        assert block_size % tile == 0, f"blocks of {block_size} tokens, tiles of {tile}"
        tiles = (num_blocks, kv_heads, block_size // tile, head_size, tile)
        return cache.reshape(tiles).swapaxes(3, 4)

    return CacheLayout(key, heads_in_turn)


def heads_in_turn(cache: NDArray[np.generic]) -> NDArray[np.generic]:
    """View a cache whose blocks hold their heads in turn, [blocks, kv_heads, tokens, head_size]."""
    num_blocks, block_size, kv_heads, head_size = cache.shape
    return cache.reshape(num_blocks, kv_heads, block_size, head_size)


def paired_layout(tile: int) -> CacheLayout:
    """The layout of our CPU kernel for pairs of 16-bit numbers (`kPaired` in cpu/csrc/attention.h).

    As the tiled one, but a head's keys are [block_size / tile][head_size / 2][tile][2], its values
    [block_size / tile][tile / 2][head_size][2], two tokens of a channel side by side.
    """

    def key(cache: NDArray[np.generic]) -> NDArray[np.generic]:
        num_blocks, block_size, kv_heads, head_size = cache.shape
        assert block_size % tile == 0, f"blocks of {block_size} tokens, tiles of {tile}"
        tiles = (num_blocks, kv_heads, block_size // tile, head_size // 2, tile, 2)
        return cache.reshape(tiles).swapaxes(3, 4)

    def value(cache: NDArray[np.generic]) -> NDArray[np.generic]:
        num_blocks, block_size, kv_heads, head_size = cache.shape
        return cache.reshape(num_blocks, kv_heads, block_size // 2, head_size, 2).swapaxes(3, 4)

    return CacheLayout(key, value)


class HostBlocks:
    """The caches of all layers; the transfers of `providers.base.Model` on them.

    Wrong block ids, shapes and dtypes are bugs of the caller: they fail an assertion before
    anything is changed.
    """

    def __init__(
        self,
        caches: Sequence[tuple[NDArray[np.generic], ...]],
        layout: CacheLayout,
    ) -> None:
        """View the caches.

        Args:
            caches: the key and the value cache of each layer, or the key cache alone, C-contiguous,
                in one dtype and of one shape [num_blocks, block_size, kv_heads, head_size].
            layout: how the device fills them.
        """
        shape, self._dtype = caches[0][0].shape, caches[0][0].dtype
        for cache in (cache for layer in caches for cache in layer):
            assert (cache.shape, cache.dtype) == (shape, self._dtype), "caches that differ"
            assert cache.flags.c_contiguous, "a layout would copy this cache"
        self._num_blocks, block_size, kv_heads, head_size = shape
        parts = len(caches[0])
        self._block_shape = (len(caches), parts, kv_heads, block_size, head_size)
        views = (layout.key, layout.value)[:parts]
        self._views = [
            (layer, part, view(cache))
            for layer, own in enumerate(caches)
            for part, (view, cache) in enumerate(zip(views, own, strict=True))
        ]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `providers.base.Model.copy_blocks`."""
        at, to = self._ids(sources), self._ids(targets, distinct=True)
        assert len(at) == len(to), f"{len(at)} sources for {len(to)} targets"
        both = np.intersect1d(at, to)
        assert not len(both), f"blocks {both.tolist()} are sources and targets"
        for _, _, view in self._views:
            view[to] = view[at]

    def read(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `providers.base.Model.read_blocks`. A block may be read twice."""
        at = self._ids(blocks)
        content = np.empty((len(at), *self._block_shape), self._dtype)
        for layer, part, view in self._views:
            content[:, layer, part].reshape(len(at), *view.shape[1:])[...] = view[at]
        return content

    def write(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `providers.base.Model.write_blocks`."""
        to = self._ids(blocks, distinct=True)
        wanted = (len(to), *self._block_shape)
        assert content.shape == wanted, f"content of shape {content.shape}, not {wanted}"
        assert content.dtype == self._dtype, f"content of {content.dtype}, not {self._dtype}"
        for layer, part, view in self._views:
            view[to] = content[:, layer, part].reshape(len(to), *view.shape[1:])

    def _ids(self, blocks: Sequence[int], *, distinct: bool = False) -> NDArray[np.intp]:
        return block_index(blocks, self._num_blocks, distinct=distinct)


@dataclass(frozen=True, slots=True)
class CacheCodec:
    """How a quantized cache stores rows.

    Both take blocks of one cache as they are stored, [n, …], C-contiguous, and their rows in
    canonical order, [n, kv_heads, block_size, elements of a row].
    """

    decode: Callable[[NDArray[Any]], NDArray[Any]]
    encode: Callable[[NDArray[Any], NDArray[Any]], None]  # writes to the second


class CodedBlocks:
    """Quantized caches of all layers. Copying copies bytes, and is therefore exact."""

    def __init__(
        self,
        caches: Sequence[tuple[NDArray[Any], ...]],
        block_shape: tuple[int, int, int],
        key: CacheCodec,
        value: CacheCodec,
        dtype: DTypeLike = np.float32,
    ) -> None:
        """View the caches.

        Args:
            caches: the key and the value cache of each layer, or the key cache alone,
                [num_blocks, …].
            block_shape: of a canonical block in one layer: kv_heads, block_size, elements of a row.
            key: of the key caches.
            value: of the value caches.
            dtype: of the elements of rows, see `providers.rows`.
        """
        self._dtype = np.dtype(dtype)
        self._num_blocks = len(caches[0][0])
        parts = len(caches[0])
        self._block_shape = (len(caches), parts, *block_shape)
        self._parts = [
            (layer, part, cache, codec)
            for layer, own in enumerate(caches)
            for part, (cache, codec) in enumerate(zip(own, (key, value)[:parts], strict=True))
        ]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `providers.base.Model.copy_blocks`."""
        at, to = self._ids(sources), self._ids(targets, distinct=True)
        assert len(at) == len(to), f"{len(at)} sources for {len(to)} targets"
        both = np.intersect1d(at, to)
        assert not len(both), f"blocks {both.tolist()} are sources and targets"
        for _, _, cache, _ in self._parts:
            cache[to] = cache[at]

    def read(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `providers.base.Model.read_blocks`."""
        at = self._ids(blocks)
        content = np.empty((len(at), *self._block_shape), self._dtype)
        for layer, part, cache, codec in self._parts:
            content[:, layer, part] = codec.decode(cache[at])
        return content

    def write(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `providers.base.Model.write_blocks`."""
        to = self._ids(blocks, distinct=True)
        wanted = (len(to), *self._block_shape)
        assert content.shape == wanted, f"content of shape {content.shape}, not {wanted}"
        assert content.dtype == self._dtype, f"content of {content.dtype}, not {self._dtype}"
        for layer, part, cache, codec in self._parts:
            stored = np.empty((len(to), *cache.shape[1:]), cache.dtype)
            codec.encode(content[:, layer, part], stored)
            cache[to] = stored

    def _ids(self, blocks: Sequence[int], *, distinct: bool = False) -> NDArray[np.intp]:
        return block_index(blocks, self._num_blocks, distinct=distinct)


class SeveralBlocks:
    """Caches of several shapes, of layers whose heads differ: their blocks have no canonical form.

    So they are copied, and neither read nor written: see `Capabilities.moves_blocks`.
    """

    def __init__(self, parts: Sequence[Blocks]) -> None:
        """Join what moves the caches of each shape."""
        self._parts = tuple(parts)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `providers.base.Model.copy_blocks`."""
        for part in self._parts:
            part.copy(sources, targets)

    def read(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """Raise ProviderError."""
        raise ProviderError(f"{len(blocks)} blocks {_STAY}")

    def write(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """Raise ProviderError."""
        raise ProviderError(f"{len(blocks)} blocks of {content.shape} {_STAY}")


def block_index(
    blocks: Sequence[int], num_blocks: int, *, distinct: bool = False
) -> NDArray[np.intp]:
    """Check the ids of blocks; returns them as an index, intp [len(blocks)].

    Args:
        blocks: the ids.
        num_blocks: of the pool.
        distinct: whether no block may come twice.
    """
    ids = np.array(blocks, np.intp).reshape(-1)
    wrong = ids[(ids < 0) | (ids >= num_blocks)]
    assert not len(wrong), f"blocks {wrong.tolist()} are not in a pool of {num_blocks}"
    assert not distinct or len(np.unique(ids)) == len(ids), "a block is written twice"
    return ids
