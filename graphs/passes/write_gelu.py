"""Write ONNX's Gelu out in operators that every device has.

With tanh `x / 2 * (1 + tanh(z))` is `x * sigmoid(2 z)`, which is fewer operators, and keeps its
digits in 16 bits where tanh is near -1. What overflows there on the way is infinite, and its
sigmoid is 0 or 1 as it should be. What is exact is `x / 2 * (1 + erf(x / sqrt(2)))`, which ONNX
Runtime's own Gelu computes in these steps.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types, names
from onnxport.graphs.passes.result import PassResult, copy_model


def write_gelu(model: onnx.ModelProto) -> PassResult:
    """Replace every Gelu, by tanh or exact; constants are in the type of its input."""
    copy = copy_model(model)
    found = [node for node in model.graph.node if _is_gelu(node)]
    if not found:
        return PassResult("write_gelu", copy, {})
    types = element_types(model)
    g = GraphBuilder("gelu")
    g.reserve(names(model) - {node.output[0] for node in found})
    del copy.graph.node[:]
    for node in model.graph.node:
        if _is_gelu(node):
            write = _write_tanh if is_gelu_tanh(node) else _write_exact
            write(g, node, types[node.input[0]])
            copy.graph.node.extend(g.take_nodes())
        else:
            copy.graph.node.append(node)
    copy.graph.initializer.extend(g.build().graph.initializer)
    return PassResult("write_gelu", copy, {"GELUs written out": len(found)})


def is_gelu_tanh(node: onnx.NodeProto) -> bool:
    """Whether a node is ONNX's Gelu, as tanh approximates it."""
    return _is_gelu(node) and _approximation(node) == b"tanh"


def _is_gelu(node: onnx.NodeProto) -> bool:
    known = (b"none", b"tanh")
    return bool(node.op_type == "Gelu" and node.domain == "" and _approximation(node) in known)


def _approximation(node: onnx.NodeProto) -> bytes:
    return next((one.s for one in node.attribute if one.name == "approximate"), b"none")


def _write_tanh(g: GraphBuilder, node: onnx.NodeProto, dtype: int) -> None:
    """`x * sigmoid(x * (linear + cubic * x²))`."""
    x, kind = node.input[0], helper.tensor_dtype_to_np_dtype(dtype)
    linear = g.constant(np.array(2 * ops.GELU_SCALE, kind), "gelu.linear")
    cubic = g.constant(np.array(2 * ops.GELU_SCALE * ops.GELU_CUBE, kind), "gelu.cubic")
    with g.scope(node.name):
        scaled = g.node("Mul", [g.node("Mul", [x, x], name="square"), cubic], name="scaled")
        inner = g.node("Mul", [g.node("Add", [scaled, linear], name="sum"), x], name="inner")
        sigmoid = g.node("Sigmoid", [inner], name="sigmoid")
        g.node("Mul", [x, sigmoid], outputs=[node.output[0]], name="gated")


def _write_exact(g: GraphBuilder, node: onnx.NodeProto, dtype: int) -> None:
    """`x / 2 * (1 + erf(x * sqrt(1 / 2)))`."""
    x, kind = node.input[0], helper.tensor_dtype_to_np_dtype(dtype)
    scale = g.constant(np.array(np.sqrt(0.5), kind), "gelu.scale")
    half = g.constant(np.array(0.5, kind), "gelu.half")
    one = g.constant(np.array(1.0, kind), "gelu.one")
    with g.scope(node.name):
        inner = g.node("Mul", [x, scale], name="inner")
        sum_ = g.node("Add", [g.node("Erf", [inner], name="erf"), one], name="sum")
        halved = g.node("Mul", [x, half], name="halved")
        g.node("Mul", [halved, sum_], outputs=[node.output[0]], name="gated")
