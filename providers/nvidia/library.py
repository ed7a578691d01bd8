"""Finds the library with our operators for ONNX Runtime's CUDA execution provider."""

from __future__ import annotations

from pathlib import Path
from typing import Final

NAMES: Final = ("onnxport_cuda.so", "onnxport_cuda.dll")
FOLDER = Path(__file__).parent  # tests choose another one


def find_library() -> Path | None:
    """The library; None where `onnxport` was installed without a C++17 compiler."""
    return next((FOLDER / name for name in NAMES if (FOLDER / name).is_file()), None)
