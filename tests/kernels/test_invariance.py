"""A sequence's result does not depend, in a single bit, on anything but that sequence."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import run_ort
from tests.kernels.cases import cache_contents, random_case
from tests.kernels.checks import check
from tests.kernels.reference import Case
from tests.tiers import crossed, every, examples

BLOCK_SIZE = 16


def case_of(
    rng: np.random.Generator,
    past: list[int],
    new: list[int],
    table: np.ndarray,
    *,
    kind: tuple[str, str],
    heads: tuple[int, int] = (2, 3),
    window: int | None = None,
) -> Case:
    """A case of sequences whose blocks are known.

    Args:
        rng: what it holds.
        past: tokens of each that are in the cache.
        new: others.
        table: blocks of each, whose numbers leave none out.
        kind: type and layout of the cache.
        heads: KV heads, and query heads of each.
        window: of keys; None: all.
    """
    cache_type, layout = kind
    kv_heads, group = heads
    head_size, tokens = 64, sum(new)
    shape = (int(table.max()) + 1, BLOCK_SIZE, kv_heads, head_size)

    def normal(heads: int) -> np.ndarray:
        return rng.standard_normal((tokens, heads, head_size)).astype(np.float32)

    return Case(
        num_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=head_size,
        query=normal(kv_heads * group),
        key=normal(kv_heads),
        value=normal(kv_heads),
        key_cache=cache_contents(rng, shape, cache_type),
        value_cache=cache_contents(rng, shape, cache_type),
        past_lengths=past,
        new_lengths=new,
        block_table=table,
        cache_type=cache_type,
        layout=layout,
        window=window,
    )


def blocks_of(past: list[int], new: list[int]) -> list[int]:
    """How many blocks each sequence needs."""
    return [-(-(p + n) // BLOCK_SIZE) for p, n in zip(past, new, strict=True)]


def mixed_case(seed: int, cache_type: str, layout: str, heads: tuple[int, int] = (2, 3)) -> Case:
    """A long decode, a prefill, a chunk and a sequence without new tokens."""
    rng = np.random.default_rng(seed)
    past, new = [1400, 0, 530, 9], [1, 70, 40, 0]
    needed = blocks_of(past, new)
    free = list(rng.permutation(sum(needed)))
    table = np.zeros((4, max(needed)), np.int32)
    for s, count in enumerate(needed):
        table[s, :count] = [free.pop() for _ in range(count)]
    window = 600 if seed % 2 else None
    return case_of(rng, past, new, table, kind=(cache_type, layout), heads=heads, window=window)


def tokens_of(case: Case, s: int, first: int, last: int) -> Case:
    """Sequence s alone, with its new tokens [first, last) only; those before are in the cache."""
    start = int(case.cumulative_lengths[s])
    part = slice(start + first, start + last)
    return case.replace(
        query=case.query[part],
        key=case.key[part],
        value=None if case.value is None else case.value[part],
        past_lengths=[case.past_lengths[s] + first],
        new_lengths=[last - first],
        block_table=case.block_table[s : s + 1],
    )


def with_own_blocks(case: Case) -> Case:
    """One sequence in a cache of nothing but its blocks, in their order."""
    [count] = blocks_of(case.past_lengths, case.new_lengths)
    own = case.block_table[0, :count]
    return case.replace(
        key_cache=case.key_cache[own],
        value_cache=None if case.value_cache is None else case.value_cache[own],
        block_table=np.arange(count, dtype=np.int32)[None],
    )


def computed(
    library_path: Path, library: ctypes.CDLL, isa: str, case: Case
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """What comes of a case with an instruction set, which is right, on two threads as on one."""
    library.onnxport_cpu_set_isa(isa.encode())
    found = run_ort.run(library_path, case)
    check(case, found)
    assert found[0].tobytes() == run_ort.run(library_path, case, threads=1)[0].tobytes()
    return found


@contextmanager
def most_floats(library: ctypes.CDLL, floats: int) -> Iterator[None]:
    """Let the parts of divided sequences take so many floats, for a while."""
    before = library.onnxport_cpu_set_most_state_floats(floats)
    try:
        yield
    finally:
        library.onnxport_cpu_set_most_state_floats(before)


@pytest.mark.parametrize(
    "kind", [("float", "tiled"), ("int8", "tiled"), ("int4", "tiled"), ("bfloat16", "paired")]
)
def test_sequences_that_are_divided_or_not(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], kind: tuple[str, str]
) -> None:
    """Along their keys, as far as memory is meant for that: a part of them, all, or none."""
    rng = np.random.default_rng(3)
    past, new = [2300, 1500, 1100], [33, 1, 12]  # 80k, 2k and 18k floats, if they are divided
    needed = blocks_of(past, new)
    table = np.zeros((3, max(needed)), np.int32)
    numbers = iter(rng.permutation(sum(needed)))
    for s, count in enumerate(needed):
        table[s, :count] = [next(numbers) for _ in range(count)]
    case = case_of(rng, past, new, table, kind=kind)
    for isa in available_isas:
        library.onnxport_cpu_set_isa(isa.encode())
        whole = run_ort.run(library_path, case, threads=2)[0].tobytes()
        for floats in (0, 3_000, 90_000, 1 << 40):
            with most_floats(library, floats):
                assert run_ort.run(library_path, case, threads=2)[0].tobytes() == whole


def check_each_alone(library_path: Path, library: ctypes.CDLL, isa: str, case: Case) -> None:
    """Compute a case, and assert that each of its sequences gets the bits it has alone."""
    whole, _, _ = computed(library_path, library, isa, case)
    starts = case.cumulative_lengths
    for s, count in enumerate(case.new_lengths):
        if count:
            one = with_own_blocks(tokens_of(case, s, 0, count))
            alone = run_ort.run(library_path, one)[0]
            assert alone.tobytes() == whole[starts[s] : starts[s + 1]].tobytes(), (isa, s)


KINDS = [
    ("float", "tiled"),
    ("float", "canonical"),
    ("float16", "tiled"),
    ("bfloat16", "tiled"),
    ("bfloat16", "canonical"),
    ("bfloat16", "paired"),
    ("int8", "tiled"),
    ("int4", "tiled"),
]


def check_in_chunks(library_path: Path, library: ctypes.CDLL, isa: str, case: Case) -> None:
    """Compute a case, and assert that its sequences get the same bits alone and in chunks."""
    starts = case.cumulative_lengths
    whole, keys, values = computed(library_path, library, isa, case)
    for s, count in enumerate(case.new_lengths):
        state, parts = with_own_blocks(tokens_of(case, s, 0, count)), []
        # Parts of one group of rows, of a few, which are read as they lie in the cache, and of
        # many, for which the cache is converted first.
        third = count // 3
        cuts = sorted({0, third, third + 1, third + 4, count} if count > 2 else {0, count})
        for first, last in pairwise(cuts):
            part = tokens_of(state, 0, first, last)
            output, key_cache, value_cache = run_ort.run(library_path, part)
            state = state.replace(key_cache=key_cache, value_cache=value_cache)
            parts.append(output)
        if parts:
            alone = np.concatenate(parts)
            assert alone.tobytes() == whole[starts[s] : starts[s + 1]].tobytes(), (isa, s)
    assert not np.array_equal(keys, case.key_cache)
    assert case.latent or not np.array_equal(values, case.value_cache)


@pytest.mark.parametrize(("cache_type", "layout"), KINDS)
@pytest.mark.parametrize("seed", every(2, [0, 1]))
def test_batch_chunks_and_threads(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    cache_type: str,
    layout: str,
    seed: int,
) -> None:
    case = mixed_case(seed, cache_type, layout)
    for isa in available_isas:
        check_in_chunks(library_path, library, isa, case)


def sharing_case(seed: int, cache_type: str, layout: str) -> Case:
    """Sequences that begin with the same blocks: four, of which one shares less, and two."""
    rng = np.random.default_rng(seed)
    past = [1100, 1090, 1030, 700, 40, 1200, 1199, 1024]
    new = [1, 2, 1, 1, 1, 1, 3, 0]
    shared = [1088, 1088, 1024, 512, 0, 1040, 1040, 0]  # tokens, of the first one of each prefix
    leader = [0, 0, 0, 0, 4, 5, 5, 7]
    needed = blocks_of(past, new)
    free = list(rng.permutation(sum(needed)))
    table = np.zeros((len(past), max(needed)), np.int32)
    for s, count in enumerate(needed):
        own = 0 if leader[s] == s else shared[s] // BLOCK_SIZE
        table[s, :own] = table[leader[s], :own]
        table[s, own:count] = [free.pop() for _ in range(own, count)]
    heads = [(2, 3), (1, 14)][seed // 2 % 2]
    window = 1095 if seed % 2 else None  # the longer ones see no longer what they share
    return case_of(rng, past, new, table, kind=(cache_type, layout), heads=heads, window=window)


@pytest.mark.parametrize(("kind", "seed"), crossed(4, KINDS, [0, 3, 1, 2]))
def test_sequences_that_share_blocks(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    kind: tuple[str, str],
    seed: int,
) -> None:
    """Their rows go together over the keys they share, and get the bits they have alone."""
    case = sharing_case(seed, *kind)
    for isa in available_isas:
        check_each_alone(library_path, library, isa, case)


@pytest.mark.parametrize(
    ("kind", "seed"), [(("int8", "tiled"), 0), (("float", "tiled"), 3), (("bfloat16", "paired"), 2)]
)
def test_shared_blocks_in_turns(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    kind: tuple[str, str],
    seed: int,
) -> None:
    """Heads come one after the other where there is little memory, to the same bits."""
    case = sharing_case(seed, *kind)
    for isa in available_isas:
        library.onnxport_cpu_set_isa(isa.encode())
        whole = run_ort.run(library_path, case, threads=2)[0].tobytes()
        # A head of the first sequences takes 13,000 to 61,000 floats, one of the others 6,000 up.
        for floats in (0, 10_000, 40_000, 70_000):
            with most_floats(library, floats):
                assert run_ort.run(library_path, case, threads=2)[0].tobytes() == whole, floats


def many_case(seed: int, cache_type: str, layout: str) -> Case:
    """So many sequences of few rows, and one of more, that heads take turns: 3 and 2 of 5."""
    rng = np.random.default_rng(seed)
    count = -(-24 * (os.cpu_count() or 1) // 5) + 1
    past = [int(n) for n in rng.integers(0, 1300, count)]
    new = [int(n) for n in rng.integers(1, 4, count - 1)] + [9]
    past[:2] = [512, 1023]  # a segment ends with the first row, and with the new token
    needed = blocks_of(past, new)
    free = list(rng.permutation(sum(needed)))
    table = np.zeros((count, max(needed)), np.int32)
    for s, blocks in enumerate(needed):
        table[s, :blocks] = [free.pop() for _ in range(blocks)]
    window = 600 if seed % 2 else None
    return case_of(rng, past, new, table, kind=(cache_type, layout), heads=(5, 3), window=window)


@pytest.mark.parametrize(("kind", "seed"), crossed(3, KINDS, [0, 1]))
def test_heads_that_take_turns(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    kind: tuple[str, str],
    seed: int,
) -> None:
    """In a batch of many sequences they do, and alone they do not."""
    case = many_case(seed, *kind)
    for isa in available_isas:
        check_each_alone(library_path, library, isa, case)


def test_concurrent_sessions(library_path: Path) -> None:
    cases = [random_case(seed) for seed in range(24)]
    alone = [run_ort.run(library_path, case) for case in cases]

    def repeat(i: int) -> bool:
        case, expected = cases[i], alone[i]
        return all(
            all(a.tobytes() == b.tobytes() for a, b in zip(expected, found, strict=True))
            for found in (run_ort.run(library_path, case) for _ in range(examples(12)))
        )

    with ThreadPoolExecutor(6) as executor:
        assert all(executor.map(repeat, range(len(cases))))


@pytest.mark.parametrize("seed", range(8))
def test_outputs_with_memory_of_their_own(library_path: Path, seed: int) -> None:
    case = random_case(seed)
    before = case.key_cache.copy()
    in_place = run_ort.run(library_path, case)
    apart = run_ort.run(library_path, case, in_place=False)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(in_place, apart, strict=True))
    assert case.key_cache.tobytes() == before.tobytes()
