"""Builds matmul_driver.cpp and runs products through it.

The input is a count, then for each product K, N, bits, block_size and rows as int64, and the
activations, quants and scales. The answer is the bytes of each output.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np

from tests.kernels.matmul_cases import Floats, MatMulCase
from tests.kernels.standalone import CORE, ROOT


def build(compiler: str, folder: Path, set_flags: dict[str, str], *options: str) -> Path:
    """Compiles the driver; `set_flags` are those of the sources named, as CMake gives them."""
    csrc = ROOT / "providers/cpu/csrc"
    sources = [csrc / f"{name}.cpp" for name in (*CORE, "kernels_portable", "matmul")]
    sources.append(Path(__file__).with_name("matmul_driver.cpp"))
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", *options]
    objects = []
    for source in sources:
        objects.append(str(folder / f"{source.stem}.o"))
        own = set_flags.get(source.stem, "").split()
        _run([compiler, *flags, *own, f"-I{csrc}", "-c", str(source), "-o", objects[-1]])
    executable = folder / "matmul_driver"
    _run([compiler, *flags, *objects, "-o", str(executable)])
    return executable


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run(command: list[str], isa: str, cases: list[MatMulCase]) -> list[Floats]:
    """Runs all cases in one process; each output is [rows, N]."""
    parts = [struct.pack("q", len(cases))]
    for case in cases:
        rows = case.rows()
        parts.append(struct.pack("5q", case.k, case.n, case.bits, case.block_size, len(rows)))
        parts += [
            np.ascontiguousarray(array).tobytes() for array in (rows, case.quants, case.scales)
        ]
    done = subprocess.run([*command, isa], input=b"".join(parts), capture_output=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    values = np.frombuffer(done.stdout, np.float32)
    ends = np.cumsum([len(case.rows()) * case.n for case in cases])
    assert ends[-1] == len(values)
    outputs = np.split(values, ends[:-1])
    return [part.reshape(-1, case.n) for part, case in zip(outputs, cases, strict=True)]
