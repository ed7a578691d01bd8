"""A paged graph on a device that ONNX Runtime drives: what its execution providers have in common.

A provider describes its device in a `Recipe` and says where it is in a `Target`; the lowering, the
caches in device memory and the checks are the same for all. With `emulate` the CPU stands in for
the device: it runs the very graph that the device would get, with the same shapes, padding and
bindings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.block_transfers import zeros_graph
from onnxport.graphs.lora import LoraProduct
from onnxport.graphs.passes.accuracy import set_accuracy
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.passes.emulated_attention import emulate_attention
from onnxport.graphs.passes.join_products import join_products
from onnxport.graphs.passes.lora import add_lora, lora_products
from onnxport.graphs.passes.native import keep_native
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.split_experts import split_experts
from onnxport.graphs.passes.write_gelu import write_gelu
from onnxport.graphs.passes.write_min_max import write_min_max
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers import memory
from onnxport.providers.adapters import Adapters, AdapterStacks, check_stack_dtype, stack_bytes
from onnxport.providers.base import Attention, Capabilities, KVFormat, LoadOptions
from onnxport.providers.buckets import Buckets
from onnxport.providers.cpu.library import find_library
from onnxport.providers.device_arrays import DeviceArrays
from onnxport.providers.device_blocks import DeviceBlocks, cache_shape, device_caches
from onnxport.providers.device_logits import DeviceLogits
from onnxport.providers.int8_experts import int8_experts
from onnxport.providers.ort import (
    CPU,
    Target,
    ort_value,
    quiet_options,
    start_session,
    weight_bytes,
)
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.placement import check_host_operators, host_operators, placement
from onnxport.providers.pool import PoolPlan, plan_pool
from onnxport.providers.recipe import Recipe
from onnxport.providers.replay import DecodeReplay
from onnxport.providers.step_memory import StepMemory

logger = logging.getLogger(__name__)

PLAIN_BLOCK_SIZE: Final = 16  # tokens, of the decomposed graph
TRANSFER_BLOCKS: Final = 8  # moved at a time by devices that compile a graph for each shape
BUCKET_TOKENS: Final = 2048  # most tokens of a step, on devices that compile for shapes
BUCKET_ROWS: Final = 256  # most sequences of a step there
MOST_PADDING: Final = 4  # times: tokens and blocks are less than doubled, each
TYPES: Final = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}


def load_on_device(
    artifact: Artifact, options: LoadOptions, recipe: Recipe, target: Target, *, emulate: bool
) -> OrtModel:
    """Lower an artifact for a device and start it.

    Raises:
        ProviderError: an option does not fit, the device does not start, or it leaves nodes to
            the host that are not allowed there.
        CapacityError: weights or cache do not fit.
    """
    if emulate:
        dtypes = tuple(name for name in recipe.dtypes if name != "bfloat16")
        recipe = replace(recipe, dtypes=dtypes, free_bytes=memory.available_bytes())
        target = CPU
    if options.capture_graphs and recipe.capture_options is None:
        raise ProviderError(
            f"capture_graphs was asked for; the {recipe.provider} provider has nothing to replay, "
            "leave it out"
        )
    lowering = _Lowering(artifact, options, recipe, emulate=emulate)
    if options.capture_graphs and lowering.attention != "native":
        raise ProviderError(
            "capture_graphs was asked for; only steps with native attention can be replayed, and "
            f"it is decomposed here: {lowering.why_decomposed}"
        )
    captures = options.capture_graphs
    if captures is None:
        can = recipe.capture_options is not None and lowering.attention == "native"
        captures = can and not emulate
    steps = list(lowering.steps())
    for step in steps:
        logger.info("%s: %s", artifact.path.name, step)
    model = steps[-1].model
    attached_to = {tensor.name for tensor in model.graph.initializer}
    made = (item for step in steps for item in step.attached.items())
    converted = {name: value for name, value in made if name in attached_to}
    spec, item_bytes = artifact.manifest.model, numpy_dtype(TYPES[lowering.dtype]).itemsize
    # What was converted stays in the host's memory; a device has a copy of its own.
    held_bytes = weight_bytes(model, converted if target.is_host else {})
    held_bytes += lowering.adapter_bytes()
    if captures:
        held_bytes += BUCKET_ROWS * spec.vocab_size * 4  # logits, which have a place of their own
    pool = plan_pool(
        spec,
        options,
        block_size=lowering.block_size,
        item_bytes=item_bytes,
        free_bytes=recipe.free_bytes,
        weight_bytes=held_bytes,
        buffer_bytes=recipe.buffer_bytes,
    )
    attached = {name: ort_value(value) for name, value in converted.items()}
    session_options = _session_options(options, custom=emulate and lowering.attention == "native")
    session_options.add_external_initializers(list(attached), list(attached.values()))
    session = start_session(
        model.SerializeToString(),
        artifact.path,
        session_options,
        # The small graphs beside it are not recorded: a run that is replayed has no new outputs.
        _recording(target, recipe) if captures else target,
    )
    on_host: dict[str, int] = {}
    if not target.is_host:
        on_host = dict(host_operators(session, model))
        check_host_operators(
            on_host, recipe.expected_on_host, options.allowed_on_host, recipe.provider
        )
    shape = cache_shape(model, spec.num_layers)
    buckets = _buckets(pool, captures=captures) if recipe.bucketed or captures else None
    spare = max(1, buckets.spare_blocks) if buckets else 0
    caches = device_caches(shape, pool.num_blocks + spare, pool.block_size, target)
    group = TRANSFER_BLOCKS if recipe.bucketed else None
    blocks = DeviceBlocks(caches, shape, pool.num_blocks, target, group)
    capabilities = _capabilities(artifact, recipe, lowering, pool)
    capabilities = replace(
        capabilities, placement=placement(session), on_host=on_host, emulated=emulate
    )
    logits, replay = None, None
    if recipe.selects_logits:
        logits = DeviceLogits(spec.vocab_size, target, None if emulate else recipe.page_lock)
    if captures:
        assert logits is not None, "what can replay steps can select logits"
        assert buckets is not None, "what is replayed is padded"
        logits.reserve(buckets.max_rows)
        replay = DecodeReplay(session, caches, target, logits, buckets.widths, pool.block_size)
    step_memory = None
    if lowering.attention == "decomposed" and recipe.free_bytes is not None:
        left_bytes, padding = recipe.free_bytes - held_bytes, MOST_PADDING if buckets else 1
        step_memory = StepMemory.plan(spec, pool, item_bytes, left_bytes, padding)
    return OrtModel(
        session,
        capabilities,
        caches,
        blocks,
        attached,
        buckets,
        replay,
        lowering.adapters(target, steady=captures) if options.max_adapters else None,
        step_memory=step_memory,
        device_logits=logits,
    )


def _recording(target: Target, recipe: Recipe) -> Target:
    """A device that records the runs of a session, where it is not emulated."""
    if target.is_host:
        return target
    return replace(target, options={**target.options, **(recipe.capture_options or {})})


class _Lowering:
    """What becomes of an artifact's graph, decided from the options and the recipe."""

    def __init__(
        self, artifact: Artifact, options: LoadOptions, recipe: Recipe, *, emulate: bool
    ) -> None:
        self._artifact = artifact
        self.options = options
        self._recipe = recipe
        self._emulate = emulate
        self._graph = artifact.load_graph("paged")
        self.dtype = self._choose_dtype()
        self._int8 = int8_experts(artifact, self._graph, self.dtype)
        self._split = split_experts(self._int8.model, made=self._int8)
        self._graph = self._split.model
        self.why_decomposed = ""
        self.attention = self._choose_attention()
        self.block_size = self._choose_block_size()

    def steps(self) -> Iterator[PassResult]:
        """Apply the passes in turn; the last result holds the graph to run."""
        options, recipe = self.options, self._recipe
        yield self._int8
        yield self._split
        step = self._retyped
        yield step
        if recipe.joins_products:
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
        if options.max_adapters:
            check_stack_dtype(options, self.dtype)
            step = add_lora(step.model, self._artifact.manifest.model)
            yield step
        if self.attention == "decomposed":
            yield decompose(step.model, bounds="shapes" if recipe.bucketed else "metadata")
            return
        assert recipe.native is not None
        step = keep_native(step.model, recipe.native)
        yield step
        if self._emulate:
            yield emulate_attention(step.model)

    def adapter_bytes(self) -> int:
        """Memory of a full stack of adapters."""
        if not self.options.max_adapters:
            return 0
        item_bytes = numpy_dtype(TYPES[self.dtype]).itemsize
        return stack_bytes(*self._adapted(), self.options, item_bytes)

    def adapters(self, target: Target, *, steady: bool) -> Adapters:
        """Slots for adapters, of a device; `steady` where it replays steps."""
        products, spec = self._adapted()
        stacks = AdapterStacks(
            products,
            spec,
            numpy_dtype(TYPES[self.dtype]),
            DeviceArrays(target, steady=steady),
            few_shapes=self._recipe.bucketed,
            steady=steady,
        )
        return Adapters(spec, self.options, stacks)

    def _adapted(self) -> tuple[list[LoraProduct], ArchSpec]:
        """What adapters add to."""
        spec = self._artifact.manifest.model
        return lora_products(self._retyped.model, spec), spec

    @cached_property
    def _retyped(self) -> PassResult:
        """The graph in the type of the activations; it is looked at before it is lowered."""
        has_halves = self._recipe.dtypes != ("float32",)
        return retype(self._graph, self._artifact.read_tensor, self.dtype, keep_tables=has_halves)

    def _read(self, tensor: TensorProto) -> NDArray[Any]:
        """An initializer of the graph in the type of the activations."""
        made = self._retyped.attached.get(tensor.name, self._split.attached.get(tensor.name))
        return self._artifact.read_tensor(tensor) if made is None else made

    def _choose_dtype(self) -> str:
        """The type of activations and cache."""
        asked, allowed = self.options.dtype, self._recipe.dtypes
        cache = next(i for i in self._graph.graph.input if i.name == contract.past_key(0))
        stored = cache.type.tensor_type.elem_type
        own = next(name for name, kind in TYPES.items() if kind == stored)
        if asked not in ("auto", *allowed):
            raise ProviderError(
                f"dtype is {asked!r}; the {self._recipe.provider} provider computes in "
                f"{', '.join(allowed)} on {self._recipe.device}, ask for one of these or auto"
            )
        dtype = asked if asked != "auto" else own if own in allowed else allowed[0]
        if self.options.kv_cache_dtype not in ("auto", dtype):
            raise ProviderError(
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
        if self._emulate and find_library() is None:
            return "the C++ kernel that would stand in for it was not built"
        try:
            keep_native(self._retyped.model, limits)
        except ProviderError as error:
            return str(error)
        return ""

    def _choose_block_size(self) -> int:
        native = self.attention == "native"
        spec = self._artifact.manifest.model
        default = self._recipe.native_block_size(spec.head_size) if native else PLAIN_BLOCK_SIZE
        size = self.options.block_size or default
        power = size >= 16 and size & (size - 1) == 0
        if native and self._recipe.block_size_power and not power:
            raise ProviderError(
                f"block_size is {size}; {self._recipe.provider}'s PagedAttention takes powers of "
                f"two of at least 16, {default} by default"
            )
        return size


def _buckets(pool: PoolPlan, *, captures: bool) -> Buckets:
    limits = (BUCKET_TOKENS, BUCKET_ROWS, pool.max_model_len, pool.block_size)
    # A native PagedAttention looks up the blocks that there are; how wide the table is, is nothing.
    return Buckets(*limits, few_widths=captures)


def no_native_blocks(head_size: int) -> int:
    """The block size of a device without a PagedAttention of its own: there is none."""
    raise AssertionError("asked for the blocks of a PagedAttention that is not there")


def why_not_started(target: Target) -> str:
    """Why an execution provider does not start; "" where it does."""
    model = zeros_graph(TensorProto.FLOAT).SerializeToString()
    try:
        start_session(model, None, quiet_options(), target)
    except ProviderError as error:
        return str(error).strip()
    return ""


def _capabilities(
    artifact: Artifact, recipe: Recipe, lowering: _Lowering, pool: PoolPlan
) -> Capabilities:
    spec, options = artifact.manifest.model, lowering.options
    return Capabilities(
        provider=recipe.provider,
        device=recipe.device,
        attention=lowering.attention,
        compute_dtype=lowering.dtype,
        kv_cache_dtype=lowering.dtype,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        kv_block_bytes=pool.block_bytes,
        kv_format=KVFormat.of(artifact, lowering.dtype),
        max_model_len=pool.max_model_len,
        vocab_size=spec.vocab_size,
        max_batch_rows=BUCKET_ROWS if recipe.bucketed else recipe.max_batch_rows,
        max_batch_tokens=BUCKET_TOKENS if recipe.bucketed else None,
        placement={},
        max_adapters=options.max_adapters,
        max_adapter_rank=options.max_adapter_rank if options.max_adapters else 0,
        takes_exact_logits=recipe.selects_logits,
        summarizes_logits=recipe.selects_logits,
    )


def _session_options(options: LoadOptions, *, custom: bool) -> Any:
    """Options of the model's session; with our own kernels where `custom`."""
    chosen = quiet_options()
    chosen.intra_op_num_threads = options.threads or memory.physical_cores()
    if custom:
        chosen.register_custom_ops_library(str(find_library()))
    return chosen
