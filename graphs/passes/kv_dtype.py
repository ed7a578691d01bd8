"""Store the paged KV cache in another element type than the activations."""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.paged import (
    PER_TOKEN,
    TOKEN_SCALE_BYTES,
    attention_nodes,
    is_paged_attention,
)
from onnxport.graphs.passes.result import PassResult, copy_model

KV_DTYPES: Final = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
}


def set_kv_dtype(model: onnx.ModelProto, dtype: str) -> PassResult:
    """Set the element type of the cache inputs and outputs; the operator converts.

    In int8 each token's keys, and its values, of a head share a scale that the operator computes
    when it writes them. The scale lies beside them, so the caches' last dimension grows from
    head_size to head_size + TOKEN_SCALE_BYTES, and the nodes get the granularity PER_TOKEN, which
    our CPU kernel alone understands.

    Args:
        model: A paged graph whose PagedAttention nodes are still there.
        dtype: One of KV_DTYPES. Types other than the activations' need a kernel (or, but for
            int8, the decomposed graph) that accepts them.

    Raises:
        ValueError: An unknown dtype.
        ArtifactError: The graph has no PagedAttention, or its cache is quantized already.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"KV cache dtype {dtype!r} is not one of {sorted(KV_DTYPES)}")
    layers = attention_nodes(model)
    if not layers:
        raise ArtifactError("set_kv_dtype: the graph has no PagedAttention")
    if any(layer.is_quantized for layer in layers):
        raise ArtifactError("set_kv_dtype: the graph's KV cache is quantized already")
    copy = copy_model(model)
    widths = {
        name: layer.head_size for layer in layers for name in layer.inputs[3:5] + layer.outputs[1:3]
    }
    changed = 0
    for info in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        kind = info.type.tensor_type
        if info.name not in widths or kind.elem_type == KV_DTYPES[dtype]:
            continue
        kind.elem_type = KV_DTYPES[dtype]
        if dtype == "int8":
            kind.shape.dim[3].dim_value = widths[info.name] + TOKEN_SCALE_BYTES
        changed += 1
    if dtype == "int8":
        for node in (node for node in copy.graph.node if is_paged_attention(node)):
            set_attribute(node, "k_quant_type", PER_TOKEN)
            set_attribute(node, "v_quant_type", PER_TOKEN)
    return PassResult("kv_dtype", copy, {f"caches to {dtype}": changed})
