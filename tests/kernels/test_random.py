"""Random cases through ONNX Runtime, with every instruction set of this processor."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.kernels import run_ort
from tests.kernels.cases import random_case
from tests.kernels.checks import check
from tests.tiers import every

NUM_CASES = 320
GROUP = 16


@pytest.mark.parametrize("first", every(2, range(0, 16, 8)))
def test_the_largest_heads(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], first: int
) -> None:
    for seed in range(first, first + 8):
        case = random_case(seed, [264, 480, 512])
        for isa in available_isas:
            assert library.onnxport_cpu_set_isa(isa.encode())
            check(case, run_ort.run(library_path, case))


@pytest.mark.parametrize("first", every(10, range(0, NUM_CASES, GROUP)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], first: int
) -> None:
    for seed in range(first, first + GROUP):
        case = random_case(seed)
        for isa in available_isas:
            assert library.onnxport_cpu_set_isa(isa.encode())
            check(case, run_ort.run(library_path, case))
