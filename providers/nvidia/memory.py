"""Copies to the memory of a CUDA device."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.providers.failures import device_error
from onnxport.providers.page_lock import RUNTIME, runtime

HOST_TO_DEVICE: Final = 1  # cudaMemcpyHostToDevice


def check_runtime() -> None:
    """Raise ProviderError where nothing can be copied: CUDA's runtime library is missing."""
    if runtime() is None:
        raise ProviderError(f"CUDA's runtime library, {RUNTIME}, cannot be loaded")


def copy_to_device(device_id: int, address: int, numbers: NDArray[Any]) -> None:
    """Copy a contiguous array to an address in a device's memory; returns when it is there.

    Raises:
        ProviderError: CUDA is missing, or fails; DeviceLostError where it will go on failing.
    """
    check_runtime()
    library = runtime()
    status = (
        library.cudaSetDevice(ctypes.c_int(device_id))
        or library.cudaMemcpy(
            ctypes.c_void_p(address),
            ctypes.c_void_p(numbers.ctypes.data),
            ctypes.c_size_t(numbers.nbytes),
            ctypes.c_int(HOST_TO_DEVICE),
        )
        # The copy may still be on its way, and ONNX Runtime's own streams wait for no other one.
        or library.cudaStreamSynchronize(ctypes.c_void_p(None))
    )
    if status:
        doing = f"copying {numbers.nbytes} bytes to it"
        raise device_error(RuntimeError(f"CUDA error {status}"), doing, f"CUDA device {device_id}")
