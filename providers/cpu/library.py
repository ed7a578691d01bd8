"""Finds the CPU provider's operator library and asks it which instruction set it uses."""

from __future__ import annotations

import ctypes
from pathlib import Path

_NAMES = ("onnxport_cpu.so", "onnxport_cpu.dylib", "onnxport_cpu.dll")
_FOLDER = Path(__file__).parent  # tests choose another one


def find_library() -> Path | None:
    """Returns the operator library's path, or None where it was not built.

    It is missing where `onnxport` was installed without a C++17 compiler. Give it to
    `onnxruntime.SessionOptions.register_custom_ops_library`.
    """
    for name in _NAMES:
        file = _FOLDER / name
        if file.is_file():
            return file
    return None


def load_library(path: Path) -> ctypes.CDLL:
    """Loads the library and declares the signatures of its plain C functions."""
    library = ctypes.CDLL(str(path))
    library.onnxport_cpu_isa.restype = ctypes.c_char_p
    library.onnxport_cpu_isa.argtypes = []
    library.onnxport_cpu_set_isa.restype = ctypes.c_int
    library.onnxport_cpu_set_isa.argtypes = [ctypes.c_char_p]
    library.onnxport_cpu_prefers_pairs.restype = ctypes.c_int
    library.onnxport_cpu_prefers_pairs.argtypes = []
    library.onnxport_cpu_converts_half.restype = ctypes.c_int
    library.onnxport_cpu_converts_half.argtypes = []
    library.onnxport_cpu_matmul_isa.restype = ctypes.c_char_p
    library.onnxport_cpu_matmul_isa.argtypes = []
    library.onnxport_cpu_set_matmul_isa.restype = ctypes.c_int
    library.onnxport_cpu_set_matmul_isa.argtypes = [ctypes.c_char_p]
    library.onnxport_cpu_summarizes.restype = ctypes.c_int
    library.onnxport_cpu_summarizes.argtypes = []
    library.onnxport_cpu_settle.restype = ctypes.c_int64
    library.onnxport_cpu_settle.argtypes = []
    library.onnxport_cpu_unsettled_pages.restype = ctypes.c_int64
    library.onnxport_cpu_unsettled_pages.argtypes = []
    library.onnxport_cpu_weight_memory_bytes.restype = ctypes.c_int64
    library.onnxport_cpu_weight_memory_bytes.argtypes = []
    library.onnxport_cpu_num_compared_panels.restype = ctypes.c_int64
    library.onnxport_cpu_num_compared_panels.argtypes = []
    library.onnxport_cpu_plane_parts_left.restype = ctypes.c_int64
    library.onnxport_cpu_plane_parts_left.argtypes = []
    library.onnxport_cpu_make_plane_part.restype = ctypes.c_int
    library.onnxport_cpu_make_plane_part.argtypes = []
    library.onnxport_cpu_set_session_threads.restype = None
    library.onnxport_cpu_set_session_threads.argtypes = [ctypes.c_int64]
    library.onnxport_cpu_set_most_state_floats.restype = ctypes.c_int64
    library.onnxport_cpu_set_most_state_floats.argtypes = [ctypes.c_int64]
    library.onnxport_cpu_set_slow_page_ns.restype = ctypes.c_int64
    library.onnxport_cpu_set_slow_page_ns.argtypes = [ctypes.c_int64]
    return library


def isa() -> str | None:
    """Returns the kernels' instruction set; None where the library was not built.

    One of `amx`, `avx512bf16`, `avx512`, `avx2`, `neon`, `portable`.
    """
    path = find_library()
    if path is None:
        return None
    name: bytes = load_library(path).onnxport_cpu_isa()
    return name.decode()


def weight_memory_bytes() -> int:
    """Bytes of packed weights that all sessions of this process keep together.

    What they share counts once; 0 where the library was not built.
    """
    path = find_library()
    return 0 if path is None else int(load_library(path).onnxport_cpu_weight_memory_bytes())


def num_compared_panels() -> int:
    """How many panels of 32 outputs this process packed to see whether others have the same.

    0 where the library was not built.
    """
    path = find_library()
    return 0 if path is None else int(load_library(path).onnxport_cpu_num_compared_panels())


def prefers_pairs() -> bool:
    """Whether attention over a bfloat16 cache is faster in pairs than over float32."""
    path = find_library()
    return path is not None and bool(load_library(path).onnxport_cpu_prefers_pairs())


def converts_half() -> bool:
    """Whether the processor converts float16, so that attention over such a cache is no slower."""
    path = find_library()
    return path is not None and bool(load_library(path).onnxport_cpu_converts_half())


def summarizes() -> bool:
    """Whether `onnxport.MatMulNBits` can summarize its outputs, as `rows/summary.h` says."""
    path = find_library()
    return path is not None and bool(load_library(path).onnxport_cpu_summarizes())


def matmul_isa() -> str | None:
    """Returns the instruction set of `onnxport.MatMulNBits`.

    One of `amx`, `avx512vnni`, `avxvnni`, `avx2`, `i8mm`, `dotprod`. None where the library was not
    built or the processor has none of them: ONNX Runtime's own kernel computes such products then.
    """
    path = find_library()
    if path is None:
        return None
    name: bytes | None = load_library(path).onnxport_cpu_matmul_isa()
    return None if name is None else name.decode()
