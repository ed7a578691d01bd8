"""Finds the sampling library and declares what it takes."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

_NAMES = ("onnxport_sampling.so", "onnxport_sampling.dylib", "onnxport_sampling.dll")

DRAWN, NOT_FINITE, BAD_TOKEN, OUT_OF_MEMORY = range(4)  # the status of a row

# How one row is sampled, and what came of it: csrc/request.h says what the fields are, in this
# order. In parts, as they are made at different times.
CHOICE = struct.Struct("@8d2q6i")  # what stays the same from step to step
CHANGES = struct.Struct("@6P4q4f")  # in the logits
STEP = struct.Struct("@P2d3q2di0q")  # what is of one step, and the results
RESULTS = struct.Struct(
    f"@{CHOICE.size + CHANGES.size}x24xq8xq2di0q"
)  # token, rank, logprob, surprise, status
REQUEST_SIZE = CHOICE.size + CHANGES.size + STEP.size


class Batch(ctypes.Structure):
    """The rows of a step; all arrays are the caller's."""

    _fields_ = (
        ("kernels", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),  # float32 [num_rows, stride]
        ("summaries", ctypes.c_void_p),  # float32 [num_rows, summary_stride], or null
        ("requests", ctypes.c_void_p),  # [num_rows], of REQUEST_SIZE
        ("top_ids", ctypes.c_void_p),  # int64
        ("top_logprobs", ctypes.c_void_p),  # float64
        ("num_rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("summary_stride", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),  # 0; set by the call
        ("next", ctypes.c_int64),  # 0; counted up by the threads that run the batch
    )


def find_library() -> Path | None:
    """Return the library's path, or None where it was not built.

    It is missing where `onnxport` was installed without a C++17 compiler of GCC's kind.
    """
    for name in _NAMES:
        file = Path(__file__).with_name(name)
        if file.is_file():
            return file
    return None


def load_library(path: Path) -> ctypes.CDLL:
    """Load the library and declare the signatures of its functions.

    Raises:
        ImportError: it was built from other sources.
    """
    library = ctypes.CDLL(str(path))
    library.onnxport_sampling_request_size.restype = ctypes.c_size_t
    library.onnxport_sampling_request_size.argtypes = []
    library.onnxport_sampling_batch_size.restype = ctypes.c_size_t
    library.onnxport_sampling_batch_size.argtypes = []
    library.onnxport_sampling_kernels.restype = ctypes.c_void_p
    library.onnxport_sampling_kernels.argtypes = [ctypes.c_char_p]
    library.onnxport_sampling_name.restype = ctypes.c_char_p
    library.onnxport_sampling_name.argtypes = [ctypes.c_void_p]
    library.onnxport_sampling_summarize.restype = None
    library.onnxport_sampling_summarize.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_float,
        ctypes.c_void_p,
    ]
    library.onnxport_sampling_fence.restype = None
    library.onnxport_sampling_fence.argtypes = []
    library.onnxport_sampling_run.restype = None
    library.onnxport_sampling_run.argtypes = [ctypes.POINTER(Batch), ctypes.c_int64]
    sizes = (library.onnxport_sampling_request_size(), library.onnxport_sampling_batch_size())
    expected = (REQUEST_SIZE, ctypes.sizeof(Batch))
    if sizes != expected:
        raise ImportError(
            f"{path} lays out requests and batches in {sizes} bytes, this version of onnxport in "
            f"{expected}; build it again (scripts/build_kernels.py, or reinstall)"
        )
    return library
