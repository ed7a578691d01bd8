"""Let our CPU kernels stand in for another device's own, in 16-bit activations.

The kernels take float32 activations. A graph that was lowered for a device keeps its own types,
caches and adapters included; only around each PagedAttention and AddLora are activations brought to
float32 and back. What the device rounds to 16 bits between operators is rounded here too, not what
it rounds within.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import onnx
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types, names
from onnxport.graphs.ops import cast
from onnxport.graphs.paged import PagedInput, is_paged_attention
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.lora import ADD_LORA
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.retype import HALF_TYPES

# The inputs that the operators' schemas want in the type of the activations.
_OF_ATTENTION: Final = (
    PagedInput.QUERY,
    PagedInput.KEY,
    PagedInput.VALUE,
    PagedInput.COS,
    PagedInput.SIN,
    PagedInput.HEAD_SINK,
    PagedInput.Q_NORM_WEIGHT,
    PagedInput.K_NORM_WEIGHT,
)
_OF_LORA: Final = (0, 1)


def emulate_kernels(model: onnx.ModelProto) -> PassResult:
    """Give PagedAttention and AddLora of 16-bit activations float32 ones, and cast outputs back.

    Caches and adapters keep their type, and nodes their attributes, whatever device understands
    them. What several nodes read, such as a RoPE table, is cast once.

    Args:
        model: A paged graph, lowered for a device that has the operators.

    Raises:
        ArtifactError: The type of a node's activations is unknown.
    """
    copy = copy_model(model)
    types = element_types(copy)
    g = GraphBuilder("emulated")
    g.reserve(names(copy) - {node.output[0] for node in copy.graph.node if _activations(node)})
    wide: dict[str, str] = {}  # 16-bit value -> the same in float32
    nodes: list[onnx.NodeProto] = []
    changed: Counter[str] = Counter()
    for original in model.graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        positions = _activations(node)
        if not positions:
            nodes.append(node)
            continue
        kind = types.get(node.input[positions[0]])
        if kind is None:
            raise ArtifactError(f"emulate_kernels: the types of {node.name!r} are unknown")
        if kind in HALF_TYPES:
            changed[f"{node.op_type} in float32"] += 1
            nodes += _surrounded(g, node, positions, kind, wide)
        else:
            nodes.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return PassResult("emulate_kernels", copy, dict(changed))


def _activations(node: onnx.NodeProto) -> Sequence[int]:
    """The inputs of an operator that are activations; none of one that is left alone."""
    if is_paged_attention(node):
        return _OF_ATTENTION
    return _OF_LORA if (node.op_type, node.domain) == (ADD_LORA, DOMAIN) else ()


def _surrounded(
    g: GraphBuilder,
    node: onnx.NodeProto,
    positions: Sequence[int],
    kind: int,
    wide: dict[str, str],
) -> list[onnx.NodeProto]:
    """The node between its Casts; `wide` knows what is cast already."""
    with g.scope(node.name or node.output[0]):
        for position in positions:
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
