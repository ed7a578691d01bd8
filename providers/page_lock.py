"""Host memory that a CUDA device reads and writes by itself, three times as fast as any other.

Measured on an H100: 39 MB of logits take 0.75 ms to such memory and 2.5 ms to any other.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from numpy.typing import NDArray

logger = logging.getLogger(__name__)

# Of the CUDA that ONNX Runtime was built for, which is loaded with it.
RUNTIME: Final = "cudart64_13.dll" if sys.platform == "win32" else "libcudart.so.13"


def page_lock(array: NDArray[Any]) -> Callable[[], None]:
    """Keep the memory of an array in place, for CUDA devices; returns what lets go of it.

    Where that fails, the array stays what it is, and transfers take longer.
    """
    found = runtime()
    address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    if found is None or array.nbytes == 0:
        return _nothing
    if status := found.cudaHostRegister(address, size, ctypes.c_uint(0)):
        logger.info("CUDA does not lock %d bytes of host memory (error %d)", array.nbytes, status)
        return _nothing

    def release(kept: NDArray[Any] = array) -> None:
        found.cudaHostUnregister(ctypes.c_void_p(kept.ctypes.data))

    return release


def runtime() -> Any:
    """CUDA's runtime library; None where it cannot be loaded, or not yet."""
    try:
        return _loaded()
    except OSError as error:
        logger.info("transfers to the host take longer than need be: %s", error)
        return None


@cache
def _loaded() -> Any:
    return ctypes.CDLL(RUNTIME)


def _nothing() -> None: ...
