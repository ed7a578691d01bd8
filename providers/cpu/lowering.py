"""The passes of the `cpu` provider, in order. They take ONNX, which a start may do without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.contract import INT8_LEVEL
from onnxport.graphs.inspect import attribute_int
from onnxport.graphs.manifest import WEIGHT_FILES
from onnxport.graphs.passes.accuracy import set_accuracy
from onnxport.graphs.passes.block_offsets import fuse_block_offsets
from onnxport.graphs.passes.coarse_head import coarse_head_bytes, use_coarse_head
from onnxport.graphs.passes.float_experts import float_expert_weights, use_float_experts
from onnxport.graphs.passes.gated_experts import expert_offsets, use_gated_experts
from onnxport.graphs.passes.gated_gelu import fuse_gated_gelu
from onnxport.graphs.passes.gated_mlp import fuse_gated_mlp, zero_point_bytes
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.gather_rows import use_gather_rows
from onnxport.graphs.passes.group_tables import group_tables
from onnxport.graphs.passes.head_products import head_product_weights, use_head_products
from onnxport.graphs.passes.hidden_states import tell_hidden_states, tell_when_asked
from onnxport.graphs.passes.input_norm import fuse_input_norm
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.kv_dtype import set_kv_dtype
from onnxport.graphs.passes.logits_summaries import summarize_logits
from onnxport.graphs.passes.native import NativeLimits, keep_native
from onnxport.graphs.passes.product_adapters import fuse_product_adapters
from onnxport.graphs.passes.product_bias import fuse_product_bias
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.split_experts import QMOE, split_experts
from onnxport.graphs.passes.state_slots import use_state_slots
from onnxport.graphs.passes.stored_scales import use_stored_scales
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu.caches import CACHE_DTYPES, Layout
from onnxport.providers.cpu.choices import (
    COMPUTE_DTYPE,
    HEAD_SIZE_MULTIPLE,
    LATENT_MULTIPLE,
    MAX_HEAD_SIZE,
    MAX_LATENT_SIZE,
)
from onnxport.providers.graph_cache import Conversion, LoweredGraph
from onnxport.providers.int8_experts import int8_experts
from onnxport.providers.memory_plan import MEMORY_PLAN
from onnxport.providers.ort import weight_bytes

if TYPE_CHECKING:
    from onnxport.providers.host_lora import HostLora

KERNEL_LIMITS: Final = NativeLimits(
    activation_dtypes=frozenset({"float32"}),
    cache_dtypes=frozenset(str(np.dtype(kind)) for kind in CACHE_DTYPES.values()),
    max_head_size=MAX_HEAD_SIZE,
    head_size_multiple=HEAD_SIZE_MULTIPLE,
    chunked_window=True,
)

LATENT_LIMITS: Final = replace(
    KERNEL_LIMITS, latent=True, max_head_size=MAX_LATENT_SIZE, head_size_multiple=LATENT_MULTIPLE
)
CACHE_LAYOUTS: Final[Mapping[Layout, str]] = {"rows": "canonical"}  # others by their own names


def lower(
    graph: onnx.ModelProto,
    artifact: Artifact,
    options: LoadOptions,
    cache: tuple[str, Layout],
    lora: HostLora | None,
    *,
    groups: LayerGroups,
    int8: bool,
    summaries: bool,
) -> Iterator[PassResult]:
    """Apply the passes in turn; the last result holds the graph to run.

    Args:
        graph: the artifact's paged graph.
        artifact: its weights.
        options: `matmul_accuracy_level` and `coarse_head` are used.
        cache: type and layout of the KV caches; "plain" for the decomposed graph.
        lora: adds adapters, if there are to be any.
        groups: layers that share block tables.
        int8: whether the processor has our products with int8 activations.
        summaries: whether these can summarize their outputs.
    """
    cache_dtype, layout = cache
    level = options.matmul_accuracy_level
    is_native = layout != "plain"

    def is_split(node: onnx.NodeProto) -> bool:
        return not _is_run_whole(node, level=level, is_native=is_native, int8=int8)

    step = made = int8_experts(artifact, graph, COMPUTE_DTYPE, is_split)
    yield step
    step = split_experts(step.model, is_split, made)
    yield step
    stored = step.model
    floats: frozenset[str] = frozenset()
    if is_native:
        floats = (
            float_expert_weights(stored) | head_product_weights(stored) | expert_offsets(stored)
        )
    step = retype(stored, artifact.read_tensor, kept=floats)
    yield step
    tells = bool(options.hidden_layers) or options.final_states
    if tells:
        layers, final = options.hidden_layers, options.final_states
        step = tell_hidden_states(step.model, layers, artifact.manifest.model, final=final)
        yield step
    if options.matmul_accuracy_level is not None:
        step = set_accuracy(step.model, options.matmul_accuracy_level)
        yield step
    if lora is not None:
        step = lora.lower(step.model)
        yield step
    if is_native:
        if tells:
            step = tell_when_asked(step.model)
            yield step
        step = use_float_experts(step.model)
        yield step
        step = use_head_products(step.model)
        yield step
        step = use_gather_rows(step.model)
        yield step
        step = use_state_slots(step.model)
        yield step
        step = fuse_gated_silu(step.model)
        yield step
        step = fuse_gated_gelu(step.model)
        yield step
        if int8:
            step = use_int8_matmul(step.model)
            yield step
            step = fuse_block_offsets(step.model, stored)
            yield step
            step = fuse_gated_mlp(step.model)
            yield step
            if lora is not None:
                step = fuse_product_adapters(step.model)
                yield step
            step = fuse_input_norm(step.model)
            yield step
            step = fuse_product_bias(step.model)
            yield step
            step = use_gated_experts(step.model)
            yield step
            step = use_stored_scales(step.model, stored)
            yield step
            if options.coarse_head:
                step = use_coarse_head(step.model)
                yield step
            if summaries:
                step = summarize_logits(step.model)
                yield step
        step = group_tables(step.model, groups)
        yield step
        step = set_kv_dtype(step.model, cache_dtype)
        yield step
        limits = KERNEL_LIMITS if artifact.manifest.model.latent is None else LATENT_LIMITS
        attributes = {"cache_layout": CACHE_LAYOUTS.get(layout, layout)}
        yield keep_native(step.model, replace(limits, attributes=attributes))
    else:
        from onnxport.graphs.passes.decompose import decompose
        from onnxport.graphs.passes.decompose_linear import decompose_linear

        step = group_tables(step.model, groups)
        yield step
        step = decompose(step.model)
        yield step
        yield decompose_linear(step.model)


def _is_run_whole(node: onnx.NodeProto, *, level: int | None, is_native: bool, int8: bool) -> bool:
    """Whether an operator of ours computes experts: floats, or with int8 activations.

    ONNX Runtime's give a row other bits where there are other rows (floats and 4 bits), or round
    activations to int8 at any level (8 bits).
    """
    if node.op_type != QMOE:
        return is_native
    level = attribute_int(node, "accuracy_level", 0) if level is None else level
    return is_native and int8 and level == INT8_LEVEL


def converted(steps: Sequence[PassResult]) -> dict[str, NDArray[Any]]:
    """The initializers of the last graph whose contents a pass made and left beside it."""
    left = {tensor.name for tensor in steps[-1].model.graph.initializer}
    return {name: value for step in steps for name, value in step.attached.items() if name in left}


def lowered_graph(
    artifact: Artifact, steps: Sequence[PassResult], *, is_exact: bool, is_native: bool
) -> LoweredGraph:
    """What the passes made, as a cache keeps it.

    Args:
        artifact: whose graph it was.
        steps: what `lower` yielded.
        is_exact: whether the graph's products are in float32.
        is_native: whether it has our kernels: sizes depend on nothing but the number of tokens.
    """
    model = steps[-1].model
    if is_native:
        model = _name_plans(model)
    sources = {name: tensor for step in steps for name, tensor in step.sources.items()}
    conversions = [
        _conversion(artifact, name, value, sources.get(name))
        for name, value in converted(steps).items()
    ]
    known = tuple(one for one in conversions if one is not None)
    return LoweredGraph(
        model=model.SerializeToString(),
        is_exact=is_exact,
        stored_bytes=weight_bytes(model, {}) + coarse_head_bytes(model) + zero_point_bytes(model),
        conversions=known if len(known) == len(conversions) else None,
    )


def _name_plans(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with the input MEMORY_PLAN."""
    named = onnx.ModelProto()
    named.CopyFrom(model)
    shape = [MEMORY_PLAN, 0]
    value = onnx.helper.make_tensor_value_info(MEMORY_PLAN, onnx.TensorProto.INT8, shape)
    named.graph.input.append(value)
    return named


def _conversion(
    artifact: Artifact, name: str, value: NDArray[Any], source: onnx.TensorProto | None
) -> Conversion | None:
    """How an attached initializer is made again of a weights file; None: it cannot be."""
    if source is None or source.data_location != onnx.TensorProto.EXTERNAL:
        return None
    location, offset, _ = artifact.external(source)
    if location not in WEIGHT_FILES:
        return None
    stored = str(numpy_dtype(source.data_type))
    return Conversion(name, location, offset, tuple(source.dims), stored, str(value.dtype))
