"""LoRA adapters on OpenVINO: with our own operator where it can be used, else in standard ones."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import LoraProduct
from onnxport.graphs.passes.int8_matmul import INT8_LEVEL
from onnxport.graphs.passes.lora import add_lora, add_lora_operator, lora_products
from onnxport.graphs.passes.result import PassResult
from onnxport.providers.adapter_slots import AdapterSlots, slots_bytes
from onnxport.providers.adapters import Adapters, AdapterStacks, stack_bytes
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu import library
from onnxport.providers.openvino.extension import Extension, Loaded
from onnxport.providers.openvino.model import tensors_of
from onnxport.providers.openvino.plugin import accuracy_level

ATTRIBUTES: Final = (  # of AddLora
    *("offset", "ranks", "max_rank", "columns0", "columns1", "columns2"),
    *("bits", "block_size"),  # of adapters in int8
)


class OpenVinoLora:
    """What becomes of a graph, and what it is given, where it is loaded with adapters."""

    def __init__(
        self, artifact: Artifact, options: LoadOptions, extension: Extension | None
    ) -> None:
        """Load nothing yet.

        Args:
            artifact: what is loaded.
            options: with `max_adapters` of at least 1.
            extension: see `extension.load_extension`; None: standard operators.
        """
        self._spec = artifact.manifest.model
        self._options = options
        self._extension = extension
        self._loaded = Loaded(extension) if extension is not None else None
        self._is_half = artifact.manifest.activation_dtype == "float16"
        self._dtype = np.dtype(np.float32)
        self._products: list[LoraProduct] = []

    def lower(self, model: onnx.ModelProto) -> PassResult:
        """Let adapters add to a graph in float32."""
        self._products = lora_products(model, self._spec)
        if self._extension is None:
            return add_lora(model, self._spec)
        self._dtype = self._choose_dtype(accuracy_level(model, self._options.matmul_accuracy_level))
        return add_lora_operator(
            model, self._spec, self._options.max_adapter_rank, self._dtype.name
        )

    def convert(self, node: Any) -> list[Any]:
        """AddLora as a product and what our operator adds to it.

        The rest of the node's inputs, RANKS, WEIGHTS and SCALES, are handed over in another way.
        """
        import openvino.opset15 as ops

        assert self._extension is not None
        assert self._loaded is not None
        product, activations, slots = (node.get_input(index) for index in range(3))
        attributes = {name: node.get_attribute(name, 0) for name in ATTRIBUTES}
        attributes["model"] = self._loaded.model
        delta = self._extension.node(activations, slots, attributes)
        return [ops.add(product, delta).output(0)]

    def _choose_dtype(self, level: int) -> np.dtype[Any]:
        """What adapters are kept in: as on the CPU provider, whose kernel computes them.

        Where OpenVINO may round activations to int8, so may adapters.
        """
        if level == INT8_LEVEL and library.matmul_isa() is not None:
            return np.dtype(np.int8)
        return np.dtype(np.float16 if self._is_half and level != 1 else np.float32)

    def num_bytes(self) -> int:
        """Memory that all adapters can take; after `lower`."""
        if self._extension is not None:
            return slots_bytes(self._products, self._spec, self._options, self._dtype)
        return stack_bytes(self._products, self._spec, self._options, self._dtype.itemsize)

    def adapters(self) -> Adapters:
        """Empty slots; after `lower`."""
        spec, options = self._spec, self._options
        if self._loaded is None:
            stacks = AdapterStacks(self._products, spec, self._dtype, tensors_of)
            return Adapters(spec, options, stacks)
        slots = AdapterSlots(self._products, spec, options, self._dtype, self._loaded)
        return Adapters(spec, options, slots)
