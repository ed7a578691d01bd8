"""The KV caches of a compiled model: what OpenVINO made of them, and their canonical form.

Each cache is an input [num_blocks, kv_heads, rows, columns] whose type and last two sizes the
plugin chose when it compiled the model. In floating point that is block_size rows of head_size
channels; the GPU plugin stores keys the other way round, as head_size rows of block_size tokens. In
uint8, on the CPU, a number x is stored as q with x = (q - zero) * scale, and the float32 scales and
zeros lie in the same tensor, in front of what they belong to:

    keys    by channel: head_size scales, head_size zeros, then block_size rows of head_size; thus
            block_size + 8 rows of head_size bytes
    values  by token: scale, zero, then head_size channels; thus rows of head_size + 8 bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.providers.blocks import CacheLayout, HostBlocks, block_index
from onnxport.providers.memory import huge_page_zeros
from onnxport.providers.transfers import Blocks

PARAMETER_BYTES: Final = 8  # a float32 scale and a float32 zero
MOST: Final = 255  # the largest q
DTYPES: Final[dict[str, Any]] = {  # of caches that `read_blocks` returns as they are
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
SMALLEST_SCALE: Final = 1e-4  # of numbers that are all the same
Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # q, scale, zero
CachePair = tuple[NDArray[Any], NDArray[Any]]  # of one layer: key, value


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """What the caches of a compiled model are; all layers are alike."""

    dtype: str  # float32, float16, bfloat16, or int8: uint8 with scales and zeros
    block_size: int  # tokens
    key_shape: tuple[int, int, int]  # of one block: kv_heads, rows, columns
    value_shape: tuple[int, int, int]
    transposed_keys: bool = False  # a block of keys is head_size rows of block_size columns

    @property
    def canonical_dtype(self) -> str:
        """What `read_blocks` returns: quantized numbers are returned as what they stand for."""
        return "float32" if self.dtype == "int8" else self.dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer, scales and zeros included."""
        item = 1 if self.dtype == "int8" else np.dtype(DTYPES[self.dtype]).itemsize
        return item * int(np.prod(self.key_shape) + np.prod(self.value_shape))


def read_format(
    heads: tuple[int, int],
    dtype: str,
    key: Sequence[int],
    value: Sequence[int],
    *,
    transposed_keys: bool = False,
) -> CacheFormat:
    """Understand the caches of a compiled model.

    Args:
        heads: the number of KV heads, and the channels of one.
        dtype: as in `CacheFormat`.
        key: sizes of a block of keys: kv_heads, rows, columns.
        value: sizes of a block of values.
        transposed_keys: as in `CacheFormat`; sizes alone do not tell where blocks have as many
            tokens as heads have channels.

    Raises:
        ProviderError: this version of OpenVINO stores them in a way that is not known here.
    """
    extra = PARAMETER_BYTES if dtype == "int8" else 0
    (kv_heads, size), rows = heads, value[1]
    keys = (size, rows) if transposed_keys else (rows + extra, size)
    known = (kv_heads, *keys), (kv_heads, rows, size + extra)
    if (tuple(key), tuple(value)) != known:
        raise ProviderError(
            f"this OpenVINO stores {dtype} KV blocks as keys {list(key)} and values "
            f"{list(value)}; known are {list(known[0])} and {list(known[1])}. Install the version "
            "that onnxport names: pip install 'onnxport[openvino]'"
        )
    return CacheFormat(dtype, rows, *known, transposed_keys)


def allocate(form: CacheFormat, num_layers: int, num_blocks: int) -> tuple[list[CachePair], Blocks]:
    """Zeroed caches in host memory, and what moves their blocks; keys are not transposed."""
    assert not form.transposed_keys, "the CPU plugin does not transpose keys"
    kind = np.uint8 if form.dtype == "int8" else DTYPES[form.dtype]
    pairs = [
        (
            huge_page_zeros((num_blocks, *form.key_shape), kind),
            huge_page_zeros((num_blocks, *form.value_shape), kind),
        )
        for _ in range(num_layers)
    ]
    if form.dtype == "int8":
        return pairs, QuantizedBlocks(pairs, form.block_size)
    kv_heads, block_size, head_size = form.key_shape
    declared = (num_blocks, block_size, kv_heads, head_size)
    caches = [(key.reshape(declared), value.reshape(declared)) for key, value in pairs]
    return pairs, HostBlocks(caches, CacheLayout(_by_head, _by_head))


