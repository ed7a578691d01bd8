"""An int4 cache: what is stored of any number, and how far that moves what attention gives."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import int4_rows, run_ort
from tests.kernels.reference import Case, attend, decode, quantize_int4, write_cache
from tests.kernels.test_int8_cache import BLOCK, HEADS, SIZE, case_of, extreme_rows

ROW = int4_rows.row_bytes(SIZE)


def int4_case(value: np.ndarray, new: list[int]) -> Case:
    case = case_of(value, new)
    cache = np.zeros((*case.key_cache.shape[:3], ROW), np.uint8)
    return case.replace(key_cache=cache, value_cache=cache, cache_type="int4")


def awkward_rows() -> np.ndarray:
    """[n, HEADS, SIZE]: each spread of an int8, from either end, and groups far off zero."""
    rows = [*extreme_rows()]
    for spread in range(255):
        numbers = np.zeros((HEADS, SIZE))
        numbers[0, :32] = np.linspace(-127, spread - 127, 32)
        numbers[1, :32] = np.linspace(127 - spread, 127, 32)
        numbers[:, 32:] = 127, 100, 100, 100, 101, 102, 103, -127
        rows.append(numbers.astype(np.float32) / 64)
    return np.stack(rows)


def test_any_number_is_stored_as_the_reference_says(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    rows = awkward_rows()
    expected = quantize_int4(rows)
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        _, keys, values = run_ort.run(library_path, int4_case(rows, [len(rows)]))
        for cache in (keys, values):
            assert cache.reshape(-1, HEADS, ROW)[: len(rows)].tobytes() == expected.tobytes(), isa


def test_tokens_are_written_alone(library_path: Path, library: ctypes.CDLL) -> None:
    """A tile's bytes are those of tokens that were there, whoever is written beside them."""
    rows = np.random.default_rng(0).standard_normal((2 * BLOCK, HEADS, SIZE)).astype(np.float32)
    whole = int4_case(rows, [2 * BLOCK])
    _, keys, values = run_ort.run(library_path, whole)
    found_keys, found_values = whole.key_cache, whole.value_cache
    for token in np.random.default_rng(1).permutation(2 * BLOCK):
        one = int4_case(rows[token : token + 1], [1]).replace(
            key_cache=found_keys,
            value_cache=found_values,
            past_lengths=[int(token)],
            block_table=whole.block_table,
        )
        _, found_keys, found_values = run_ort.run(library_path, one)
    assert found_keys.tobytes() == keys.tobytes()
    assert found_values.tobytes() == values.tobytes()


@pytest.mark.parametrize("size", [32, 40, 64, 72, 128])
def test_attention_is_that_of_the_numbers_that_are_stored(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], size: int
) -> None:
    random = np.random.default_rng(size)
    tokens, heads = 300, 2
    query, key, value = random.standard_normal((3, tokens, heads, size)).astype(np.float32)
    key += 2 * random.standard_normal((1, heads, size)).astype(np.float32)  # as keys have them
    table = np.arange(-(-tokens // BLOCK), dtype=np.int32)[None]
    cache = np.zeros((table.size, BLOCK, heads, size), np.float32)
    exact = Case(
        num_heads=heads,
        kv_heads=heads,
        head_size=size,
        query=query,
        key=key,
        value=value,
        key_cache=cache,
        value_cache=cache,
        past_lengths=[0],
        new_lengths=[tokens],
        block_table=table,
    )
    empty = np.zeros((*cache.shape[:3], int4_rows.row_bytes(size)), np.uint8)
    small = exact.replace(key_cache=empty, value_cache=empty, cache_type="int4", layout="tiled")
    plain = attend(exact, *write_cache(exact))
    stored = [decode(small, part) for part in write_cache(small)]
    cached = attend(exact, *stored)  # with the cache's rounding alone
    of_cache = np.sqrt(np.mean((cached - plain) ** 2))
    assert of_cache < 0.2 * np.sqrt(np.mean(plain**2))
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        output, _, _ = run_ort.run(library_path, small)
        own = np.sqrt(np.mean((output - cached) ** 2))
        assert own < 0.2 * of_cache, (isa, own, of_cache)
