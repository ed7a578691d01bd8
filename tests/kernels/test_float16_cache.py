"""A float16 cache of numbers that float16 cannot hold."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import run_ort
from tests.kernels.reference import Case

HEADS, SIZE, BLOCK, TOKENS = 2, 24, 16, 20
MOST = np.float32(65504)
# At and around the ends of float16's range, and of what rounds into it.
ENDS = [65504.0, 65519.0, 65520.0, 65536.0, 1e6, 3.4e38, 2.0**-14, 2.0**-24, 2.0**-25, 1e-30, 0.0]


def case_of(rows: np.ndarray, layout: str) -> Case:
    """One sequence whose keys and values are rows [TOKENS, HEADS, SIZE] float32."""
    blocks = -(-TOKENS // BLOCK)
    cache = np.zeros((blocks, BLOCK, HEADS, SIZE), np.float16)
    return Case(
        num_heads=HEADS,
        kv_heads=HEADS,
        head_size=SIZE,
        query=np.full(rows.shape, 1e-6, np.float32),
        key=rows,
        value=rows,
        key_cache=cache,
        value_cache=cache,
        past_lengths=[0],
        new_lengths=[TOKENS],
        block_table=np.arange(blocks, dtype=np.int32)[None],
        cache_type="float16",
        layout=layout,
    )


def stored(cache: np.ndarray) -> np.ndarray:
    return cache.reshape(-1, HEADS, SIZE)[:TOKENS]


@pytest.mark.parametrize("layout", ["tiled", "canonical"])
def test_what_is_finite_stays_finite(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], layout: str
) -> None:
    rng = np.random.default_rng(0)
    signs = rng.choice(np.float32([-1, 1]), (TOKENS, HEADS, SIZE))
    rows = signs * rng.choice(np.float32(ENDS), signs.shape)
    expected = np.clip(rows, -MOST, MOST).astype(np.float16)
    assert (np.abs(expected) == MOST).any()
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        output, keys, values = run_ort.run(library_path, case_of(rows, layout))
        assert stored(keys).tobytes() == expected.tobytes(), isa
        assert stored(values).tobytes() == expected.tobytes(), isa
        assert np.isfinite(output).all(), isa


@pytest.mark.parametrize("what", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], what: float
) -> None:
    rows = np.ones((TOKENS, HEADS, SIZE), np.float32)
    rows[-1, 0, 3] = what
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        output, keys, values = run_ort.run(library_path, case_of(rows, "tiled"))
        for cache in (keys, values):
            np.testing.assert_array_equal(stored(cache), rows.astype(np.float16), isa)
        assert not np.isfinite(output.reshape(TOKENS, HEADS, SIZE)[-1, 0]).all(), isa
