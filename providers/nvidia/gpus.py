"""NVIDIA's GPUs: what its management library says of them, in the order in which CUDA counts."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from onnxport.errors import ProviderError
from onnxport.providers.base import Device
from onnxport.providers.bus import as_counted, bus_id, places
from onnxport.providers.imports import unless_interrupted
from onnxport.providers.page_lock import runtime

logger = logging.getLogger(__name__)

# NVML's codes of what a GPU does not tell, as one that shares the processor's memory, or is a part.
_UNTOLD: Final = (3, 4)  # NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    device: Device
    free_bytes: int | None  # None: it does not tell
    capability: tuple[int, int]  # to compute, as CUDA counts
    bus_id: str  # where it is plugged in, as `bus.bus_id` spells it; "" where that is not known


def list_gpus(install: str, versions: dict[str, str]) -> list[Gpu]:
    """Return the GPUs in the order of their places; the driver is noted in `versions`.

    One that does not answer is left out.

    Args:
        install: how to install what is missing.
        versions: Out, by name.

    Raises:
        ProviderError: the driver cannot be asked, or there is no GPU.
    """
    try:
        import pynvml
    except ImportError as error:
        unless_interrupted(error)
        raise ProviderError(f"nvidia-ml-py is missing ({error}): {install}") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ProviderError(
            f"NVIDIA's driver cannot be asked for its GPUs ({error}); install one, or if there is "
            "one, see whether `nvidia-smi` works"
        ) from error
    found, failure = [], None
    try:
        versions["driver"] = _text(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)))
            except pynvml.NVMLError as error:
                logger.warning("GPU %d is left out, as it does not answer: %s", index, error)
                failure = error
    except pynvml.NVMLError as error:
        failure = error
    finally:
        pynvml.nvmlShutdown()
    if failure is not None and not found:
        raise ProviderError(f"NVIDIA's driver does not describe its GPUs: {failure}") from failure
    if not found:
        raise ProviderError("NVIDIA's driver finds no GPU here")
    return found


def as_cuda_counts(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that CUDA sees, in its order; as they are where it cannot be asked.

    CUDA_VISIBLE_DEVICES hides some from it, and the fastest comes first unless CUDA_DEVICE_ORDER
    says otherwise. CUDA's libraries have to be loaded.
    """
    return as_counted(gpus, places(runtime(), "cuda"), "CUDA")


def free_bytes(device_id: int) -> int | None:
    """Memory that CUDA says is free on a GPU, by its own number; None where it does not say."""
    library = runtime()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if library is None or library.cudaSetDevice(ctypes.c_int(device_id)):
        return None
    if library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)):
        return None
    return free.value


def _gpu(pynvml: Any, handle: Any) -> Gpu:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    name, total, free = _text(pynvml.nvmlDeviceGetName(handle)), None, None
    try:
        held = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(held.total), int(held.free)
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) not in _UNTOLD:
            raise
    try:
        place = bus_id(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    except pynvml.NVMLError:
        place = ""
    return Gpu(Device(name, total, "gpu"), free, (int(major), int(minor)), place)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
