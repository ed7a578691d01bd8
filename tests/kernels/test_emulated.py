"""AMX's and AVX-VNNI's kernels where the processor has neither: their instructions are emulated."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnxport.providers.cpu.library import load_library
from tests.kernels.builds import build_library
from tests.kernels.test_isas import processor_flags

ROOT = Path(__file__).parents[2]
FILES = [
    "coarse",
    "expert_zeros",
    "experts",
    "float16_cache",
    "float_experts",
    "fp4_experts",
    "input_norm",
    "int4_cache",
    "int8_cache",
    "invariance",
    "latent",
    "linear",
    "lora",
    "matmul",
    "matmul_lora",
    "mlp",
    "mlp_lora",
    "random",
    "summaries",
]


def is_emulated(native: ctypes.CDLL) -> bool:
    """Whether an emulation tests what could not be tested otherwise.

    Where the processor has one of the sets, its own instructions are tested, not our emulation.
    """
    has_tiles = native.onnxport_cpu_set_isa(b"amx")
    has_vnni = native.onnxport_cpu_set_matmul_isa(b"avxvnni")
    native.onnxport_cpu_set_isa(None)
    native.onnxport_cpu_set_matmul_isa(None)
    return not has_tiles and not has_vnni


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it compiles all kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets are x86's")
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("cmake")), reason="needs g++, cmake")
def test_kernels(library: ctypes.CDLL) -> None:
    if not is_emulated(library):
        pytest.skip("this processor has these sets")
    if "avx2" not in (flags := processor_flags()):
        pytest.skip("this processor has no AVX2")
    path = build_library("emulated", "-DONNXPORT_EMULATE=ON")
    emulated = load_library(path)
    assert emulated.onnxport_cpu_set_matmul_isa(b"avxvnni")
    assert emulated.onnxport_cpu_set_isa(b"amx") == ({"avx512_bf16", "gfni"} <= flags)

    tests = [f"tests/kernels/test_{name}.py" for name in FILES]
    options = ["-m", "not slow", "--hypothesis-profile=fast", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, *options, "--kernels", str(path.parent)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
