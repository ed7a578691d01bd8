"""Store the paged KV cache in another element type than the activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs.inspect import names, set_attribute
from onnxport.graphs.paged import PagedInput, attention_nodes, is_paged_attention
from onnxport.graphs.passes.result import PassResult, copy_model

KV_DTYPES: Final = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
}


@dataclass(frozen=True, slots=True)
class KvScales:
    """Symmetric dequantization scales of one layer's int8 cache: value = int8 * scale."""

    key: NDArray[np.float32]  # [1], or [kv_heads, 1, head_size] per channel
    value: NDArray[np.float32]  # likewise


def set_kv_dtype(
    model: onnx.ModelProto, dtype: str, scales: Sequence[KvScales] | None = None
) -> PassResult:
    """Set the element type of the cache inputs and outputs; the operator converts.

    Args:
        model: A paged graph whose PagedAttention nodes are still there.
        dtype: One of KV_DTYPES. Types other than the activations' need a kernel (or the
            decomposed graph) that accepts them.
        scales: One entry a layer for int8, None for the others.

    Raises:
        ValueError: An unknown dtype, or scales that do not fit it.
        ArtifactError: The graph has no PagedAttention, or its cache is quantized already.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"KV cache dtype {dtype!r} is not one of {sorted(KV_DTYPES)}")
    layers = attention_nodes(model)
    if not layers:
        raise ArtifactError("set_kv_dtype: the graph has no PagedAttention")
    if any(layer.k_quant_type != "NONE" or layer.v_quant_type != "NONE" for layer in layers):
        raise ArtifactError("set_kv_dtype: the graph's KV cache is quantized already")
    if (dtype == "int8") != (scales is not None):
        raise ValueError(f"scales are for an int8 cache, and needed there; dtype is {dtype!r}")
    if scales is not None and len(scales) != len(layers):
        raise ValueError(f"{len(scales)} scales for {len(layers)} layers")
    copy = copy_model(model)
    caches = {name for layer in layers for name in layer.inputs[3:5] + layer.outputs[1:3]}
    changed = 0
    for info in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        kind = info.type.tensor_type
        if info.name in caches and kind.elem_type != KV_DTYPES[dtype]:
            kind.elem_type = KV_DTYPES[dtype]
            changed += 1
    if scales is not None:
        nodes = [node for node in copy.graph.node if is_paged_attention(node)]
        for index, (node, layer, scale) in enumerate(zip(nodes, layers, scales, strict=True)):
            channels = (layer.kv_num_heads, 1, layer.head_size)
            _quantize(copy, node, index, scale, channels)
    return PassResult("kv_dtype", copy, {f"caches to {dtype}": changed})


def _quantize(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    layer: int,
    scales: KvScales,
    channels: tuple[int, int, int],
) -> None:
    """Give one node its scale inputs and the attributes that say how they are shaped."""
    taken = names(model)
    missing = len(PagedInput) - len(node.input)
    node.input.extend([""] * missing)
    for prefix, position, scale in (
        ("k", PagedInput.K_SCALE, scales.key),
        ("v", PagedInput.V_SCALE, scales.value),
    ):
        granularity = _granularity(scale, channels)
        set_attribute(node, f"{prefix}_quant_type", granularity)
        name = f"past_key_values.{layer}.{prefix}_scale"
        assert name not in taken, f"{name} is taken"
        node.input[position] = name
        value = np.ascontiguousarray(scale, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    while not node.input[-1]:
        node.input.pop()


def _granularity(scale: NDArray[Any], channels: tuple[int, int, int]) -> str:
    if scale.shape == (1,):
        return "PER_TENSOR"
    if scale.shape == channels:
        return "PER_CHANNEL"
    raise ValueError(f"a scale of shape {scale.shape} is neither (1,) nor {channels}")
