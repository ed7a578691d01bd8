"""The operator under sanitizers of memory and behaviour, and its core under that of threads."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnxport.providers.cpu.library import matmul_isa
from tests.kernels import (
    coarse_cases,
    experts_cases,
    latent_cases,
    matmul_standalone,
    mlp_cases,
    norm_cases,
    standalone,
)
from tests.kernels.builds import build_library
from tests.kernels.cases import random_case
from tests.kernels.checks import check
from tests.kernels.test_emulated import is_emulated
from tests.kernels.test_float_experts import check_standalone

ROOT = Path(__file__).parents[2]
NUM_CASES = 200


def runtime(name: str) -> str:
    """The path of one of g++'s sanitizer libraries, or the bare name where it has none."""
    done = subprocess.run(
        ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it compiles all kernels
@pytest.mark.skipif(platform.system() != "Linux", reason="preloads the sanitizer as Linux does")
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("cmake")), reason="needs g++, cmake")
def test_random_cases_sanitized(library: ctypes.CDLL) -> None:
    preload = [runtime("libasan.so"), runtime("libubsan.so")]
    if not all(os.path.isabs(path) for path in preload):
        pytest.skip("g++ has no sanitizer libraries")
    emulate = "ON" if is_emulated(library) else "OFF"
    path = build_library("sanitized", "-DONNXPORT_SANITIZE=ON", f"-DONNXPORT_EMULATE={emulate}")
    command = [sys.executable, "-m", "tests.kernels.sanitized"]
    done = subprocess.run(
        [*command, str(path), str(NUM_CASES)],
        cwd=ROOT,
        # Python and its extensions keep memory until they exit, which is no leak of ours.
        env=os.environ | {"LD_PRELOAD": ":".join(preload), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_CASES} cases" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="needs g++'s ThreadSanitizer")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_threads_of_experts_in_floats_sanitized(tmp_path: Path) -> None:
    """The same for experts whose weights are floats."""
    if not os.path.isabs(runtime("libtsan.so")):
        pytest.skip("g++ has no ThreadSanitizer library")
    sets = {"portable": ""}
    if matmul_isa() is not None and platform.machine() == "x86_64":
        sets["avx2"] = "-mavx2 -mfma -mf16c"
    flags = dict.fromkeys(["kernels_avx2", "matmul_avx2", "summary_avx2"], sets.get("avx2", ""))
    options = ("-fsanitize=thread", "-g1")
    driver = matmul_standalone.build(
        "g++", tmp_path, flags, *options, driver="float_experts_driver"
    )
    for isa in sets:
        check_standalone([str(driver)], isa)


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="needs g++'s ThreadSanitizer")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_feed_forward_threads_sanitized(tmp_path: Path) -> None:
    """The same for products, the layers that are made of them, and products of few outputs."""
    if not os.path.isabs(runtime("libtsan.so")):
        pytest.skip("g++ has no ThreadSanitizer library")
    if matmul_isa() is None or platform.machine() != "x86_64":
        pytest.skip("needs an x86 processor with AVX2")
    flags = dict.fromkeys(["matmul_avx2", "summary_avx2"], "-mavx2 -mfma -mf16c")
    driver = matmul_standalone.build("g++", tmp_path, flags, "-fsanitize=thread", "-g1")
    cases = [mlp_cases.random_case(seed) for seed in range(NUM_CASES // 4)]
    outputs = matmul_standalone.run_layers([str(driver)], ["avx2", "portable"], cases)
    for case, found in zip(cases, outputs, strict=True):
        mlp_cases.check(case, found)
    normed = [(case, norm_cases.random_norm(seed, case.x)) for seed, case in enumerate(cases)]
    with_norms = matmul_standalone.run_normalized_layers(
        [str(driver)], ["avx2", "portable"], normed
    )
    for (case, norm), residual in zip(normed, with_norms[1::2], strict=True):
        assert residual.tobytes() == (case.x + norm.skip).tobytes()

    experts = [experts_cases.random_case(s).replace(half=False) for s in range(NUM_CASES // 8)]
    found_sums = matmul_standalone.run_experts([str(driver)], ["avx2", "portable"], experts)
    for of, found in zip(experts, found_sums, strict=True):
        layers = experts_cases.layers_of(of)
        outputs = matmul_standalone.run_layers([str(driver)], ["avx2", "portable"], layers)
        assert found.tobytes() == experts_cases.add_up(of, outputs).tobytes()
    biased = experts_cases.case_with_extras()
    (found,) = matmul_standalone.run_experts([str(driver)], ["avx2", "portable"], [biased])
    experts_cases.check(biased, found)

    coarse = [
        coarse_cases.with_calls(coarse_cases.gaussian_case(s, 1500, 128, 2), s) for s in (1, 2)
    ]
    whole = matmul_standalone.run([str(driver)], "avx2", [case for case, _ in coarse])
    for at_once in (False, True):
        found = matmul_standalone.run_coarse([str(driver)], "avx2", coarse, at_once)
        for (_, calls), outputs, wanted in zip(coarse, found, whole, strict=True):
            for asked, output in zip(calls, outputs, strict=True):
                coarse_cases.check(output, wanted, *asked)


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="needs g++'s ThreadSanitizer")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_threads_sanitized(tmp_path: Path) -> None:
    """No two tasks touch the same memory; the driver runs them on three threads."""
    if not os.path.isabs(runtime("libtsan.so")):
        pytest.skip("g++ has no ThreadSanitizer library")
    executable = tmp_path / "driver"
    standalone.build("g++", executable, "-fsanitize=thread", "-g1")
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    cases += [latent_cases.random_case(seed) for seed in range(NUM_CASES // 10)]
    for case, found in zip(
        cases, standalone.run([str(executable)], "portable", cases), strict=True
    ):
        check(case, found)
