"""Let our CPU kernel stand in for another device's PagedAttention in 16-bit activations.

The kernel takes float32 activations. A graph that was lowered for a device keeps its own types,
caches included; only around each PagedAttention are activations brought to float32 and back. What
the device rounds to 16 bits between operators is rounded here too, not what it rounds within.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types, names
from onnxport.graphs.ops import cast
from onnxport.graphs.paged import PagedInput, is_paged_attention
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.retype import HALF_TYPES

# The inputs that the operator's schema wants in the type of the activations.
_ACTIVATIONS = (
    PagedInput.QUERY,
    PagedInput.KEY,
    PagedInput.VALUE,
    PagedInput.COS,
    PagedInput.SIN,
    PagedInput.HEAD_SINK,
    PagedInput.Q_NORM_WEIGHT,
    PagedInput.K_NORM_WEIGHT,
)


def emulate_attention(model: onnx.ModelProto) -> PassResult:
    """Give every PagedAttention of 16-bit activations float32 ones, and cast its output back.

    Caches keep their type, and nodes their attributes, whatever device understands them. What
    several nodes read, such as a RoPE table, is cast once.

    Args:
        model: A paged graph, lowered for a device that has the operator.

    Raises:
        ArtifactError: The type of a node's activations is unknown.
    """
    copy = copy_model(model)
    types = element_types(copy)
    g = GraphBuilder("emulated")
    g.reserve(names(copy) - {n.output[0] for n in copy.graph.node if is_paged_attention(n)})
    wide: dict[str, str] = {}  # 16-bit value -> the same in float32
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for original in model.graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        if not is_paged_attention(node):
            nodes.append(node)
            continue
        kind = types.get(node.input[PagedInput.QUERY])
        if kind is None:
            raise ArtifactError(f"emulate_attention: the types of {node.name!r} are unknown")
        if kind in HALF_TYPES:
            changed += 1
            nodes += _surrounded(g, node, kind, wide)
        else:
            nodes.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    changes = {"PagedAttention in float32": changed} if changed else {}
    return PassResult("emulate_attention", copy, changes)


def _surrounded(
    g: GraphBuilder, node: onnx.NodeProto, kind: int, wide: dict[str, str]
) -> list[onnx.NodeProto]:
    """The node between its Casts; `wide` knows what is cast already."""
    with g.scope(node.name or node.output[0]):
        for position in _ACTIVATIONS:
            name = node.input[position] if position < len(node.input) else ""
            if name and name not in wide:
                wide[name] = cast(g, name, TensorProto.FLOAT, "float32")
            if name:
                node.input[position] = wide[name]
        before = g.take_nodes()
        result, inner = node.output[0], f"{node.output[0]}.float32"
        node.output[0] = inner
        g.node("Cast", [inner], outputs=[result], name="back", to=kind)
    return [*before, node, *g.take_nodes()]
