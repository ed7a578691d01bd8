"""Finds the sampling library and declares what it takes."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np

_NAMES = ("onnxport_sampling.so", "onnxport_sampling.dylib", "onnxport_sampling.dll")

DRAWN, NOT_FINITE, BAD_TOKEN, OUT_OF_MEMORY = range(4)  # the status of a row

# How one row is sampled, and what came of it; csrc/request.h says what the fields mean. In parts:
# what stays the same for a request, what changes in the logits, and what is of one step.
CHOICE = np.dtype(
    [
        *[(name, np.float64) for name in ("temperature", "min_p", "top_p")],
        *[(name, np.int64) for name in ("top_k", "num_top")],
        *[(name, np.int32) for name in ("greedy", "has_top_k", "has_token", "has_logprobs")],
    ],
    align=True,
)
CHANGES = np.dtype(
    [
        *[(name, np.uintp) for name in ("bias_ids", "bias", "banned", "seen", "counts", "allowed")],
        *[(name, np.int64) for name in ("num_biased", "num_banned", "num_seen", "num_allowed")],
        *[(name, np.float32) for name in ("repetition", "presence", "frequency", "unused")],
    ],
    align=True,
)
STEP = np.dtype(
    [
        ("mask", np.uintp),
        ("uniform", np.float64),
        *[(name, np.int64) for name in ("token", "top_begin", "rank")],
        ("logprob", np.float64),
        ("status", np.int32),
    ],
    align=True,
)
_PARTS = (CHOICE, CHANGES, STEP)
REQUEST = np.dtype([(name, part[name]) for part in _PARTS for name in part.names or ()], align=True)
PACKED_CHANGES = struct.Struct("@6P4q4f")  # of CHANGES, faster than an array of one


class Batch(ctypes.Structure):
    """The rows of a step; all arrays are the caller's."""

    _fields_ = (
        ("kernels", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),  # float32 [num_rows, stride]
        ("requests", ctypes.c_void_p),  # REQUEST [num_rows]
        ("top_ids", ctypes.c_void_p),  # int64
        ("top_logprobs", ctypes.c_void_p),  # float64
        ("num_rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
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
    library.onnxport_sampling_run.restype = None
    library.onnxport_sampling_run.argtypes = [ctypes.POINTER(Batch), ctypes.c_int64]
    sizes = (library.onnxport_sampling_request_size(), library.onnxport_sampling_batch_size())
    expected = (REQUEST.itemsize, ctypes.sizeof(Batch))
    if sizes != expected:
        raise ImportError(
            f"{path} lays out requests and batches in {sizes} bytes, this version of onnxport in "
            f"{expected}; build it again (scripts/build_kernels.py, or reinstall)"
        )
    return library
