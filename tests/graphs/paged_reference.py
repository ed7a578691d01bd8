"""com.microsoft.PagedAttention in NumPy, in float64, one token and one head at a time.

Written from the operator's schema, with no code shared with the graphs it checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass
class Case:
    """One run of the operator; caches are changed in place."""

    heads: int
    kv_heads: int
    head_size: int
    new: list[int]  # tokens per sequence
    past: list[int]
    block_table: NDArray[np.int32]  # [batch, max_num_blocks]
    query: NDArray[np.float32]  # [T, heads * head_size]
    key: NDArray[np.float32]  # [T, kv_heads * head_size]
    value: NDArray[np.float32]
    key_cache: NDArray[np.float32]  # [num_blocks, block_size, kv_heads, head_size]
    value_cache: NDArray[np.float32]
    cos: NDArray[np.float32] | None = None  # [positions, rotary_dim / 2]
    sin: NDArray[np.float32] | None = None
    interleaved: bool = False
    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    sink: NDArray[np.float32] | None = None
    norm: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
    epsilon: float = 1e-6
    features: list[str] = field(default_factory=list)

    @property
    def cumulative(self) -> NDArray[np.int32]:
        return np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32)


def rotate(x: Floats, cos: Floats, sin: Floats, interleaved: bool) -> Floats:
    """One head [head_size] at one position; cos and sin are [rotary_dim / 2]."""
    half = len(cos)
    out = x.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        out[a] = x[a] * cos[i] - x[b] * sin[i]
        out[b] = x[b] * cos[i] + x[a] * sin[i]
    return out


def prepare(case: Case, x: Floats, position: int, norm: NDArray[np.float32] | None) -> Floats:
    """RMSNorm and RoPE of one head."""
    if norm is not None:
        x = x / np.sqrt(np.mean(x * x) + case.epsilon) * norm.astype(np.float64)
    if case.cos is not None and case.sin is not None:
        cos, sin = case.cos[position].astype(np.float64), case.sin[position].astype(np.float64)
        x = rotate(x, cos, sin, case.interleaved)
    return x


def reference(case: Case) -> Floats:
    """Write the new keys and values, and return the attention [T, heads * head_size]."""
    size, block_size = case.head_size, case.key_cache.shape[1]
    tokens = [(b, i) for b, count in enumerate(case.new) for i in range(count)]
    query = case.query.astype(np.float64).reshape(len(tokens), case.heads, size)
    key = case.key.astype(np.float64).reshape(len(tokens), case.kv_heads, size)
    value = case.value.reshape(len(tokens), case.kv_heads, size)
    k_norm = None if case.norm is None else case.norm[1]
    q_norm = None if case.norm is None else case.norm[0]

    def slot(b: int, position: int) -> tuple[int, int]:
        return int(case.block_table[b, position // block_size]), position % block_size

    for t, (b, i) in enumerate(tokens):
        position = case.past[b] + i
        for h in range(case.kv_heads):
            case.key_cache[(*slot(b, position), h)] = prepare(case, key[t, h], position, k_norm)
            case.value_cache[(*slot(b, position), h)] = value[t, h]
    out = np.zeros((len(tokens), case.heads, size))
    scale = 1 / np.sqrt(size) if case.scale is None else case.scale
    for t, (b, i) in enumerate(tokens):
        position = case.past[b] + i
        first = 0 if case.window is None else max(0, position - case.window + 1)
        rows = [slot(b, p) for p in range(first, position + 1)]
        for h in range(case.heads):
            q = prepare(case, query[t, h], position, q_norm)
            group = h // (case.heads // case.kv_heads)
            keys = np.stack([case.key_cache[(*row, group)] for row in rows]).astype(np.float64)
            values = np.stack([case.value_cache[(*row, group)] for row in rows])
            scores = keys @ q * scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            top = scores.max()
            weights = np.exp(scores - top)
            denominator = weights.sum()
            if case.sink is not None:
                denominator += np.exp(float(case.sink[h]) - top)
            out[t, h] = weights @ values.astype(np.float64) / denominator
    return out.reshape(len(tokens), -1)


def random_case(seed: int) -> Case:
    """Everything that the operator can vary, drawn at random; small enough for the loops."""
    r = np.random.default_rng(seed)
    kv_heads = int(r.choice([1, 2, 3]))
    heads = kv_heads * int(r.choice([1, 2, 4]))
    size = int(r.choice([8, 16, 32]))
    block_size = int(r.choice([4, 8, 16]))
    batch = int(r.integers(1, 6))
    decode = r.random() < 0.3
    new = [1 if decode else int(r.integers(0, 12)) for _ in range(batch)]
    new[int(r.integers(batch))] += int(not any(new))
    past = [int(r.choice([0, r.integers(0, 40)])) for _ in range(batch)]
    needed = [-(-(n + p) // block_size) for n, p in zip(new, past, strict=True)]
    width = max(max(needed), 1) + int(r.integers(0, 3))
    num_blocks = sum(needed) + 3
    ids = r.permutation(num_blocks)
    table = np.zeros((batch, width), np.int32)
    for b, count in enumerate(needed):
        table[b, :count], ids = ids[:count], ids[count:]

    def draw(*shape: int) -> NDArray[np.float32]:
        return r.standard_normal(shape).astype(np.float32)

    features = [
        f for f in ("rope", "scale", "softcap", "window", "sink", "norm") if r.random() < 0.4
    ]
    total, cache = sum(new), (num_blocks, block_size, kv_heads, size)
    rotary = int(r.choice([size, size // 2]))
    rope, windowed = "rope" in features, "window" in features
    return Case(
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        new=new,
        past=past,
        block_table=table,
        query=draw(total, heads * size),
        key=draw(total, kv_heads * size),
        value=draw(total, kv_heads * size),
        key_cache=draw(*cache),
        value_cache=draw(*cache),
        cos=np.cos(draw(64, rotary // 2)) if rope else None,
        sin=np.sin(draw(64, rotary // 2)) if rope else None,
        interleaved=bool(r.random() < 0.5),
        scale=float(r.uniform(0.05, 0.6)) if "scale" in features else None,
        softcap=float(r.uniform(0.5, 5)) if "softcap" in features else 0.0,
        window=int(r.integers(1, 24)) if windowed else None,
        sink=draw(heads) if "sink" in features else None,
        norm=(draw(size), draw(size)) if "norm" in features else None,
        features=features,
    )
