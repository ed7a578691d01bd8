"""Calls of PagedAttention over one cache of latent rows, whose first channels are the values."""

from __future__ import annotations

import numpy as np

from tests.kernels.cases import (
    blocks,
    cache_contents,
    drop_blocks_left_of_window,
    lengths,
    rotary,
    slots,
)
from tests.kernels.reference import Case

# Types of the cache, and what its rows are multiplied as.
KINDS = [
    ("float", "canonical"),
    ("float16", "canonical"),
    ("bfloat16", "canonical"),
    ("bfloat16", "paired"),
    ("int8", "canonical"),
]
# Channels of a row and of its value: tiny ones, those of real models, and with and without whole
# registers of AMX.
SIZES = [(16, 16), (32, 16), (48, 32), (96, 64), (128, 96), (192, 128), (320, 256), (576, 512)]
HEADS = [1, 2, 5, 16, 20, 32, 40]
SCALE = 0.1


def latent(case: Case, value_size: int) -> Case:
    """A case of one KV head, whose keys become its values, too."""
    assert case.kv_heads == 1, case.kv_heads
    return case.replace(
        value=None, value_cache=None, latent=value_size, packed=False, scale=case.scale or SCALE
    )


def random_case(seed: int) -> Case:
    """Of all kinds, sizes and options."""
    rng = np.random.default_rng(seed)
    cache_type, layout = KINDS[seed % len(KINDS)]
    head_size, value_size = SIZES[rng.integers(len(SIZES))]
    num_heads = int(rng.choice([*HEADS, 128] if head_size == 576 else HEADS))
    block_size = int(rng.choice([8, 16, 24, 32, 64]))
    past, new = lengths(rng)
    if num_heads * head_size > 10_000:  # the reference is slow
        past, new = past[:2], [min(count, 3) for count in new[:2]]
        new[0] = max(1, new[0])
    num_blocks, table = blocks(rng, past, new, block_size)
    tokens, longest = sum(new), max(p + n for p, n in zip(past, new, strict=True))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    options: dict[str, object] = {"scale": float(rng.uniform(0.5, 1.5)) / np.sqrt(head_size)}
    if rng.integers(4):
        options |= latent_rotary(rng, head_size, value_size, longest + int(rng.integers(0, 3)))
    if rng.integers(4) == 0:
        options["window"] = int(rng.choice([1, 7, 33, 100, 600]))
        options["chunked"] = seed // 4 % 3 == 0
    if rng.integers(4) == 0:
        options["causal"] = False
    if rng.integers(4) == 0:
        options["softcap"] = float(rng.choice([1.5, 10.0, 50.0]))
    if rng.integers(4) == 0:
        options["head_sink"] = normal(num_heads) * 3
    if rng.integers(4) == 0:
        options |= {"q_norm": normal(head_size), "k_norm": normal(head_size), "epsilon": 1e-5}
    if rng.integers(3) == 0:
        options["metadata"] = np.array([max(new), longest, 0], np.int32)
    if rng.integers(5) == 0:
        options["slot_mapping"] = slots(rng, past, new, table, block_size)
    case = Case(
        name=f"latent seed {seed}",
        num_heads=num_heads,
        kv_heads=1,
        head_size=head_size,
        query=normal(tokens, num_heads, head_size),
        key=normal(tokens, 1, head_size),
        value=None,
        key_cache=cache_contents(rng, (num_blocks, block_size, 1, head_size), cache_type),
        value_cache=None,
        past_lengths=past,
        new_lengths=new,
        block_table=table,
        cache_type=cache_type,
        packed=False,
        layout=layout,
        latent=value_size,
        **options,
    )
    return drop_blocks_left_of_window(case) if rng.integers(2) else case


def latent_rotary(
    rng: np.random.Generator, head_size: int, value_size: int, positions: int
) -> dict[str, object]:
    """RoPE of what is behind the value, as models have it; of some channels if there is nothing."""
    behind = head_size - value_size
    if not behind or rng.integers(4) == 0:
        return rotary(rng, head_size, positions) if head_size > 16 else {}
    angles = np.outer(np.arange(positions), 0.1 ** np.arange(behind // 2))
    return {
        "rotary_offset": value_size,
        "interleaved": bool(rng.integers(2)),
        "cosine": np.cos(angles).astype(np.float32),
        "sine": np.sin(angles).astype(np.float32),
    }
