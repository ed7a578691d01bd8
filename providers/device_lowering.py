"""What becomes of an artifact's graph on a device that ONNX Runtime drives: choices and passes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.errors import OptionError, ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.paged import attention_nodes
from onnxport.graphs.passes.accuracy import set_accuracy
from onnxport.graphs.passes.chunk_linear import chunk_linear
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.passes.emulated_kernels import emulate_kernels
from onnxport.graphs.passes.group_tables import group_tables
from onnxport.graphs.passes.hidden_states import tell_hidden_states
from onnxport.graphs.passes.join_products import join_products, joined_bytes
from onnxport.graphs.passes.lora import lora_products
from onnxport.graphs.passes.native import keep_native
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import retype, retyped_bytes
from onnxport.graphs.passes.split_experts import split_experts
from onnxport.graphs.passes.write_gelu import write_gelu
from onnxport.graphs.passes.write_min_max import write_min_max
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers import memory
from onnxport.providers.adapters import Adapters
from onnxport.providers.base import LoadOptions
from onnxport.providers.behind_windows import reads_behind_windows
from onnxport.providers.cpu.library import find_library
from onnxport.providers.device_lora import DeviceLora
from onnxport.providers.features import Attention
from onnxport.providers.int8_experts import int8_experts
from onnxport.providers.latents import refuse_latent_adapters
from onnxport.providers.layer_groups import layer_groups
from onnxport.providers.ort import Target
from onnxport.providers.pool import check_made
from onnxport.providers.recipe import Recipe
from onnxport.providers.self_test import distrust, layers_like

logger = logging.getLogger(__name__)

PLAIN_BLOCK_SIZE: Final = 16  # tokens, of the decomposed graph
TYPES: Final = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}


class DeviceLowering:
    """What becomes of an artifact's graph, decided from the options and the recipe.

    Attributes:
        options: of the load.
        dtype: of activations and cache.
        attention: native or decomposed.
        why_decomposed: "" where it is not.
        block_size: tokens of a block.
        groups: layers that share block tables.
    """

    def __init__(
        self,
        artifact: Artifact,
        options: LoadOptions,
        recipe: Recipe,
        target: Target,
        *,
        emulate: bool,
    ) -> None:
        """Decide.

        Args:
            artifact: what is loaded.
            options: of the load.
            recipe: of the device.
            target: the device; its own attention may be tried there.
            emulate: whether the CPU stands in for it.

        Raises:
            ProviderError: An option does not fit.
        """
        self._artifact = artifact
        self.options = options
        self._recipe = recipe
        self._target = target
        self._emulate = emulate
        self._graph = artifact.load_graph("paged")
        self.dtype = self._choose_dtype()
        self._int8 = int8_experts(artifact, self._graph, self.dtype)
        self._split = split_experts(self._int8.model, made=self._int8)
        self._graph = self._split.model
        self.why_decomposed = ""
        self.attention = self._choose_attention()
        self.block_size = self._choose_block_size()
        self.groups = self._choose_groups()
        self._lora = self._choose_lora()

    def steps(self) -> Iterator[PassResult]:
        """Apply the passes in turn; the last result holds the graph to run."""
        options, recipe = self.options, self._recipe
        yield self._int8
        yield self._split
        step = self._retyped
        yield step
        if options.hidden_layers or options.final_states:
            spec, final = self._artifact.manifest.model, options.final_states
            step = tell_hidden_states(step.model, options.hidden_layers, spec, final=final)
            yield step
        if recipe.joins_products:
            check_made(
                memory.available_bytes(),
                memory.total_bytes(),
                joined_bytes(step.model),
                "those of experts, side by side,",
                "choose another provider",
            )
            step = join_products(step.model, self._read)
            yield step
        if options.matmul_accuracy_level is not None:
            step = set_accuracy(step.model, options.matmul_accuracy_level)
            yield step
        if not recipe.has_gelu:
            step = write_gelu(step.model)
            yield step
        if not recipe.has_min_max:
            step = write_min_max(step.model)
            yield step
        if self._lora is not None:
            step = self._lora.lower(step.model)
            yield step
        step = group_tables(step.model, self.groups)
        yield step
        if self.attention == "decomposed":
            step = decompose(step.model, bounds="shapes" if recipe.bucketed else "metadata")
        else:
            assert recipe.native is not None
            step = keep_native(step.model, recipe.native)
        yield step
        if self._artifact.manifest.model.linear is not None:
            step = chunk_linear(step.model)
            yield step
        if self._emulate and self.needs_library is not None:
            step = emulate_kernels(step.model)
            yield step
        if self._lora is not None and (finished := self._lora.finish(step.model)):
            yield finished

    @property
    def needs_library(self) -> Path | None:
        """The library of operators that the graph's session needs."""
        if self._emulate and self.attention == "native":
            return find_library()
        return None if self._lora is None else self._lora.library

    def adapter_bytes(self, *, steady: bool) -> int:
        """Memory of all adapters; `steady` where steps are replayed."""
        return 0 if self._lora is None else self._lora.num_bytes(steady=steady)

    def adapters(self, target: Target, *, steady: bool) -> Adapters | None:
        """Slots for adapters, of a device; `steady` where it replays steps."""
        return None if self._lora is None else self._lora.adapters(target, steady=steady)

    def _choose_lora(self) -> DeviceLora | None:
        """How adapters are computed; None: there are none."""
        if not self.options.max_adapters:
            return None
        refuse_latent_adapters(self._artifact, self.options)
        spec = self._artifact.manifest.model
        return DeviceLora(
            lora_products(self._retyped.model, spec),
            spec,
            self.options,
            self._recipe,
            self._target,
            self.dtype,
            numpy_dtype(TYPES[self.dtype]),
            emulate=self._emulate,
        )

    @cached_property
    def _retyped(self) -> PassResult:
        """The graph in the type of the activations; it is looked at before it is lowered."""
        has_halves = self._recipe.dtypes != ("float32",)
        check_made(
            memory.available_bytes(),
            memory.total_bytes(),
            retyped_bytes(self._graph, self.dtype, keep_tables=has_halves),
            f"those that are stored in another type, as {self.dtype},",
            "choose the dtype that they are stored in",
        )
        return retype(self._graph, self._artifact.read_tensor, self.dtype, keep_tables=has_halves)

    def _read(self, tensor: TensorProto) -> NDArray[Any]:
        """An initializer of the graph in the type of the activations."""
        made = self._retyped.attached.get(tensor.name, self._split.attached.get(tensor.name))
        return self._artifact.read_tensor(tensor) if made is None else made

    def _choose_dtype(self) -> str:
        """The type of activations and cache."""
        asked, allowed = self.options.dtype, self._recipe.dtypes
        spec = self._artifact.manifest.model
        first = contract.past_key(spec.cached_layers[0])
        cache = next(i for i in self._graph.graph.input if i.name == first)
        stored = cache.type.tensor_type.elem_type
        own = next(name for name, kind in TYPES.items() if kind == stored)
        if asked not in ("auto", *allowed):
            raise OptionError(
                f"dtype is {asked!r}; the {self._recipe.provider} provider computes in "
                f"{', '.join(allowed)} on {self._recipe.device}, ask for one of these or auto"
            )
        dtype = asked if asked != "auto" else own if own in allowed else allowed[0]
        if spec.linear is not None and own == "float32" != dtype:
            raise OptionError(
                f"{self._recipe.provider} is to compute in {dtype}, but {self._artifact.path.name} "
                "is stored in float32 and has layers that keep states, parts of which are not to "
                "be rounded; ask for dtype float32, or export another precision than fp32"
            )
        if self.options.kv_cache_dtype not in ("auto", dtype):
            raise OptionError(
                f"kv_cache_dtype is {self.options.kv_cache_dtype!r}; the {self._recipe.provider} "
                f"provider caches in the type of its activations, which is {dtype}: ask for that "
                "or auto, or choose another dtype"
            )
        return dtype

    def _choose_attention(self) -> Attention:
        """Native where the device takes this graph, unless told otherwise."""
        asked = self.options.attention
        if asked == "decomposed":
            self.why_decomposed = "that was asked for"
            return "decomposed"
        if asked == "custom":
            raise ProviderError(
                f"the {self._recipe.provider} provider has no 'custom' attention; ask for native "
                "or decomposed, or leave it out"
            )
        problem = self._why_not_native()
        if problem and asked == "native":
            raise ProviderError(
                f"native attention was asked for on {self._recipe.device}: {problem}"
            )
        if problem:
            self.why_decomposed = problem
            logger.info("%s: attention is decomposed: %s", self._recipe.provider, problem)
        return "decomposed" if problem else "native"

    def _why_not_native(self) -> str:
        """Why the device's own PagedAttention cannot be used; "" where it can."""
        limits = self._recipe.native
        if limits is None:
            return self._recipe.why_not_native or f"{self._recipe.device} has no PagedAttention"
        if self._artifact.manifest.model.has_mixed_layers:
            return (
                "layers differ in their heads, or read keys and values of others, for which the "
                "device's PagedAttention is not used"
            )
        if self._emulate and find_library() is None:
            return "the C++ kernel that would stand in for it was not built"
        try:
            keep_native(self._retyped.model, limits)
        except ProviderError as error:
            return str(error)
        if self._emulate:
            return ""
        layers = layers_like(self._retyped.model, self._native_block_size())
        return distrust(self._target, self.dtype, layers)

    def _native_block_size(self) -> int:
        """The block size of native attention."""
        default = self._recipe.native_block_size(self._artifact.manifest.model.head_size)
        size = self.options.block_size or default
        power = size >= 16 and size & (size - 1) == 0
        if self._recipe.block_size_power and not power:
            raise ProviderError(
                f"block_size is {size}; {self._recipe.provider}'s PagedAttention takes powers of "
                f"two of at least 16, {default} by default"
            )
        return size

    def _choose_block_size(self) -> int:
        if self.attention == "native":
            return self._native_block_size()
        return self.options.block_size or PLAIN_BLOCK_SIZE

    def _choose_groups(self) -> LayerGroups:
        """Several where windows let them and the device can do with it."""
        spec = self._artifact.manifest.model
        groups = layer_groups(spec, self.options)
        reason = self._why_one_table(groups) if groups.has_windows else ""
        if not reason:
            return groups
        name = self._recipe.provider
        logger.info("%s: K/V behind sliding windows are kept, for %s", name, reason)
        return LayerGroups.single(len(spec.cached_layers))

    def _why_one_table(self, groups: LayerGroups) -> str:
        """Why blocks behind a window cannot be used again; "" where they can."""
        if len(groups.windows) > 1 and not self._recipe.shares_caches:
            return f"{self._recipe.device} is not known to take one memory for caches of two layers"
        if self.attention == "native" and not self._emulate:
            layers = attention_nodes(self._retyped.model)
            return reads_behind_windows(self._target, self.dtype, layers, self.block_size)
        return ""
