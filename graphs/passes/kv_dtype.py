"""Store the paged KV cache in another element type than the activations."""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto

from onnxport.cache_rows import INT4, INT8, row_elements
from onnxport.errors import ArtifactError
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.paged import (
    PER_GROUP,
    PER_TOKEN,
    PagedInput,
    attention_nodes,
    is_paged_attention,
)
from onnxport.graphs.passes.result import PassResult, copy_model

KV_DTYPES: Final = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    INT8: TensorProto.INT8,
    INT4: TensorProto.UINT8,
}
GRANULARITIES: Final = {INT8: PER_TOKEN, INT4: PER_GROUP}


def set_kv_dtype(model: onnx.ModelProto, dtype: str) -> PassResult:
    """Set the element type of the cache inputs and outputs; the operator converts.

    In int8 and int4 each token's keys, and its values, of a head have scales that the operator
    computes when it writes them. They lie beside the numbers, so the caches' last dimension becomes
    that of such rows (`onnxport.cache_rows`), and the nodes get a granularity that our CPU kernel
    alone understands.

    Args:
        model: A paged graph whose PagedAttention nodes are still there.
        dtype: One of KV_DTYPES. Types other than the activations' need a kernel (or, but for
            integers, the decomposed graph) that accepts them.

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
        if dtype in GRANULARITIES:
            kind.shape.dim[3].dim_value = row_elements(dtype, widths[info.name])
        changed += 1
    if granularity := GRANULARITIES.get(dtype):
        for node in (node for node in copy.graph.node if is_paged_attention(node)):
            set_attribute(node, "k_quant_type", granularity)
            if node.input[
                PagedInput.VALUE_CACHE
            ]:  # of a latent cache the schema wants none for values
                set_attribute(node, "v_quant_type", granularity)
    return PassResult("kv_dtype", copy, {f"caches to {dtype}": changed})
