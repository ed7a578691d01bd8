"""Libraries of the CPU kernels with other options, kept in `build/`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]


def build_library(name: str, *options: str) -> Path:
    """Build `onnxport_cpu` with g++, for the first time or what has changed since the last.

    All of it takes minutes of a processor's time. Another g++ builds anew.

    Args:
        name: of the folder in `build/tests/`.
        options: of CMake.

    Returns:
        The library.
    """
    version = _said("g++", "-dumpfullversion")
    folder = ROOT / "build" / "tests" / f"{name}-g++-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        (folder / "CMakeCache.txt").unlink(missing_ok=True)  # of a checkout that was moved
        _said("cmake", "-S", str(ROOT), "-B", str(folder), *options, "-DCMAKE_CXX_COMPILER=g++")
        _said("cmake", "--build", str(folder), "--parallel", "2", "--target", "onnxport_cpu")
    return folder / "onnxport_cpu.so"


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout.strip()
