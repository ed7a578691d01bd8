"""LoRA adapters on the host: with our own operator where it was built, else in standard ones."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import onnx

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import INTEGERS, LoraProduct, SlotDtype
from onnxport.graphs.passes.accuracy import takes_int8
from onnxport.graphs.passes.lora import add_lora, add_lora_operator, lora_products
from onnxport.graphs.passes.result import PassResult
from onnxport.providers.adapter_slots import AdapterSlots, slots_bytes
from onnxport.providers.adapters import (
    Adapters,
    AdapterStacks,
    Place,
    check_stack_dtype,
    stack_bytes,
)
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu import library

logger = logging.getLogger(__name__)

FLOAT32_LEVEL: Final = 1  # of matmul_accuracy_level
STACKED: Final = np.dtype(np.float32)  # what standard operators read


class HostLora:
    """What becomes of a graph, and what it is given, where it is loaded with adapters."""

    def __init__(
        self, artifact: Artifact, options: LoadOptions, place: Place, *, custom: bool
    ) -> None:
        """Load nothing yet.

        Args:
            artifact: what is loaded.
            options: with `max_adapters` of at least 1.
            place: lets a session read arrays where they are.
            custom: whether to use the operator.
        """
        self._spec = artifact.manifest.model
        self._options = options
        self._place = place
        self._custom = custom
        self._is_half = artifact.manifest.activation_dtype == "float16"
        self._dtype: SlotDtype = "float32"
        self._products: list[LoraProduct] = []

    def lower(self, model: onnx.ModelProto) -> PassResult:
        """Let adapters add to a graph in float32.

        Its MatMulNBits have the accuracy levels that the options ask for, or will get them.

        Raises:
            ProviderError: adapters cannot be kept in what the options ask for.
        """
        self._products = lora_products(model, self._spec)
        if self._custom:
            self._dtype = self._choose_dtype(model)
            rank = self._options.max_adapter_rank
            logger.info("LoRA adapters are kept in %s", self._dtype)
            return add_lora_operator(model, self._spec, rank, self._dtype)
        check_stack_dtype(self._options, STACKED.name)
        return add_lora(model, self._spec)

    def _choose_dtype(self, model: onnx.ModelProto) -> SlotDtype:
        """What adapters are kept in.

        What adapters cost is reading them. Where the products beside them may round activations to
        int8, adapters are int8 and multiplied with activations that are rounded so, or int4, if
        that is asked for. Others keep the artifact's own type, and who asks for float32 products
        gets float32.
        """
        level, asked = self._options.matmul_accuracy_level, self._options.adapter_dtype
        rounds = takes_int8(model, level) and library.matmul_isa() is not None
        allowed: tuple[SlotDtype, ...] = ("float32", "float16", *(INTEGERS if rounds else ()))
        for dtype in allowed:
            if dtype == asked:
                return dtype
        if asked != "auto":
            reason = (
                ""
                if rounds
                else "; integers need quantized weights, products that may round activations to "
                "int8 (matmul_accuracy_level 4) and a processor that our kernels for these know"
            )
            raise ProviderError(
                f"adapter_dtype is {asked!r}; adapters are kept in {', '.join(allowed)} "
                f"here{reason}. Ask for one of these, or for auto"
            )
        if rounds:
            return "int8"
        return "float16" if self._is_half and level != FLOAT32_LEVEL else "float32"

    def num_bytes(self) -> int:
        """Memory that all adapters can take; after `lower`."""
        if self._custom:
            return slots_bytes(self._products, self._spec, self._options, self._dtype)
        return stack_bytes(self._products, self._spec, self._options, STACKED.itemsize)

    def adapters(self) -> Adapters:
        """Empty slots; after `lower`."""
        place = self._place
        if self._custom:
            slots = AdapterSlots(self._products, self._spec, self._options, self._dtype, place)
            return Adapters(self._spec, self._options, slots)
        stacks = AdapterStacks(self._products, self._spec, STACKED, place)
        return Adapters(self._spec, self._options, stacks)
