"""LoRA adapters on devices: by a kernel of ours where there is one, else in standard operators."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs.lora import LoraProduct, SlotDtype
from onnxport.graphs.passes.compiled_lora import compiled_lora
from onnxport.graphs.passes.lora import add_lora, add_lora_operator
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.adapter_slots import AdapterSlots, slots_bytes
from onnxport.providers.adapters import Adapters, AdapterStacks, check_stack_dtype, stack_bytes
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu import library
from onnxport.providers.device_arrays import DeviceArrays
from onnxport.providers.device_slots import DeviceSlots
from onnxport.providers.lora_test import distrust_lora
from onnxport.providers.ort import Target
from onnxport.providers.recipe import LoraKernel, Recipe

logger = logging.getLogger(__name__)

# In which a kernel of ours has adapters: that of the activations.
SLOT_DTYPES: Final[dict[str, SlotDtype]] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}


class DeviceLora:
    """What becomes of a graph, and what it is given, where it is loaded with adapters.

    Attributes:
        library: with operators that the model's session needs; None: it needs none.
    """

    def __init__(
        self,
        products: Sequence[LoraProduct],
        spec: ArchSpec,
        options: LoadOptions,
        recipe: Recipe,
        target: Target,
        dtype: str,
        numbers: np.dtype[Any],
        *,
        emulate: bool,
    ) -> None:
        """Choose how adapters are computed.

        Args:
            products: of the graph.
            spec: the model.
            options: with `max_adapters` of at least 1.
            recipe: of the device.
            target: the device; its kernel is tried there.
            dtype: of the activations.
            numbers: the same in NumPy.
            emulate: whether the CPU stands in for the device.

        Raises:
            ProviderError: adapters cannot be kept in what the options ask for.
        """
        check_stack_dtype(options, dtype)
        self._products = products
        self._spec = spec
        self._options = options
        self._recipe = recipe
        self._dtype = SLOT_DTYPES[dtype]
        self._numbers = numbers
        self._image = b""
        self._kernel: LoraKernel | None = None
        self.library: Path | None = None
        kernel = recipe.lora_kernel
        if kernel is None:
            return
        try:
            self._image = self._prepare(kernel, target, emulate=emulate)
        except ProviderError as error:
            # It was asked for by name.
            logger.warning("%s: adapters in standard operators: %s", recipe.provider, error)
            return
        self._kernel = kernel
        self.library = library.find_library() if emulate else kernel.library

    def lower(self, model: onnx.ModelProto) -> PassResult:
        """Let adapters add to a graph in the type of the activations."""
        if self._kernel is None:
            return add_lora(model, self._spec)
        return add_lora_operator(model, self._spec, self._options.max_adapter_rank, self._dtype)

    def finish(self, model: onnx.ModelProto) -> PassResult | None:
        """What the device wants behind `lower` and all other passes."""
        return compiled_lora(model, self._image) if self._image else None

    def num_bytes(self, *, steady: bool) -> int:
        """Device memory that all adapters can take; `steady` where it replays steps."""
        if self._kernel is None:
            return stack_bytes(
                self._products,
                self._spec,
                self._options,
                self._numbers.itemsize,
                few_shapes=self._recipe.bucketed or steady,
            )
        return slots_bytes(self._products, self._spec, self._options, self._dtype)

    def adapters(self, target: Target, *, steady: bool) -> Adapters:
        """Empty slots, of a device; `steady` where it replays steps."""
        spec, options = self._spec, self._options
        if self._kernel is None:
            stacks = AdapterStacks(
                self._products,
                spec,
                self._numbers,
                DeviceArrays(target, steady=steady),
                few_shapes=self._recipe.bucketed,
                steady=steady,
            )
            return Adapters(spec, options, stacks)
        copy = _copy_on_host if target.is_host else self._kernel.copy
        memory = DeviceSlots(target, copy)
        slots = AdapterSlots(self._products, spec, options, self._dtype, memory.place, memory.write)
        return Adapters(spec, options, slots)

    def _prepare(self, kernel: LoraKernel, target: Target, *, emulate: bool) -> bytes:
        """The compiled kernel, tried; nothing where the CPU's own operator stands in for it.

        Raises:
            ProviderError: it cannot be used.
        """
        rank = self._options.max_adapter_rank
        if rank > kernel.max_rank:
            raise ProviderError(
                f"the kernel has room for ranks up to {kernel.max_rank}, not {rank}"
            )
        if emulate:
            if library.find_library() is None:
                raise ProviderError("the C++ kernel that would stand in for it was not built")
            return b""
        if kernel.library is None:
            raise ProviderError("the library with the operator was not built")
        image = kernel.compile(self._dtype)
        if reason := distrust_lora(target, self._dtype, image, kernel):
            raise ProviderError(reason)
        return image


def _copy_on_host(address: int, numbers: NDArray[Any]) -> None:
    ctypes.memmove(address, numbers.ctypes.data, numbers.nbytes)