def _by_head(cache: NDArray[np.generic]) -> NDArray[np.generic]:
    """A block holds its heads in turn."""
    num_blocks, block_size, kv_heads, head_size = cache.shape
    return cache.reshape(num_blocks, kv_heads, block_size, head_size)


class QuantizedBlocks:
    """Caches in uint8; their canonical form is float32.

    Reading is exact: it returns the numbers that attention computes with. Writing rounds again,
    each channel of a block of keys and each token of values to 255 steps between its extremes;
    what was read from full blocks comes back within the rounding of float32.
    """

    def __init__(self, pairs: Sequence[CachePair], block_size: int) -> None:
        """View the caches, whose format `read_format` has checked."""
        self._pairs = pairs
        num_blocks, kv_heads, _, head_size = pairs[0][0].shape
        self._num_blocks = num_blocks
        self._block_shape = (len(pairs), 2, kv_heads, block_size, head_size)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies bytes, and is therefore exact. See `providers.base.Model.copy_blocks`."""
        at, to = self._ids(sources), self._ids(targets, distinct=True)
        assert len(at) == len(to), f"{len(at)} sources for {len(to)} targets"
        both = np.intersect1d(at, to)
        assert not len(both), f"blocks {both.tolist()} are sources and targets"
        for pair in self._pairs:
            for cache in pair:
                cache[to] = cache[at]

    def read(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `providers.base.Model.read_blocks`; float32."""
        at = self._ids(blocks)
        content = np.empty((len(at), *self._block_shape), np.float32)
        for layer, (key, value) in enumerate(self._pairs):
            content[:, layer, 0] = _dequantize(*_key_parts(key[at]))
            content[:, layer, 1] = _dequantize(*_value_parts(value[at]))
        return content

    def write(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `providers.base.Model.write_blocks`; float32."""
        to = self._ids(blocks, distinct=True)
        wanted = (len(to), *self._block_shape)
        assert content.shape == wanted, f"content of shape {content.shape}, not {wanted}"
        assert content.dtype == np.float32, f"content of {content.dtype}, not float32"
        for layer, pair in enumerate(self._pairs):
            for part, (cache, parts, axis) in enumerate(
                zip(pair, (_key_parts, _value_parts), (-2, -1), strict=True)
            ):
                stored = np.empty((len(to), *cache.shape[1:]), np.uint8)
                for target, numbers in zip(
                    parts(stored), _quantize(content[:, layer, part], axis), strict=True
                ):
                    target[...] = numbers
                cache[to] = stored

    def _ids(self, blocks: Sequence[int], *, distinct: bool = False) -> NDArray[np.intp]:
        return block_index(blocks, self._num_blocks, distinct=distinct)


def _key_parts(stored: NDArray[Any]) -> Parts:
    """Views of contiguous blocks of keys [n, kv_heads, block_size + 8, head_size], uint8."""
    count, kv_heads, _, size = stored.shape
    floats = stored[:, :, :PARAMETER_BYTES].reshape(count, kv_heads, -1).view(np.float32)
    return stored[:, :, PARAMETER_BYTES:], floats[..., None, :size], floats[..., None, size:]


def _value_parts(stored: NDArray[Any]) -> Parts:
    """Views of contiguous blocks of values [n, kv_heads, block_size, head_size + 8], uint8."""
    floats = stored[..., :PARAMETER_BYTES].view(np.float32)
    return stored[..., PARAMETER_BYTES:], floats[..., :1], floats[..., 1:]


def _dequantize(q: NDArray[Any], scale: NDArray[Any], zero: NDArray[Any]) -> NDArray[Any]:
    x: NDArray[Any] = (q.astype(np.float32) - zero) * scale
    return x


def _quantize(x: NDArray[Any], axis: int) -> Parts:
    """Numbers that share what `axis` runs over: q, scale and zero."""
    low = x.min(axis=axis, keepdims=True)
    spread = x.max(axis=axis, keepdims=True) - low
    scale = np.where(spread > 0, spread / MOST, SMALLEST_SCALE).astype(np.float32)
    zero = (-low / scale).astype(np.float32)
    return np.clip(np.rint(x / scale + zero), 0, MOST).astype(np.uint8), scale, zero
