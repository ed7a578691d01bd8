"""The samplers that this machine can run, for tests."""

from __future__ import annotations

import shutil
from types import ModuleType

import pytest

from onnxport.serving import numpy_sampler
from onnxport.serving.native.library import find_library
from onnxport.serving.native.sampler import NativeSampler

ISAS = ("portable", "avx2", "avx512")
Sampler = NativeSampler | ModuleType


def native(isa: str | None = None, num_threads: int = 1) -> NativeSampler:
    """The native sampler; skips the test where it cannot run."""
    path = find_library()
    if path is None:
        assert not (shutil.which("g++") and shutil.which("cmake")), "scripts/build_kernels.py"
        pytest.skip("the sampling library was not built: no compiler")
    try:
        return NativeSampler(path, isa, num_threads)
    except ValueError as reason:
        pytest.skip(str(reason))


def sampler_named(name: str) -> Sampler:
    """NumPy's sampler, or the native one with an instruction set."""
    return numpy_sampler if name == "numpy" else native(name)
