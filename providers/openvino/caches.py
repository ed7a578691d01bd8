"""The KV caches of a compiled model: what OpenVINO made of them, and their canonical form.

Each cache is an input [num_blocks, kv_heads, rows, columns] whose type and last two sizes the
plugin chose when it compiled the model. In floating point that is block_size rows of head_size
channels; the GPU plugin stores keys the other way round, as head_size rows of block_size tokens. In
uint8, on the CPU, a number x is stored as q with x = (q - zero) * scale, and the float32 scales and
zeros lie in the same tensor, in front of what they belong to:

    keys    by channel: head_size scales, head_size zeros, then block_size rows of head_size; thus
            block_size + 8 rows of head_size bytes
    values  by token: scale, zero, then head_size channels; thus rows of head_size + 8 bytes

A step that adds tokens to a block of keys which is not full yet reads what is there, and stores all
of it anew with scales that suit the new ones, too. So each step rounds those keys once more, and a
guess that was wrong leaves wider scales behind, although its own row is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.providers.blocks import (
    CacheCodec,
    CacheLayout,
    CodedBlocks,
    HostBlocks,
    heads_in_turn,
)
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
    """What the caches of a layer of a compiled model are."""

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
        return pairs, quantized_blocks(pairs, form.block_size)
    kv_heads, block_size, head_size = form.key_shape
    declared = (num_blocks, block_size, kv_heads, head_size)
    caches = [(key.reshape(declared), value.reshape(declared)) for key, value in pairs]
    return pairs, HostBlocks(caches, CacheLayout(heads_in_turn, heads_in_turn))


def quantized_blocks(pairs: Sequence[CachePair], block_size: int) -> CodedBlocks:
    """The transfers of caches in uint8, whose format `read_format` has checked.

    Reading is exact: it returns the numbers that attention computes with. Writing rounds again,
    each channel of a block of keys and each token of values to 255 steps between its extremes;
    what was read from full blocks comes back within the rounding of float32.
    """
    _, kv_heads, _, head_size = pairs[0][0].shape
    key, value = _codec(_key_parts, -2), _codec(_value_parts, -1)
    return CodedBlocks(pairs, (kv_heads, block_size, head_size), key, value)


def _codec(parts: Callable[[NDArray[Any]], Parts], axis: int) -> CacheCodec:
    """Of a cache with `parts`; numbers along `axis` share a scale and a zero."""

    def decode(stored: NDArray[Any]) -> NDArray[np.float32]:
        return _dequantize(*parts(stored))

    def encode(content: NDArray[np.float32], stored: NDArray[Any]) -> None:
        for target, numbers in zip(parts(stored), _quantize(content, axis), strict=True):
            target[...] = numbers

    return CacheCodec(decode, encode)


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
