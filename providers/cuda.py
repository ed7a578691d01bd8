"""The `cuda` provider: NVIDIA GPUs, with ONNX Runtime's own PagedAttention in 16-bit floats."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.attention_ops import ROTARY_MULTIPLE
from onnxport.graphs.passes.native import NativeLimits
from onnxport.providers.base import LoadOptions, Probe
from onnxport.providers.device import load_on_device, why_not_started
from onnxport.providers.features import Features
from onnxport.providers.imports import unless_interrupted, unless_left_behind
from onnxport.providers.nvidia.compiler import compile_add_lora
from onnxport.providers.nvidia.gpus import as_cuda_counts, free_bytes, list_gpus
from onnxport.providers.nvidia.library import find_library
from onnxport.providers.nvidia.memory import check_runtime, copy_to_device
from onnxport.providers.ort import Target
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.page_lock import page_lock
from onnxport.providers.recipe import LoraKernel, Recipe

logger = logging.getLogger(__name__)

EXECUTION_PROVIDER: Final = "CUDAExecutionProvider"
INSTALL: Final = "pip install 'onnxport[cuda]'"
MOST_ROWS: Final = 256  # sequences in one PagedAttention
LORA_VARIABLE: Final = "ONNXPORT_CUDA_LORA"  # 1: adapters by our own kernel
MOST_RANK: Final = 512  # kMostRank in nvidia/add_lora.h
BFLOAT16_CAPABILITY: Final = (8, 0)  # the first compute capability with bfloat16
NATIVE: Final = NativeLimits(
    activation_dtypes=frozenset({"float16", "bfloat16"}),
    cache_dtypes=frozenset({"float16", "bfloat16"}),
    max_head_size=256,
    rotary_multiple=ROTARY_MULTIPLE,
)


class CudaProvider:
    """Loads artifacts on one GPU.

    Args:
        device: its number, as CUDA counts: without those that CUDA_VISIBLE_DEVICES hides.
        emulate: let the CPU stand in for it.
    """

    name = "cuda"

    def __init__(self, device: str = "0", *, emulate: bool = False) -> None:
        if not device.isdecimal():
            raise ProviderError(
                f"cuda:{device} does not name a GPU; give its number as CUDA counts, as in "
                "cuda:0, without those that CUDA_VISIBLE_DEVICES hides"
            )
        self._device_id = int(device)
        self._emulate = emulate

    def probe(self) -> Probe:
        """See `providers.base.Provider.probe`."""
        try:
            import onnxruntime as ort

            unless_left_behind(ort)
        except ImportError as error:
            unless_interrupted(error)
            return Probe(False, f"onnxruntime is missing ({error}): {INSTALL}")
        versions = {"onnxruntime": ort.__version__}
        if EXECUTION_PROVIDER not in ort.get_available_providers():
            reason = f"onnxruntime {ort.__version__} has no CUDA execution provider: {INSTALL}"
            return Probe(False, reason, (), versions)
        try:
            gpus = list_gpus(INSTALL, versions)
        except ProviderError as error:
            return Probe(False, str(error), (), versions)
        _preload(ort)
        gpus = as_cuda_counts(gpus)
        devices = tuple(gpu.device for gpu in gpus)
        if self._device_id >= len(gpus):
            reason = f"cuda:{self._device_id} is to be used, and there are {len(gpus)} GPUs"
            return Probe(False, reason, devices, versions)
        used = devices[self._device_id]
        devices = (used, *(device for device in devices if device is not used))
        if reason := why_not_started(self._target()):
            reason = _why_not_loaded(ort) or reason
            return Probe(False, f"{reason}. {_ADVICE}", devices, versions)
        dtypes = _dtypes(gpus[self._device_id].capability)
        features = Features.one_type(("native", "decomposed"), dtypes, NATIVE.activation_dtypes)
        return Probe(True, "", devices, versions, (), features)

    def load(self, artifact: Artifact, options: LoadOptions) -> OrtModel:
        """See `providers.base.Provider.load`."""
        if not self._emulate and (reason := self.probe().reason):
            raise ProviderError(reason)
        if self._emulate:
            recipe = self._recipe("a CUDA device, emulated on the CPU", BFLOAT16_CAPABILITY)
        else:
            gpu = as_cuda_counts(list_gpus(INSTALL, {}))[self._device_id]
            free = free_bytes(self._device_id) if gpu.free_bytes is None else gpu.free_bytes
            recipe = replace(self._recipe(gpu.device.name, gpu.capability), free_bytes=free)
        return load_on_device(artifact, options, recipe, self._target(), emulate=self._emulate)

    def _recipe(self, device: str, capability: tuple[int, int]) -> Recipe:
        return Recipe(
            provider=self.name,
            device=device,
            dtypes=_dtypes(capability),
            native=NATIVE,
            native_block_size=block_size,
            max_batch_rows=MOST_ROWS,
            capture_options={"enable_cuda_graph": "1"},
            selects_logits=True,
            page_lock=page_lock,
            lora_kernel=self._lora_kernel(capability),
        )

    def _lora_kernel(self, capability: tuple[int, int]) -> LoraKernel | None:
        """Our own kernel for adapters, where it is asked for: no GPU has run it yet."""
        asked = os.environ.get(LORA_VARIABLE, "0")
        if asked not in ("0", "1"):
            raise ProviderError(f"{LORA_VARIABLE} is {asked!r}; set it to 0 or 1, or not at all")
        if asked == "0":
            return None
        return LoraKernel(
            compile=partial(_compile, capability),
            library=find_library(),
            copy=partial(copy_to_device, self._device_id),
            max_rank=MOST_RANK,
        )

    def _target(self) -> Target:
        options = {
            "device_id": str(self._device_id),
            # The pool is sized to what is free: take what a step needs, not the next power of two.
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": "0",  # whoever asks for float32 does not want products of 10 bits
        }
        return Target(EXECUTION_PROVIDER, "cuda", self._device_id, options)


_ADVICE: Final = (
    "ONNX Runtime needs CUDA 13 and cuDNN 9, which "
    f"{INSTALL} brings, and a driver that is new enough for them"
)


def _compile(capability: tuple[int, int], dtype: str) -> bytes:
    """See `LoraKernel.compile`; what is found out here need not be when a model is half loaded."""
    check_runtime()
    return compile_add_lora(capability, dtype)


def _dtypes(capability: tuple[int, int]) -> tuple[str, ...]:
    halves = ("float16", "bfloat16") if capability >= BFLOAT16_CAPABILITY else ("float16",)
    return (*halves, "float32")


def block_size(head_size: int) -> int:
    """Tokens of a KV block: what FlashAttention's paged kernels take a multiple of."""
    if head_size <= 64:
        return 256
    return 128 if head_size <= 128 else 64


def _preload(ort: Any) -> None:
    """Load the libraries of NVIDIA's own wheels, where they are installed."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):  # it prints what it misses, one library a line
        ort.preload_dlls()
    for line in told.getvalue().splitlines():
        logger.info("%s", line)


def _why_not_loaded(ort: Any) -> str:
    """Why ONNX Runtime's library for CUDA cannot be loaded, "" where that is not the reason.

    ONNX Runtime only logs it, and goes on with the CPU.
    """
    folder = Path(ort.__file__).parent / "capi"
    for name in ("libonnxruntime_providers_cuda.so", "onnxruntime_providers_cuda.dll"):
        if (folder / name).is_file():
            try:
                ctypes.CDLL(str(folder / name))
            except OSError as error:
                if "undefined symbol" not in str(error):  # ONNX Runtime's own, not there yet
                    return f"ONNX Runtime's library for CUDA cannot be loaded ({error})"
    return ""
