"""Random calls of PagedAttention that together cover its whole surface."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.kernels.reference import CACHE_TYPES, Case, quantize, quantize_int4

HEADS = [(1, 1), (4, 4), (4, 2), (8, 1), (14, 2), (6, 3), (9, 3), (12, 1)]
LAYOUTS = {
    "float": ("canonical", "tiled"),
    "float16": ("canonical", "tiled"),
    "bfloat16": ("canonical", "tiled", "paired"),
    "int8": ("tiled",),
    "int4": ("tiled",),
}
HEAD_SIZES = [32, 40, 64, 64, 72, 80, 96, 104, 112, 128, 256]


def lengths(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Past and new lengths: decode, prefill, chunks, or all of these in one batch."""
    kind = rng.integers(5)
    if kind == 0:
        batch = int(rng.integers(1, 6))
        return [int(rng.integers(0, 90)) for _ in range(batch)], [1] * batch
    if kind == 1:
        return [0], [int(rng.integers(1, 80))]
    if kind == 2:
        return [int(rng.integers(0, 70))], [int(rng.integers(2, 40))]
    if kind == 3:  # keys over several segments of 512
        return [int(rng.integers(500, 1300))], [int(rng.integers(1, 4))]
    batch = int(rng.integers(2, 7))
    new = [int(rng.choice([0, 1, 1, 3, 17, 33])) for _ in range(batch)]
    new[int(rng.integers(batch))] = int(rng.integers(1, 20))
    return [int(rng.choice([0, 1, 15, 16, 40, 63])) for _ in range(batch)], new


def cache_contents(rng: np.random.Generator, shape: tuple[int, ...], cache_type: str) -> np.ndarray:
    if cache_type == "int8":
        return quantize(rng.standard_normal(shape))
    if cache_type == "int4":
        return quantize_int4(rng.standard_normal(shape))
    return rng.standard_normal(shape).astype(CACHE_TYPES[cache_type])


def rotary(rng: np.random.Generator, head_size: int, positions: int) -> dict[str, object]:
    offset = int(rng.choice([0, 0, 8]))
    dim = int(rng.choice([head_size - offset, 16, 8]))
    angles = np.outer(np.arange(positions), 1.0 / 100.0 ** (np.arange(dim // 2) / (dim // 2)))
    return {
        "cosine": np.cos(angles).astype(np.float32),
        "sine": np.sin(angles).astype(np.float32),
        "interleaved": bool(rng.integers(2)),
        "rotary_offset": offset,
    }


def blocks(
    rng: np.random.Generator, past: list[int], new: list[int], block_size: int
) -> tuple[int, np.ndarray]:
    """A cache with spare blocks and a table that hands them out in random order.

    Entries that no key needs are out of range, so that using one is noticed.
    """
    needed = [-(-(p + n) // block_size) for p, n in zip(past, new, strict=True)]
    num_blocks = sum(needed) + int(rng.integers(1, 4))
    free = list(rng.permutation(num_blocks))
    table = np.full((len(past), max(needed) + int(rng.integers(0, 3))), 2**30, np.int32)
    for s, count in enumerate(needed):
        table[s, :count] = [free.pop() for _ in range(count)]
    return num_blocks, table


def drop_blocks_left_of_window(case: Case) -> Case:
    """Puts entries out of range that no query of the case sees: they may have been given away."""
    if case.window is None:
        return case
    table = case.block_table.copy()
    for s, past in enumerate(case.past_lengths):
        first = max(0, past - case.window + 1)
        if case.chunked:
            first = past // case.window * case.window
        table[s, : first // case.block_size] = -7
    return case.replace(block_table=table)


def random_case(seed: int, head_sizes: Sequence[int] = HEAD_SIZES) -> Case:
    rng = np.random.default_rng(seed)
    num_heads, kv_heads = HEADS[rng.integers(len(HEADS))]
    head_size = int(rng.choice(head_sizes))
    number, kind = divmod(seed, 4)
    cache_type = list(CACHE_TYPES)[kind + (kind == 3 and number % 2)]  # int8 and int4 by turns
    layout = LAYOUTS[cache_type][number % len(LAYOUTS[cache_type])]
    plain = layout == "canonical"
    block_size = int(rng.choice([8, 16, 24, 32, 64] if plain else [16, 32, 64]))
    past, new = lengths(rng)
    num_blocks, table = blocks(rng, past, new, block_size)
    tokens, longest = sum(new), max(p + n for p, n in zip(past, new, strict=True))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    options: dict[str, object] = {}
    if rng.integers(2):
        options |= rotary(rng, head_size, longest + int(rng.integers(0, 3)))
    if rng.integers(3) == 0:
        options["window"] = int(rng.choice([1, 2, 7, 16, 33, 100, 600]))
        options["chunked"] = seed // 4 % 3 == 0
    if rng.integers(4) == 0:
        options["causal"] = False
    if rng.integers(4) == 0:
        options["softcap"] = float(rng.choice([1.5, 10.0, 50.0]))
    if rng.integers(4) == 0:
        options["scale"] = float(rng.uniform(0.02, 0.3))
    if rng.integers(4) == 0:
        options["head_sink"] = normal(num_heads) * 3
    if rng.integers(4) == 0:
        options |= {"q_norm": normal(head_size), "k_norm": normal(head_size), "epsilon": 1e-5}
    if rng.integers(3) == 0:
        options["metadata"] = np.array([max(new), longest, 0], np.int32)
    if rng.integers(5) == 0:
        options["slot_mapping"] = slots(rng, past, new, table, block_size)

    shape = (num_blocks, block_size, kv_heads, head_size)
    case = Case(
        name=f"seed {seed}",
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        query=normal(tokens, num_heads, head_size),
        key=normal(tokens, kv_heads, head_size),
        value=normal(tokens, kv_heads, head_size),
        key_cache=cache_contents(rng, shape, cache_type),
        value_cache=cache_contents(rng, shape, cache_type),
        past_lengths=past,
        new_lengths=new,
        block_table=table,
        cache_type=cache_type,
        packed=bool(rng.integers(2)),
        layout=layout,
        **options,
    )
    return drop_blocks_left_of_window(case) if rng.integers(2) else case


def slots(
    rng: np.random.Generator, past: list[int], new: list[int], table: np.ndarray, block_size: int
) -> np.ndarray:
    """The derived slots, with about a third of the tokens left out of the cache."""
    out = []
    for s, count in enumerate(new):
        for position in range(past[s], past[s] + count):
            slot = table[s, position // block_size] * block_size + position % block_size
            out.append(-1 if rng.integers(3) == 0 else slot)
    return np.array(out, np.int32)
