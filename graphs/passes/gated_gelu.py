"""Fuse the gate of a gated feed-forward layer that has a GELU, as `gated_silu` does with a SiLU.

`onnxport.GatedGelu` is one pass over the joined projection, instead of a `Split` into gate and up,
ONNX's `Gelu` and a product. For devices whose operator library has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx

from onnxport.graphs.inspect import attribute_int, consumers
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.write_gelu import is_gelu_tanh

GATED_GELU: Final = "GatedGelu"  # [..., 2 * inner] -> [..., inner], gates first


@dataclass(frozen=True, slots=True)
class _Gate:
    split: onnx.NodeProto
    gelu: onnx.NodeProto
    product: onnx.NodeProto


def fuse_gated_gelu(model: onnx.ModelProto) -> PassResult:
    """Replace every `Split, Gelu, Mul` that is a gated GELU, as tanh approximates it.

    A pattern fires only where the Split halves the last axis and nothing else reads what it
    leaves out: the halves and the activated gate are neither graph outputs nor inputs of other
    nodes.
    """
    readers = {name: [node for node, _ in nodes] for name, nodes in consumers(model).items()}
    outputs = {info.name for info in model.graph.output}
    found = [gate for node in model.graph.node if (gate := _match(node, readers, outputs))]
    copy = copy_model(model)
    if not found:
        return PassResult("gated_gelu", copy, {})
    fused = {gate.product.output[0]: gate for gate in found}
    dropped = {node.output[0] for gate in found for node in (gate.split, gate.gelu)}
    del copy.graph.node[:]
    for node in model.graph.node:
        if node.output[0] in fused:
            copy.graph.node.append(_node(fused[node.output[0]]))
        elif node.output[0] not in dropped:
            copy.graph.node.append(node)
    if DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    return PassResult("gated_gelu", copy, {"gated GELUs fused": len(found)})


def _match(
    split: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]], outputs: set[str]
) -> _Gate | None:
    """The gated GELU that starts at `split`, if one does."""
    halves = (
        split.op_type == "Split"
        and split.domain == ""
        and len(split.input) == 1
        and len(split.output) == 2
        and attribute_int(split, "axis", 0) == -1
    )
    if not halves or outputs & set(split.output):
        return None
    gate, up = split.output
    of_gate, of_up = readers.get(gate, []), readers.get(up, [])
    if len(of_gate) != 1 or len(of_up) != 1 or not is_gelu_tanh(of_gate[0]):
        return None
    gelu, product = of_gate[0], of_up[0]
    activated = gelu.output[0]
    is_product = product.op_type == "Mul" and set(product.input) == {activated, up}
    if not is_product or len(readers[activated]) != 1 or activated in outputs:
        return None
    return _Gate(split, gelu, product)


def _node(gate: _Gate) -> onnx.NodeProto:
    return onnx.helper.make_node(
        GATED_GELU,
        [gate.split.input[0]],
        list(gate.product.output),
        name=gate.product.name,
        domain=DOMAIN,
    )
