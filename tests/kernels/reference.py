"""A slow, obvious NumPy version of `com.microsoft.PagedAttention`, written from its schema.

Everything is computed in float64 and one query row at a time; only what the cache stores is rounded
to the cache's type, in the paired layout the scaled query to bfloat16, and over a cache of integers
query and weights to eight bits. The window follows ONNX Runtime's CUDA kernel, which hands
FlashAttention `local_window_size - 1` as the left window: the query's own position counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from ml_dtypes import bfloat16

from tests.kernels import int4_rows

CACHE_TYPES = {
    "float": np.float32,
    "float16": np.float16,
    "bfloat16": bfloat16,
    "int8": np.int8,
    "int4": np.uint8,  # see int4_rows
}


@dataclass(frozen=True)
class Case:
    """One call of the operator: its attributes, its inputs, and the cache in canonical layout."""

    num_heads: int
    kv_heads: int
    head_size: int
    query: np.ndarray  # [tokens, num_heads, head_size] float32
    key: np.ndarray  # [tokens, kv_heads, head_size] float32
    value: np.ndarray | None  # likewise; None of latent rows
    # [num_blocks, block_size, kv_heads, head_size] of the cache's type; in int8 head_size + 4, for
    # the float32 scale of a token and head follows its numbers; in int4 see int4_rows
    key_cache: np.ndarray
    value_cache: np.ndarray | None  # likewise
    past_lengths: list[int]
    new_lengths: list[int]
    block_table: np.ndarray  # [batch, width] int32
    cache_type: str = "float"
    packed: bool = True  # one packed QKV input rather than three
    layout: str = "canonical"  # or tiled, or paired
    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    chunked: bool = False  # windows are chunks, one behind the other
    causal: bool = True
    cosine: np.ndarray | None = None  # [positions, rotary_dim / 2] float32
    sine: np.ndarray | None = None
    interleaved: bool = False
    rotary_offset: int = 0
    slot_mapping: np.ndarray | None = None  # [tokens] int32
    head_sink: np.ndarray | None = None  # [num_heads] float32
    q_norm: np.ndarray | None = None  # [head_size] float32
    k_norm: np.ndarray | None = None
    epsilon: float = 1e-6
    metadata: np.ndarray | None = None  # [3] int32
    latent: int | None = None  # channels of a key that are its value, too; None: it has its own
    name: str = field(default="", compare=False)

    @property
    def has_integers(self) -> bool:
        return self.cache_type in ("int8", "int4")

    @property
    def value_size(self) -> int:
        return self.latent or self.head_size

    @property
    def memory_layout(self) -> str:
        """Of the caches: latent rows lie in their order, whatever they are multiplied as."""
        return "canonical" if self.latent else self.layout

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[1]

    @property
    def cumulative_lengths(self) -> np.ndarray:
        return np.cumsum([0, *self.new_lengths], dtype=np.int32)

    def replace(self, **changes: object) -> Case:
        return replace(self, **changes)


def rms_norm(x: np.ndarray, weight: np.ndarray | None, epsilon: float) -> np.ndarray:
    if weight is None:
        return x
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rotate(case: Case, x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of [heads, head_size] at one position."""
    if case.cosine is None or case.sine is None:
        return x
    cosine, sine = case.cosine[position].astype(float), case.sine[position].astype(float)
    size = 2 * len(cosine)
    out = x.copy()
    part = x[:, case.rotary_offset : case.rotary_offset + size]
    if case.interleaved:
        a, b = part[:, 0::2], part[:, 1::2]
        pairs = np.stack([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
        rotated = pairs.reshape(part.shape)
    else:
        a, b = part[:, : size // 2], part[:, size // 2 :]
        rotated = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
    out[:, case.rotary_offset : case.rotary_offset + size] = rotated
    return out


def int8_scale(x: np.ndarray) -> np.ndarray:
    """The scale of each row of x [..., head_size], float32 [..., 1]: see `int8_scale` in C++.

    A 127th of the largest magnitude, rounded up to a float32 whose last 8 bits are zero.
    """
    largest = np.abs(x.astype(np.float32)).max(axis=-1, keepdims=True)
    exact = largest / np.float32(127)
    rounded = (exact.view(np.uint32) + np.uint32(255)) & np.uint32(0xFFFFFF00)
    # 127 times the last one is the largest float32 that is none too large
    scale = np.minimum(rounded, np.uint32(0x7C010200)).view(np.float32)
    scale = np.where(exact < np.finfo(np.float32).tiny, np.float32(0), scale)
    return np.where(np.isfinite(largest), scale, np.float32(np.nan)).astype(np.float32)


def quantize(x: np.ndarray) -> np.ndarray:
    """Rows of an int8 cache, [..., head_size + 4], from numbers [..., head_size]."""
    scale = int8_scale(x)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    with np.errstate(invalid="ignore"):
        product = np.where(scale > 0, x.astype(np.float32) * inverse, np.float32(0))
    return np.concatenate([np.rint(product).astype(np.int8), scale.view(np.int8)], axis=-1)


def dequantize(rows: np.ndarray) -> np.ndarray:
    """The numbers, float64 [..., head_size], of rows of an int8 cache [..., head_size + 4]."""
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    return rows[..., :-4].astype(np.float64) * scale.astype(np.float64)


def quantize_int4(x: np.ndarray) -> np.ndarray:
    """Rows of an int4 cache from numbers [..., head_size]: those of an int8 cache, coarser."""
    rows = quantize(x)
    return int4_rows.pack(rows[..., :-4], np.ascontiguousarray(rows[..., -4:]).view(np.float32))


def encode(case: Case, x: np.ndarray) -> np.ndarray:
    """[kv_heads, head_size] as the cache stores it."""
    if case.cache_type == "int4":
        return quantize_int4(x)
    if case.cache_type == "int8":
        return quantize(x)
    return x.astype(np.float32).astype(CACHE_TYPES[case.cache_type])


def decode(case: Case, x: np.ndarray) -> np.ndarray:
    if case.cache_type == "int4":
        return int4_rows.dequantize(x)
    return dequantize(x) if case.cache_type == "int8" else x.astype(np.float64)


def write_cache(case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns both caches with the new tokens in them; of latent rows there is one."""
    key_cache = case.key_cache.copy()
    value_cache = None if case.value_cache is None else case.value_cache.copy()
    starts = case.cumulative_lengths
    for s, count in enumerate(case.new_lengths):
        for i in range(count):
            token, position = starts[s] + i, case.past_lengths[s] + i
            key = rms_norm(case.key[token].astype(float), case.k_norm, case.epsilon)
            if case.slot_mapping is not None:
                slot = case.slot_mapping[token]
            else:
                block = case.block_table[s, position // case.block_size]
                slot = block * case.block_size + position % case.block_size
            if slot == -1:
                continue
            at = slot // case.block_size, slot % case.block_size
            key_cache[at] = encode(case, rotate(case, key, position))
            if value_cache is not None:
                value_cache[at] = encode(case, case.value[token].astype(float))
    return key_cache, value_cache


def round_query(case: Case, query: np.ndarray, scale: float) -> np.ndarray:
    """Rounds what the operator multiplies keys with: ahead of a tanh, or for powers of two."""
    factor = scale / case.softcap if case.softcap else scale * np.log2(np.e)
    scaled = (query * factor).astype(np.float32)
    if case.has_integers:
        return np.stack([round_pairs(row, 127) for row in scaled]) / factor
    return scaled.astype(bfloat16).astype(float) / factor


def round_pairs(x: np.ndarray, most: int) -> np.ndarray:
    """x [n] in steps of a most-th of the largest sum of two neighbours' magnitudes."""
    pairs = np.abs(x).reshape(-1, 2).sum(axis=1)
    if not np.isfinite(pairs).all():
        return np.full(len(x), np.nan)
    if pairs.max() < 1e-36:
        return np.zeros(len(x))
    step = pairs.max().astype(float) / most
    return np.rint(x / step) * step


def round_weights(weights: np.ndarray, seen: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Softmax weights [positions], by chunks of 64, as they are multiplied with int8 values.

    What is rounded is a weight times the scale of its value; a scale is a chunk's own.
    """
    rounded = np.zeros(len(weights))
    for begin in range(0, len(weights), 64):
        here = slice(begin, begin + 64)
        scaled = np.where(seen[here], weights[here] * scales[here], 0)
        even = np.append(scaled, np.zeros(len(scaled) % 2))
        by = np.where(scales[here] > 0, scales[here], 1)
        rounded[here] = round_pairs(even, 255)[: len(scaled)] / by
    return rounded


def attend(case: Case, key_cache: np.ndarray, value_cache: np.ndarray | None) -> np.ndarray:
    """The float64 output [tokens, num_heads * value_size] that follows from the final caches."""
    value_cache = key_cache if value_cache is None else value_cache
    output = np.empty((case.query.shape[0], case.num_heads, case.value_size))
    starts = case.cumulative_lengths
    scale = case.scale if case.scale is not None else 1.0 / np.sqrt(case.head_size)
    group = case.num_heads // case.kv_heads
    for s, count in enumerate(case.new_lengths):
        if count == 0:
            continue
        total = case.past_lengths[s] + count
        positions = np.arange(total)
        # Entries left of every window are never looked at.
        blocks = np.clip(case.block_table[s, positions // case.block_size], 0, len(key_cache) - 1)
        keys = decode(case, key_cache[blocks, positions % case.block_size])
        rows = value_cache[blocks, positions % case.block_size]
        values = decode(case, rows)[..., : case.value_size]
        if case.has_integers:
            value_scales = np.ascontiguousarray(rows[..., -4:]).view(np.float32)[..., 0]
        for i in range(count):
            token, position = starts[s] + i, case.past_lengths[s] + i
            query = rms_norm(case.query[token].astype(float), case.q_norm, case.epsilon)
            query = rotate(case, query, position)
            if case.layout == "paired" or case.has_integers:
                query = round_query(case, query, scale)
            seen = np.ones(total, bool)
            if case.causal:
                seen &= positions <= position
            if case.window is not None:
                first = position - case.window + 1
                if case.chunked:
                    first = position // case.window * case.window
                seen &= positions >= first
            for head in range(case.num_heads):
                g = head // group
                logits = keys[seen, g] @ query[head] * scale
                if case.softcap:
                    logits = case.softcap * np.tanh(logits / case.softcap)
                sink = -np.inf if case.head_sink is None else float(case.head_sink[head])
                top = max(logits.max(), sink)
                weights = np.exp(logits - top)
                denominator = weights.sum() + np.exp(sink - top)
                if case.has_integers:
                    every = np.zeros(len(seen))
                    every[seen] = weights
                    weights = round_weights(every, seen, value_scales[:, g])[seen]
                output[token, head] = weights @ values[seen, g] / denominator
    return output.reshape(len(output), -1)


def to_layout(cache: np.ndarray, layout: str, key: bool) -> np.ndarray:
    """The bytes of a layout, in the canonical shape that the graph declares."""
    if layout == "canonical":
        return cache.copy()
    if layout == "tiled":
        return to_tiled(cache, key)
    blocks, size, heads, width = cache.shape
    tiles = cache.reshape(blocks, size // 16, 16, heads, width).transpose(0, 3, 1, 2, 4)
    if key:  # [..., channels / 2, 16, 2]
        pairs = tiles.reshape(*tiles.shape[:4], width // 2, 2).swapaxes(3, 4)
    else:  # [..., 8, channels, 2]
        pairs = tiles.reshape(*tiles.shape[:3], 8, 2, width).swapaxes(4, 5)
    return np.ascontiguousarray(pairs).reshape(cache.shape)


def from_layout(cache: np.ndarray, layout: str, key: bool) -> np.ndarray:
    """The inverse of `to_layout`."""
    if layout == "canonical":
        return cache
    if layout == "tiled":
        return from_tiled(cache, key)
    blocks, size, heads, width = cache.shape
    tiles = (blocks, heads, size // 16)
    if key:
        rows = cache.reshape(*tiles, width // 2, 16, 2).swapaxes(3, 4).reshape(*tiles, 16, width)
    else:
        rows = cache.reshape(*tiles, 8, width, 2).swapaxes(4, 5).reshape(*tiles, 16, width)
    return rows.transpose(0, 2, 3, 1, 4).reshape(cache.shape)


def to_tiled(cache: np.ndarray, key: bool) -> np.ndarray:
    """The bytes of the tiled layout, in the canonical shape that the graph declares."""
    if cache.dtype == np.uint8:
        return int4_rows.to_tiled(cache, key)
    blocks, size, heads, width = cache.shape
    tiles = cache.reshape(blocks, size // 16, 16, heads, width).transpose(0, 3, 1, 2, 4)
    channels = number_channels(cache)
    numbers, scales = tiles[..., :channels], tiles[..., channels:]
    if cache.dtype == np.int8 and key:  # [..., channels / 4, 16, 4]
        numbers = numbers.reshape(*tiles.shape[:4], channels // 4, 4).swapaxes(3, 4)
    elif cache.dtype == np.int8:  # [..., 4, channels, 4]
        numbers = numbers.reshape(*tiles.shape[:3], 4, 4, channels).swapaxes(4, 5)
    elif key:
        numbers = numbers.swapaxes(3, 4)
    flat = [part.reshape(*tiles.shape[:3], -1) for part in (numbers, scales)]
    return np.ascontiguousarray(np.concatenate(flat, axis=-1)).reshape(cache.shape)


def from_tiled(cache: np.ndarray, key: bool) -> np.ndarray:
    """The inverse of `to_tiled`."""
    if cache.dtype == np.uint8:
        return int4_rows.from_tiled(cache, key)
    blocks, size, heads, width = cache.shape
    channels = number_channels(cache)
    tiles = cache.reshape(blocks, heads, size // 16, 16 * width)
    numbers, scales = tiles[..., : 16 * channels], tiles[..., 16 * channels :]
    if cache.dtype == np.int8 and key:
        numbers = numbers.reshape(*tiles.shape[:3], channels // 4, 16, 4).swapaxes(3, 4)
    elif cache.dtype == np.int8:
        numbers = numbers.reshape(*tiles.shape[:3], 4, channels, 4).swapaxes(4, 5)
    elif key:
        numbers = numbers.reshape(*tiles.shape[:3], channels, 16).swapaxes(3, 4)
    numbers = numbers.reshape(*tiles.shape[:3], 16, channels)
    rows = np.concatenate([numbers, scales.reshape(*tiles.shape[:3], 16, -1)], axis=-1)
    return rows.transpose(0, 2, 3, 1, 4).reshape(cache.shape)


def number_channels(cache: np.ndarray) -> int:
    """Channels of a row that hold numbers; the rest of an int8 row is its scale."""
    width: int = cache.shape[-1]
    return width - 4 if cache.dtype == np.int8 else width
