"""Which instruction sets the libraries take: those that the processor has, and no others."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from onnxport.serving.native.library import find_library
from onnxport.serving.native.sampler import NativeSampler

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux",
    reason="asks Linux for the flags of x86",
)


def processor_flags() -> set[str]:
    """What Linux says that the processor has."""
    words = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0]
    return set(words.split())


def test_the_sets_that_this_processor_has(library: ctypes.CDLL) -> None:
    """None is lost from the build, and none is taken that would be an illegal instruction."""
    flags = processor_flags()
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = {*avx2, "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    bf16 = {*avx512, "avx512_vnni", "avx512_bf16"}
    amx = {*bf16, "amx_tile", "amx_int8", "amx_bf16", "gfni"}
    needed = {"avx2": avx2, "avx512": avx512, "avx512bf16": bf16, "amx": amx}
    taken = {isa: bool(library.onnxport_cpu_set_isa(isa.encode())) for isa in needed}
    assert taken == {isa: flags >= all_of for isa, all_of in needed.items()}
    library.onnxport_cpu_set_isa(None)
    needed = {
        "avx2": avx2,
        "avxvnni": {*avx2, "avx_vnni"},
        "avx512vnni": {*avx512, "avx512_vnni"},
        "amx": amx,
    }
    taken = {isa: bool(library.onnxport_cpu_set_matmul_isa(isa.encode())) for isa in needed}
    assert taken == {isa: flags >= all_of for isa, all_of in needed.items()}
    library.onnxport_cpu_set_matmul_isa(None)


def test_the_best_set_samples() -> None:
    path = find_library()
    if path is None:
        pytest.skip("the sampling library was not built")
    flags = processor_flags()
    sets = [isa for isa, flag in (("avx512", "avx512dq"), ("avx2", "f16c")) if flag in flags]
    assert NativeSampler(path).isa == [*sets, "portable"][0]
    assert {NativeSampler(path, isa).isa for isa in sets} == set(sets)
