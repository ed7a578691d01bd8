"""Errors of runtimes, told apart by what they say."""

from __future__ import annotations

import pytest

from onnxport.errors import DeviceLostError, DeviceMemoryError, ProviderError
from onnxport.providers.failures import device_error

LOST = [
    "CUDA failure 719: unspecified launch failure ; GPU=0 ; hostname=a",
    "CUDA failure 700: an illegal memory access was encountered",
    "CUDA error cudaErrorIllegalAddress: ...",
    "hipErrorIllegalAddress",
    "the GPU device instance has been suspended: 887A0005",
    "DXGI_ERROR_DEVICE_REMOVED",
    "WebGPU device lost (2): the device was destroyed",
    "Device is lost.",
    "vkQueueSubmit failed with VK_ERROR_DEVICE_LOST",
    "[GPU] clFlush, error code: -2 CL_DEVICE_NOT_AVAILABLE",
]
FULL = [
    "CUDA failure 2: out of memory ; GPU=0",
    "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 4096",
    "Available memory of 10 is smaller than requested bytes of 20",
    "bfc_arena.cc: std::bad_alloc",
    "hipErrorOutOfMemory",
    "8007000E Not enough memory resources are available",
    "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED",
    "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    "[GPU] clEnqueueNDRangeKernel, error code: -5 CL_OUT_OF_RESOURCES",
    "[GPU] clCreateBuffer, error code: -4 CL_MEM_OBJECT_ALLOCATION_FAILURE",
    "[GPU] Exceeded max size of memory object allocation: requested 34359738368 bytes",
]
OTHER = [
    "Non-zero status code returned while running Gather node",
    "CUDA failure 98: invalid device function",  # the build is for other devices; this one lives
    "CUDA failure 20: whatever",  # not 2
    "Invalid argument: the device does not support f16",
    "block_table out of range",
]


@pytest.mark.parametrize(
    ("texts", "kind"),
    [(LOST, DeviceLostError), (FULL, DeviceMemoryError), (OTHER, ProviderError)],
    ids=["lost", "full", "other"],
)
def test_each_kind_is_known_by_its_text(texts: list[str], kind: type[ProviderError]) -> None:
    for text in texts:
        error = device_error(RuntimeError(text), "running a batch of 3 tokens", "GPU 0")
        assert type(error) is kind, text
        assert text in str(error)
        assert "GPU 0" in str(error)
        assert "running a batch of 3 tokens" in str(error)


def test_memory_of_the_host_is_memory_too() -> None:
    error = device_error(MemoryError(), "reading 2 KV blocks", "the processor")
    assert type(error) is DeviceMemoryError
