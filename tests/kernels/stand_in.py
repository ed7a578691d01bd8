"""A driver of ours in place of NVIDIA's, which runs kernels on the host: cuda_driver.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnxport.providers.cuda import MOST_RANK
from onnxport.providers.nvidia.library import find_library
from onnxport.providers.recipe import LoraKernel
from tests.kernels.standalone import CSRC

DRIVER = Path(__file__).with_name("cuda_driver.cpp")
VARIABLE = "ONNXPORT_CUDA_DRIVER"
_BUILT: list[Path] = []


def missing() -> str:
    """What this machine lacks for it; "" if nothing."""
    if find_library() is None:
        return "the library with operators for CUDA was not built"
    return "" if shutil.which("g++") else "there is no g++ to build the driver"


@contextmanager
def stand_in(folder: Path) -> Iterator[LoraKernel]:
    """Let a driver of ours stand in for NVIDIA's; it is built in a folder, once a process.

    The library loads one driver in a process, and keeps it.
    """
    if not _BUILT:
        _BUILT.append(_build(folder / "driver.so"))
    os.environ[VARIABLE] = str(_BUILT[0])
    try:
        yield LoraKernel(image, find_library(), no_copy, MOST_RANK)
    finally:
        del os.environ[VARIABLE]


def _build(driver: Path) -> Path:
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    command = ["g++", *flags, "-shared", "-fPIC", f"-I{CSRC}", str(DRIVER), "-o", str(driver)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return driver


def image(dtype: str) -> bytes:
    """What the driver takes for a compiled kernel."""
    return f"{dtype}\0".encode()


def no_copy(address: int, numbers: NDArray[Any]) -> None:
    """Stands where nothing is to be copied."""
    raise AssertionError("nothing is copied here")
