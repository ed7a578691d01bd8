"""Rows of K/V from one type to another, against the kernel tests' reference."""

from __future__ import annotations

import numpy as np
import pytest

from onnxport.cache_rows import DTYPES, int4_head_size, row_bytes, row_elements
from onnxport.providers.rows import (
    convert,
    element_type,
    int4_rows,
    int8_rows,
    numbers_of,
    scales_of,
)
from tests.kernels import int4_rows as int4_reference
from tests.kernels import reference

SIZES = [8, 24, 32, 40, 64, 80, 128, 256]
TYPES = {dtype: np.dtype(element_type(dtype)) for dtype in DTYPES}


def random_rows(size: int, seed: int = 0) -> np.ndarray:
    """Numbers of many magnitudes, some that are no numbers, and zeros: [60, 3, size] float32."""
    random = np.random.default_rng(seed)
    exponents = random.uniform(-130, 126, (60, 3, 1))
    rows = random.uniform(-1, 1, (60, 3, size)) * np.exp2(exponents)
    rows[:20] += np.exp2(exponents[:20]) * random.uniform(-1, 1, (20, 3, 1))  # off their middle
    rows[20:30, :, :8] *= 1e-3  # groups of other magnitudes
    rows[30, 1, 3], rows[31, 2, 5], rows[32] = np.nan, -np.inf, 0
    return rows.astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_those_of_the_reference(size: int) -> None:
    rows = random_rows(size)
    assert int8_rows(rows).tobytes() == reference.quantize(rows).tobytes()
    assert int4_rows(rows).tobytes() == reference.quantize_int4(rows).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_those_of_the_reference(size: int) -> None:
    rows = random_rows(size)
    for stored, expected in (
        (int8_rows(rows), reference.dequantize(reference.quantize(rows))),
        (int4_rows(rows), int4_reference.dequantize(reference.quantize_int4(rows))),
    ):
        found = numbers_of(stored)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(scales_of(stored)[..., 0]), np.isnan(found[..., 0]))


@pytest.mark.parametrize("size", SIZES)
def test_int4_is_within_a_step_of_int8(size: int) -> None:
    rows = reference.quantize(random_rows(size))
    numbers = rows[..., :-4].astype(int)
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    packed = int4_reference.pack(rows[..., :-4], scale)
    _, steps, _, _ = int4_reference.split(packed)
    step = steps[..., np.arange(size) // 32]
    off = np.abs(int4_reference.numbers_of(packed) - numbers)
    assert np.all((off <= step // 2) | (off <= 7) | (off < step))
    assert np.mean(off <= (step + 1) // 2) > 0.95
    assert np.abs(int4_reference.numbers_of(packed)).max() <= 127


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("source", TYPES)
def test_any_type_becomes_any_other(source: str, to: str) -> None:
    rows = np.random.default_rng(1).standard_normal((5, 2, 40)).astype(np.float32)
    stored = convert(rows, TYPES[source])
    assert stored.shape == (5, 2, row_elements(source, 40))
    found = convert(stored, TYPES[to])
    assert (found.dtype, found.shape) == (TYPES[to], (5, 2, row_elements(to, 40)))
    if source == to:
        assert found is stored
    known = convert(stored, np.float32)
    error = np.abs(convert(found, np.float32) - known).max()
    assert error <= {"int4": 0.35, "int8": 0.03}.get(to, 0.02)


def test_int8_that_was_read_is_written_as_it_was() -> None:
    stored = int8_rows(random_rows(64))
    assert convert(convert(stored, np.float32), np.int8).tobytes() == stored.tobytes()


def test_sizes_of_rows() -> None:
    assert [row_bytes(dtype, 64) for dtype in DTYPES] == [256, 128, 128, 68, 40]
    for size in range(8, 257, 8):
        assert int4_head_size(row_elements("int4", size)) == size
        assert int4_reference.row_bytes(size) == row_elements("int4", size)
    assert int4_head_size(41) is None
    assert int4_head_size(0) is None
