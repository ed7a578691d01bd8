"""LoRA adapters on the host: with our own operator where it was built, else in standard ones."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import LoraProduct
from onnxport.graphs.passes.lora import add_lora, add_lora_operator, lora_products
from onnxport.graphs.passes.result import PassResult
from onnxport.providers.adapters import (
    Adapters,
    AdapterSlots,
    AdapterStacks,
    slots_bytes,
    stack_bytes,
)
from onnxport.providers.base import LoadOptions
from onnxport.providers.device_arrays import DeviceArrays
from onnxport.providers.ort import CPU

FLOAT32_LEVEL: Final = 1  # of matmul_accuracy_level


class HostLora:
    """What becomes of a graph, and what it is given, where it is loaded with adapters."""

    def __init__(self, artifact: Artifact, options: LoadOptions, *, custom: bool) -> None:
        """Decide what adapters are kept in.

        Our operator computes in float32 whatever that is. It reads adapters in the artifact's own
        type, float16 being half as much to read; who asks for float32 products gets float32.

        Args:
            artifact: what is loaded.
            options: with `max_adapters` of at least 1.
            custom: whether to use the operator.
        """
        self._spec = artifact.manifest.model
        self._options = options
        self._custom = custom
        exact = options.matmul_accuracy_level == FLOAT32_LEVEL
        is_half = artifact.manifest.activation_dtype == "float16"
        self._dtype = "float16" if custom and is_half and not exact else "float32"
        self._products: list[LoraProduct] = []

    def lower(self, model: onnx.ModelProto) -> PassResult:
        """Let adapters add to a graph in float32."""
        self._products = lora_products(model, self._spec)
        if self._custom:
            rank = self._options.max_adapter_rank
            return add_lora_operator(model, self._spec, rank, self._dtype)
        return add_lora(model, self._spec)

    def num_bytes(self) -> int:
        """Memory that all adapters can take; after `lower`."""
        count = slots_bytes if self._custom else stack_bytes
        return count(self._products, self._spec, self._options, np.dtype(self._dtype).itemsize)

    def adapters(self) -> Adapters:
        """Empty slots; after `lower`."""
        dtype, place = np.dtype(self._dtype), DeviceArrays(CPU)
        if self._custom:
            slots = AdapterSlots(self._products, self._spec, self._options, dtype, place)
            return Adapters(self._spec, self._options, slots)
        stacks = AdapterStacks(self._products, self._spec, dtype, place)
        return Adapters(self._spec, self._options, stacks)
