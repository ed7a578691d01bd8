"""Copies to the memory of a CUDA device."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.providers.page_lock import RUNTIME, runtime

HOST_TO_DEVICE: Final = 1  # cudaMemcpyHostToDevice


def copy_to_device(device_id: int, address: int, numbers: NDArray[Any]) -> None:
    """Copy a contiguous array to an address in a device's memory; returns when it is there.

    Raises:
        ProviderError: CUDA is missing, or fails.
    """
    library = runtime()
    if library is None:
        raise ProviderError(f"CUDA's runtime library, {RUNTIME}, cannot be loaded")
    status = library.cudaSetDevice(ctypes.c_int(device_id)) or library.cudaMemcpy(
        ctypes.c_void_p(address),
        ctypes.c_void_p(numbers.ctypes.data),
        ctypes.c_size_t(numbers.nbytes),
        ctypes.c_int(HOST_TO_DEVICE),
    )
    if status:
        raise ProviderError(
            f"CUDA does not copy {numbers.nbytes} bytes to device {device_id} (error {status})"
        )
