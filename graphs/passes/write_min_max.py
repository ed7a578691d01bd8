"""Write Min and Max of a number out, for devices that have neither for floats.

`max(x, number)` is `Where(x < number, number, x)`, which leaves what is no number as it is, as Max
does.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types, initializers, names
from onnxport.graphs.passes.result import PassResult, copy_model

_COMPARISONS: Final = {"Max": "Less", "Min": "Greater"}  # of x with the number that replaces it
_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


def write_min_max(model: onnx.ModelProto) -> PassResult:
    """Replace Min and Max of a value and a number that is stored, where both are floats.

    Integers, which are the host's, and others stay.
    """
    copy = copy_model(model)
    types, stored = element_types(model), initializers(model)

    def fits(node: onnx.NodeProto) -> bool:
        is_either = node.op_type in _COMPARISONS and node.domain == "" and len(node.input) == 2
        if not is_either or types.get(node.input[0]) not in _FLOATS:
            return False
        number = stored.get(node.input[1])
        return number is not None and not number.dims and node.input[0] not in stored

    found = [node for node in model.graph.node if fits(node)]
    if not found:
        return PassResult("write_min_max", copy, {})
    g = GraphBuilder("min_max")
    g.reserve(names(model) - {node.output[0] for node in found})
    del copy.graph.node[:]
    for node in model.graph.node:
        if not fits(node):
            copy.graph.node.append(node)
            continue
        x, number = node.input
        with g.scope(node.name):
            beyond = g.node(_COMPARISONS[node.op_type], [x, number], name="beyond")
            g.node("Where", [beyond, number, x], outputs=[node.output[0]], name="chosen")
        copy.graph.node.extend(g.take_nodes())
    return PassResult("write_min_max", copy, {"minima and maxima written out": len(found)})
