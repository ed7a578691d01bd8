"""A slow, obvious NumPy version of `com.microsoft.PagedAttention`, written from its schema.

Everything is computed in float64 and one query row at a time; only what the cache stores is rounded
to the cache's type. The window follows ONNX Runtime's CUDA kernel, which hands FlashAttention
`local_window_size - 1` as the left window: the query's own position counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from ml_dtypes import bfloat16

CACHE_TYPES = {
    "float": np.float32,
    "float16": np.float16,
    "bfloat16": bfloat16,
    "int8": np.int8,
}


@dataclass(frozen=True)
class Case:
    """One call of the operator: its attributes, its inputs, and the cache in canonical layout."""

    num_heads: int
    kv_heads: int
    head_size: int
    query: np.ndarray  # [tokens, num_heads, head_size] float32
    key: np.ndarray  # [tokens, kv_heads, head_size] float32
    value: np.ndarray  # likewise
    key_cache: np.ndarray  # [num_blocks, block_size, kv_heads, head_size] of the cache's type
    value_cache: np.ndarray  # likewise
    past_lengths: list[int]
    new_lengths: list[int]
    block_table: np.ndarray  # [batch, width] int32
    cache_type: str = "float"
    packed: bool = True  # one packed QKV input rather than three
    tiled: bool = False
    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
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
    k_scale: np.ndarray | None = None  # [1] or [kv_heads, 1, head_size] float32
    v_scale: np.ndarray | None = None
    metadata: np.ndarray | None = None  # [3] int32
    name: str = field(default="", compare=False)

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


def channel_scale(case: Case, scale: np.ndarray) -> np.ndarray:
    """The scale as [kv_heads, head_size]."""
    shape = (case.kv_heads, case.head_size)
    return np.broadcast_to(scale.reshape(-1) if scale.size == 1 else scale.reshape(shape), shape)


def encode(case: Case, x: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """[kv_heads, head_size] as the cache stores it."""
    if case.cache_type == "int8":
        assert scale is not None
        inverse = (1.0 / channel_scale(case, scale).astype(np.float32)).astype(np.float32)
        return np.clip(np.rint(x.astype(np.float32) * inverse), -128, 127).astype(np.int8)
    return x.astype(np.float32).astype(CACHE_TYPES[case.cache_type])


def decode(case: Case, x: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    x = x.astype(np.float64)
    return x * channel_scale(case, scale).astype(float) if scale is not None else x


def write_cache(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns both caches with the new tokens in them."""
    key_cache, value_cache = case.key_cache.copy(), case.value_cache.copy()
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
            key_cache[at] = encode(case, rotate(case, key, position), case.k_scale)
            value_cache[at] = encode(case, case.value[token].astype(float), case.v_scale)
    return key_cache, value_cache


def attend(case: Case, key_cache: np.ndarray, value_cache: np.ndarray) -> np.ndarray:
    """The float64 output [tokens, num_heads * head_size] that follows from the final caches."""
    output = np.empty((case.query.shape[0], case.num_heads, case.head_size))
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
        keys = decode(case, key_cache[blocks, positions % case.block_size], case.k_scale)
        values = decode(case, value_cache[blocks, positions % case.block_size], case.v_scale)
        for i in range(count):
            token, position = starts[s] + i, case.past_lengths[s] + i
            query = rms_norm(case.query[token].astype(float), case.q_norm, case.epsilon)
            query = rotate(case, query, position)
            seen = np.ones(total, bool)
            if case.causal:
                seen &= positions <= position
            if case.window is not None:
                seen &= positions > position - case.window
            for head in range(case.num_heads):
                g = head // group
                logits = keys[seen, g] @ query[head] * scale
                if case.softcap:
                    logits = case.softcap * np.tanh(logits / case.softcap)
                sink = -np.inf if case.head_sink is None else float(case.head_sink[head])
                top = max(logits.max(), sink)
                weights = np.exp(logits - top)
                weights /= weights.sum() + np.exp(sink - top)
                output[token, head] = weights @ values[seen, g]
    return output.reshape(len(output), -1)


def to_tiled(cache: np.ndarray, key: bool) -> np.ndarray:
    """The bytes of the tiled layout, in the canonical shape that the graph declares."""
    blocks, size, heads, width = cache.shape
    if not key:
        return np.ascontiguousarray(cache.transpose(0, 2, 1, 3)).reshape(cache.shape)
    tiles = cache.reshape(blocks, size // 16, 16, heads, width).transpose(0, 3, 1, 4, 2)
    return np.ascontiguousarray(tiles).reshape(cache.shape)


def from_tiled(cache: np.ndarray, key: bool) -> np.ndarray:
    """The inverse of `to_tiled`."""
    blocks, size, heads, width = cache.shape
    if not key:
        return cache.reshape(blocks, heads, size, width).transpose(0, 2, 1, 3)
    tiles = cache.reshape(blocks, heads, size // 16, width, 16).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(cache.shape)
