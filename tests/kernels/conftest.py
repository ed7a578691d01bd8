from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxport.providers.cpu.library import find_library, load_library

ISAS = ("amx", "avx512bf16", "avx512", "avx2", "neon", "portable")


@pytest.fixture(scope="session")
def library_path() -> Path:
    path = find_library()
    if path is None:
        pytest.skip("the CPU operator library was not built")
    return path


@pytest.fixture(scope="session")
def library(library_path: Path) -> ctypes.CDLL:
    return load_library(library_path)


@pytest.fixture
def available_isas(library: ctypes.CDLL) -> Iterator[list[str]]:
    """The instruction sets that this processor runs; the best one is in use again afterwards."""
    yield [isa for isa in ISAS if library.onnxport_cpu_set_isa(isa.encode())]
    library.onnxport_cpu_set_isa(None)
