"""An int8 cache: what is stored of any number, and that storing what was read changes nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import run_ort
from tests.kernels.reference import Case, attend, dequantize, quantize, to_tiled, write_cache

HEADS, SIZE, BLOCK = 2, 40, 16
LARGEST, NORMAL = np.finfo(np.float32).max, np.finfo(np.float32).tiny
Store = Callable[[np.ndarray], np.ndarray]


def case_of(value: np.ndarray, new: list[int]) -> Case:
    """Sequences of `new` tokens, keys and values both `value` [tokens, HEADS, SIZE]."""
    needed = [-(-count // BLOCK) for count in new]
    table = np.zeros((len(new), max(needed)), np.int32)
    for row, count in enumerate(needed):
        table[row, :count] = range(sum(needed[:row]), sum(needed[: row + 1]))
    cache = np.zeros((sum(needed), BLOCK, HEADS, SIZE + 4), np.int8)
    return Case(
        num_heads=HEADS,
        kv_heads=HEADS,
        head_size=SIZE,
        query=np.full((len(value), HEADS, SIZE), 1e-3, np.float32),
        key=value,
        value=value,
        key_cache=cache,
        value_cache=cache,
        past_lengths=[0] * len(new),
        new_lengths=new,
        block_table=table,
        cache_type="int8",
        layout="tiled",
    )


@pytest.fixture
def stores(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> list[tuple[str, Store]]:
    """Each instruction set's way to store rows [n, HEADS, SIZE]; returns those of its caches."""

    def store(isa: str, value: np.ndarray) -> np.ndarray:
        assert library.onnxport_cpu_set_isa(isa.encode())
        _, keys, values = run_ort.run(library_path, case_of(value, [len(value)]))
        rows = [cache.reshape(-1, HEADS, SIZE + 4)[: len(value)] for cache in (keys, values)]
        assert rows[0].tobytes() == rows[1].tobytes(), isa
        return rows[0]

    return [(isa, lambda value, isa=isa: store(isa, value)) for isa in available_isas]


def extreme_rows() -> np.ndarray:
    """[n, HEADS, SIZE] of magnitudes from 0 to the largest, and of what is not finite."""
    random = np.random.default_rng(0)
    magnitudes = [0, 1e-45, 1e-40, NORMAL, 126 * NORMAL, 127 * NORMAL, 128 * NORMAL, 1, 1e30]
    magnitudes += [LARGEST / 2, np.nextafter(LARGEST, np.float32(0)), LARGEST]
    rows = []
    for magnitude in np.array(magnitudes, np.float32):
        row = (random.uniform(-1, 1, (HEADS, SIZE)) * magnitude).astype(np.float32)
        row[0, 7], row[1, -1] = magnitude, -magnitude
        rows.append(row)
    for special in (np.nan, np.inf, -np.inf):
        row = random.standard_normal((HEADS, SIZE)).astype(np.float32)
        row[1, 3] = special
        rows.append(row)
    return np.stack(rows)


def test_any_number_is_stored_as_the_reference_says(stores: list[tuple[str, Store]]) -> None:
    rows = extreme_rows()
    expected = quantize(rows)
    for isa, store in stores:
        assert store(rows).tobytes() == expected.tobytes(), isa
    # and what the reference says is near: within half a step, or what a float32 cannot scale
    finite = np.isfinite(rows).all(axis=-1)
    step = np.abs(rows).max(axis=-1, keepdims=True) / 127
    error = np.abs(dequantize(expected) - rows)[finite]
    assert (error <= np.maximum(0.5001 * step[finite], 127 * NORMAL)).all()
    assert np.isnan(dequantize(expected)[~finite]).all()


def test_storing_what_was_read_changes_no_byte(stores: list[tuple[str, Store]]) -> None:
    random = np.random.default_rng(1)
    exponents = random.uniform(-130, 127, (3000, HEADS, 1))
    rows = (random.standard_normal((3000, HEADS, SIZE)) * np.exp2(exponents - 2)).astype(np.float32)
    rows = np.concatenate([rows, extreme_rows()])
    stored = quantize(rows)
    read = dequantize(stored)
    assert np.array_equal(read, read.astype(np.float32), equal_nan=True), "reading is not exact"
    assert quantize(read).tobytes() == stored.tobytes()
    for isa, store in stores:
        assert store(read.astype(np.float32)).tobytes() == stored.tobytes(), isa


def test_what_is_not_finite_reaches_those_alone_that_see_it(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    value = np.random.default_rng(2).standard_normal((60, HEADS, SIZE)).astype(np.float32)
    value[5, 0, 9] = np.nan  # of the first sequence, one head
    value[19, 1, 0] = np.inf  # its last token, the other head
    case = case_of(value, [20, 40])
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        output, keys, values = run_ort.run(library_path, case)
        found = output.reshape(60, HEADS, SIZE)
        assert np.isnan(found[5:20, 0]).all(), isa
        assert np.isnan(found[19, 1]).all(), isa
        with np.errstate(invalid="ignore"):
            expected = attend(case, keys, values)
        np.testing.assert_allclose(output[20:], expected[20:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_rounding_queries_and_weights_costs_no_more_than_the_cache(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], size: int
) -> None:
    random = np.random.default_rng(size)
    tokens, heads = 300, 2
    query, key, value = random.standard_normal((3, tokens, heads, size)).astype(np.float32)
    table = np.arange(-(-tokens // BLOCK), dtype=np.int32)[None]
    cache = np.zeros((table.size, BLOCK, heads, size), np.float32)
    exact = Case(
        num_heads=heads,
        kv_heads=heads,
        head_size=size,
        query=2 * query,
        key=key,
        value=value,
        key_cache=cache,
        value_cache=cache,
        past_lengths=[0],
        new_lengths=[tokens],
        block_table=table,
    )
    empty = np.zeros((*cache.shape[:3], size + 4), np.int8)
    small = exact.replace(key_cache=empty, value_cache=empty, cache_type="int8", layout="tiled")
    plain = attend(exact, *write_cache(exact))
    stored = [dequantize(part) for part in write_cache(small)]
    cached = attend(exact, *stored)  # with the cache's rounding alone
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        output, _, _ = run_ort.run(library_path, small)
        own = np.sqrt(np.mean((output - cached) ** 2))
        of_cache = np.sqrt(np.mean((cached - plain) ** 2))
        assert own < 1.6 * of_cache, (isa, own, of_cache)
        assert of_cache < 0.02 * np.sqrt(np.mean(plain**2)), isa


def test_a_tile_is_numbers_and_then_scales() -> None:
    rows = quantize(np.random.default_rng(3).standard_normal((2, 32, HEADS, SIZE)))
    scale = np.ascontiguousarray(rows[1, 17, 1, -4:]).view(np.float32)[0]
    start = ((HEADS + 1) * 32 + 16) * (SIZE + 4)  # of the second tile of the second head
    for key in (True, False):
        flat = to_tiled(rows, key).reshape(-1)
        tile = flat[start : start + 16 * (SIZE + 4)]
        numbers = tile[: 16 * SIZE].reshape((SIZE // 4, 16, 4) if key else (4, SIZE, 4))
        token = numbers[:, 1].reshape(-1) if key else numbers[0, :, 1]
        assert (token == rows[1, 17, 1, :SIZE]).all()
        assert tile[16 * SIZE :].view(np.float32)[1] == scale
