"""Gated attention: what heads found is times a function of a product of what the layer reads."""

from __future__ import annotations

from onnx import TensorProto

from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.whole_vectors import in_whole_vectors


def gated(
    g: GraphBuilder,
    spec: ArchSpec,
    layer: int,
    attended: str,
    product: str,
    *,
    leading: tuple[int, ...],
    dtype: int,
) -> str:
    """`attended` times the gates of its heads, or of each channel.

    Args:
        g: The builder.
        spec: The model.
        layer: Of it.
        attended: What heads found, [..., query heads * head_size].
        product: What gates are made of, [..., `spec.gate_size(layer)`].
        leading: reshape dimensions before the last: (0,) or (0, 0).
        dtype: Both's element type.
    """
    part = _gates(g, spec, layer, product, dtype)
    if not spec.head_gates:
        return g.node("Mul", [attended, part], name="attention.gated")
    size = spec.head_size
    heads = ops.reshape(g, attended, (*leading, -1, size), "attention.heads")
    apart = ops.reshape(g, part, (*leading, -1, 1), "attention_gate.heads")
    found = g.node("Mul", [heads, apart], name="attention.gated")
    width = spec.query_heads(layer) * size
    return ops.reshape(g, found, (*leading, width), "attention.join")


def _gates(g: GraphBuilder, spec: ArchSpec, layer: int, product: str, dtype: int) -> str:
    """The sigmoid of a product, or its softplus, which is computed in float32."""
    if not spec.softplus_gates:
        return g.node("Sigmoid", [product], name="attention_gate.sigmoid")
    wide, name = product, "attention_gate.softplus"
    if dtype != TensorProto.FLOAT:
        wide = ops.cast(g, product, TensorProto.FLOAT, "attention_gate.wide")
    found = in_whole_vectors(g, "Softplus", wide, spec.gate_size(layer), name)
    return found if dtype == TensorProto.FLOAT else ops.cast(g, found, dtype, f"{name}.cast")
