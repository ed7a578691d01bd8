"""Keys that are no numbers: whoever attends to them gets none either."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import run_ort
from tests.kernels.test_invariance import BLOCK_SIZE, blocks_of, case_of

PAST = 520  # a whole segment of keys and some more


@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("cache_type", ["float", "bfloat16"])
@pytest.mark.parametrize("new", [1, 2])
def test_a_key_that_is_no_number_is_not_passed_over(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    cache_type: str,
    softcap: float,
    new: int,
) -> None:
    """Wherever it is, alone in its segment or in a register of others."""
    table = np.arange(blocks_of([PAST], [new])[0], dtype=np.int32)[None]
    case = case_of(np.random.default_rng(0), [PAST], [new], table, kind=(cache_type, "tiled"))
    case = case.replace(softcap=softcap)
    for isa in available_isas:
        library.onnxport_cpu_set_isa(isa.encode())
        assert np.isfinite(run_ort.run(library_path, case)[0]).all()
        for token in (0, 2, 15, 63, 64, 511, 512, 513, 515, 518, 519):
            key_cache = case.key_cache.copy()
            key_cache[token // BLOCK_SIZE, token % BLOCK_SIZE] = np.nan
            found = run_ort.run(library_path, case.replace(key_cache=key_cache))[0]
            assert np.isnan(found).all(), (isa, token)


def test_a_window_hides_it(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    table = np.arange(blocks_of([PAST], [1])[0], dtype=np.int32)[None]
    kind = ("float", "tiled")
    case = case_of(np.random.default_rng(0), [PAST], [1], table, kind=kind, window=4)
    key_cache = case.key_cache.copy()
    key_cache[500 // BLOCK_SIZE, 500 % BLOCK_SIZE] = np.nan
    for isa in available_isas:
        library.onnxport_cpu_set_isa(isa.encode())
        found = run_ort.run(library_path, case.replace(key_cache=key_cache))[0]
        assert found.tobytes() == run_ort.run(library_path, case)[0].tobytes()
