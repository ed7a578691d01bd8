"""Fuse the gate of a gated feed-forward layer into one operator of our own.

`Split` into gate and up, `gate * sigmoid(gate)`, and the product with up are four passes over the
joined projection; `onnxport.GatedSilu` is one. For devices whose operator library has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx

from onnxport.graphs.inspect import attribute_int, consumers
from onnxport.graphs.passes.result import PassResult, copy_model

DOMAIN: Final = "onnxport"
GATED_SILU: Final = "GatedSilu"  # [..., 2 * inner] -> [..., inner], gates first
OPSET: Final = 1


@dataclass(frozen=True, slots=True)
class _Gate:
    split: onnx.NodeProto
    sigmoid: onnx.NodeProto
    silu: onnx.NodeProto
    product: onnx.NodeProto


def fuse_gated_silu(model: onnx.ModelProto) -> PassResult:
    """Replace every `Split, Sigmoid, Mul, Mul` that is a gated SiLU.

    A pattern fires only where the Split halves the last axis and nothing else reads what it
    leaves out: the halves, the sigmoid and the activated gate are neither graph outputs nor
    inputs of other nodes.
    """
    readers = {name: [node for node, _ in nodes] for name, nodes in consumers(model).items()}
    outputs = {info.name for info in model.graph.output}
    gates = [
        gate for node in model.graph.node if (gate := _match(node, readers, outputs)) is not None
    ]
    copy = copy_model(model)
    if not gates:
        return PassResult("gated_silu", copy, {})
    fused = {_key(gate.product): gate for gate in gates}
    dropped = {_key(node) for gate in gates for node in (gate.split, gate.sigmoid, gate.silu)}
    nodes = []
    for node in copy.graph.node:
        if _key(node) in fused:
            gate = fused[_key(node)]
            nodes.append(
                onnx.helper.make_node(
                    GATED_SILU,
                    [gate.split.input[0]],
                    list(node.output),
                    name=node.name,
                    domain=DOMAIN,
                )
            )
        elif _key(node) not in dropped:
            nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    if DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    return PassResult("gated_silu", copy, {"gated SiLUs fused": len(gates)})


def _match(
    split: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]], outputs: set[str]
) -> _Gate | None:
    """The gated SiLU that starts at `split`, if one does."""
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
    gate_readers = readers.get(gate, [])
    sigmoids = [node for node in gate_readers if node.op_type == "Sigmoid"]
    silus = [node for node in gate_readers if node.op_type == "Mul"]
    if len(gate_readers) != 2 or len(sigmoids) != 1 or len(silus) != 1:
        return None
    sigmoid, silu = sigmoids[0], silus[0]
    if set(silu.input) != {gate, sigmoid.output[0]} or outputs & {sigmoid.output[0]}:
        return None
    if len(readers[sigmoid.output[0]]) != 1 or outputs & {silu.output[0]}:
        return None
    products = readers.get(silu.output[0], [])
    is_product = len(products) == 1 and products[0].op_type == "Mul"
    if not is_product or set(products[0].input) != {silu.output[0], up}:
        return None
    if len(readers.get(up, [])) != 1:
        return None
    return _Gate(split, sigmoid, silu, products[0])


def _key(node: onnx.NodeProto) -> str:
    """What tells a node from all others: the first value that it makes."""
    return str(node.output[0])
