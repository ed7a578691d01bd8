"""The NEON kernels, cross-compiled and run by an emulator where this is no Arm machine."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from tests.kernels import latent_cases, standalone
from tests.kernels.cases import random_case
from tests.kernels.checks import check

NUM_CASES = 160
ON_ARM = platform.machine() in ("aarch64", "arm64")
COMPILER = "g++" if ON_ARM else "aarch64-linux-gnu-g++"
EMULATOR = None if ON_ARM else shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="links the driver statically")
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}")
@pytest.mark.skipif(not ON_ARM and EMULATOR is None, reason="needs qemu-aarch64 (qemu-user)")
@pytest.mark.parametrize("isa", ["neon", "portable"])
def test_random_cases(tmp_path: Path, isa: str) -> None:
    executable = tmp_path / "driver"
    standalone.build(COMPILER, executable, "-static")
    command = [*([EMULATOR] if EMULATOR else []), str(executable)]
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    cases += [latent_cases.random_case(seed) for seed in range(NUM_CASES // 4)]
    for case, found in zip(cases, standalone.run(command, isa, cases), strict=True):
        check(case, found)
