"""What the plugins of OpenVINO's devices have in common, and what each must say of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from onnxport.providers.base import LoadOptions
from onnxport.providers.features import Features
from onnxport.providers.openvino.caches import CacheFormat
from onnxport.providers.openvino.tensors import TensorPair
from onnxport.providers.transfers import Blocks

NAMES: Final = {  # OpenVINO's element types -> ours, of activations and caches
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "u8": "int8",
}
PRECISIONS: Final = {1: "f32", 2: "f16", 3: "bf16"}  # matmul_accuracy_level -> inference precision

QUANTIZATION_GROUP: Final = "DYNAMIC_QUANTIZATION_GROUP_SIZE"  # 0: no activations in int8


@dataclass(frozen=True, slots=True)
class Build:
    """How to compile a graph."""

    most_tokens: int | None  # that one run of it should have; None: any number
    config: Mapping[str, Any]  # the plugin's properties

    @property
    def quantizes(self) -> bool:
        """Whether activations may be rounded to int8, in groups."""
        return self.config.get(QUANTIZATION_GROUP) != 0


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for weights and caches."""

    free_bytes: int | None  # None: not known; before anything is loaded
    weight_bytes: int  # what the weights will take of it
    buffer_bytes: int | None  # the largest buffer; None: no limit


class Plugin(Protocol):
    """One device as OpenVINO drives it."""

    @property
    def device(self) -> str:
        """As OpenVINO names it: CPU, GPU.1."""
        ...

    @property
    def transposed_keys(self) -> bool:
        """Whether a block of keys is stored as channels of tokens, not as tokens of channels."""
        ...

    @property
    def takes_extensions(self) -> bool:
        """Whether it runs the operator of our extension, which computes on the host."""
        ...

    @property
    def gathers_experts(self) -> bool:
        """Whether it gives tokens to some experts alone where they are written as its pattern."""
        ...

    @property
    def proven(self) -> bool:
        """Whether we ran it; the attention of others must pass a test before it is used."""
        ...

    @property
    def wrong(self) -> Mapping[str, str]:
        """Types of activations that it computes wrongly; what to tell who asks for one."""
        ...

    def features(self, core: Any) -> Features:
        """What it can do on this machine; its own choice of a type comes first."""
        ...

    def check(self, options: LoadOptions) -> None:
        """Refuse, as ProviderError, what it never has, before anything is read."""
        ...

    def builds(self, core: Any, options: LoadOptions, level: int) -> Sequence[Build]:
        """How often and how to compile; the last one takes any number of tokens.

        Args:
            core: openvino.Core.
            options: that `check` let pass.
            level: what products may round their activations to, see graphs.passes.accuracy.
        """
        ...

    def room(self, core: Any, weight_bytes: int, num_graphs: int, host_bytes: int) -> Room:
        """What memory there is, for weights of `weight_bytes` as they are stored.

        Args:
            core: openvino.Core.
            weight_bytes: of all initializers.
            num_graphs: that are compiled.
            host_bytes: that the host had before any of that was read.
        """
        ...

    def allocate(
        self, core: Any, form: CacheFormat, num_layers: int, num_blocks: int
    ) -> tuple[list[TensorPair], Blocks]:
        """Zeroed caches of each layer, and what moves their blocks.

        Raises whatever OpenVINO raises.
        """
        ...
