"""Leave PagedAttention to a device that has it, inside the limits that it declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from onnxport.errors import ProviderError
from onnxport.graphs.inspect import element_types, initializers, producers, set_attribute
from onnxport.graphs.paged import (
    PagedAttentionNode,
    PagedInput,
    attention_nodes,
    is_paged_attention,
    rotary_dim,
)
from onnxport.graphs.passes.result import PassResult, copy_model


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLimits:
    """What a device's PagedAttention accepts; a provider declares it."""

    activation_dtypes: frozenset[str]  # float32, float16, bfloat16
    cache_dtypes: frozenset[str]  # the same, int8, and uint8, which int4 lies in
    max_head_size: int
    head_size_multiple: int = 8  # head sizes are multiples of this
    rotary_multiple: int = 2  # likewise what rotates of a head, and heads of which some rotates
    softcap: bool = True
    local_window: bool = True
    chunked_window: bool = False
    head_sink: bool = True
    qk_norm: bool = True  # fused, through the operator's inputs
    rotary_interleaved: bool = True
    separate_qkv: bool = True
    slot_mapping: bool = True
    non_causal: bool = True
    latent: bool = False  # kv_cache_layout LATENT, rotary_offset: multi-head latent attention
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)  # added to each node


def keep_native(model: onnx.ModelProto, limits: NativeLimits) -> PassResult:
    """Check every PagedAttention against a device's limits, and add the device's attributes.

    Args:
        model: A paged graph, already in the types that the device computes in.
        limits: What the device accepts, and what its own kernel wants to be told.

    Raises:
        ProviderError: The graph has no PagedAttention, or nodes are outside the limits; the
            message lists every violation.
    """
    layers = attention_nodes(model)
    if not layers:
        raise ProviderError("native attention was asked for, but the graph has no PagedAttention")
    types = element_types(model)
    tables, makers = initializers(model), producers(model)
    problems: dict[str, list[str]] = {}
    for layer in layers:
        for problem in _violations(layer, limits, types, rotary_dim(layer, tables, makers)):
            problems.setdefault(problem, []).append(layer.name)
    if problems:
        found = "; ".join(f"{what} (in {len(where)} layers)" for what, where in problems.items())
        raise ProviderError(
            f"this device's PagedAttention does not take the model: {found}. Use the decomposed "
            "attention, or another provider."
        )
    copy = copy_model(model)
    nodes = [node for node in copy.graph.node if is_paged_attention(node)]
    for node in nodes:
        for name, value in limits.attributes.items():
            set_attribute(node, name, value)
    return PassResult("native", copy, {"PagedAttention kept": len(nodes)})


def _violations(
    layer: PagedAttentionNode, limits: NativeLimits, types: Mapping[str, int], rotary: int | None
) -> Iterator[str]:
    """What of one node a device does not accept."""
    for what, position, allowed in (
        ("activations", PagedInput.QUERY, limits.activation_dtypes),
        ("a KV cache", PagedInput.KEY_CACHE, limits.cache_dtypes),
        ("a KV cache", PagedInput.VALUE_CACHE, limits.cache_dtypes),
    ):
        if position == PagedInput.VALUE_CACHE and layer.is_latent:
            continue
        kind = types.get(layer.input(position))
        name = "an unknown type" if kind is None else TensorProto.DataType.Name(kind).lower()
        name = "float32" if name == "float" else name
        if name not in allowed:
            yield f"{what} of {name}, allowed are {sorted(allowed)}"
    if layer.head_size > limits.max_head_size or layer.head_size % limits.head_size_multiple:
        yield (
            f"head size {layer.head_size}, allowed are multiples of {limits.head_size_multiple} "
            f"up to {limits.max_head_size}"
        )
    if layer.v_head_size % limits.head_size_multiple:
        yield (
            f"values of {layer.v_head_size} channels, allowed are multiples of "
            f"{limits.head_size_multiple}"
        )
    multiple = limits.rotary_multiple
    if layer.do_rotary and (layer.head_size % multiple or (rotary or 0) % multiple):
        yield (
            f"RoPE of {rotary} of {layer.head_size} channels, allowed are multiples of {multiple} "
            "for both"
        )
    latent = layer.is_latent or layer.rotary_offset != 0
    for used, allowed_here, what in (
        (layer.softcap != 0, limits.softcap, "softcap"),
        (layer.local_window_size is not None, limits.local_window, "a sliding window"),
        (layer.local_window_chunked, limits.chunked_window, "attention in chunks"),
        (bool(layer.input(PagedInput.HEAD_SINK)), limits.head_sink, "head sinks"),
        (bool(layer.input(PagedInput.Q_NORM_WEIGHT)), limits.qk_norm, "a fused QK norm"),
        (layer.rotary_interleaved, limits.rotary_interleaved, "interleaved RoPE"),
        (not layer.is_packed, limits.separate_qkv, "separate Q, K and V"),
        (bool(layer.input(PagedInput.SLOT_MAPPING)), limits.slot_mapping, "a slot mapping"),
        (not layer.is_causal, limits.non_causal, "attention that is not causal"),
        (latent, limits.latent, "a latent KV cache"),
    ):
        if used and not allowed_here:
            yield what
