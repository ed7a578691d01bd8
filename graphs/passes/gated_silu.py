"""Fuse the gate of a gated feed-forward layer into one operator of our own.

`Split` into gate and up, `gate * sigmoid(gate)`, and the product with up are four passes over the
joined projection; `onnxport.GatedSilu` is one. For devices whose operator library has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import onnx

from onnxport.graphs.inspect import attribute_int, consumers
from onnxport.graphs.passes.result import PassResult, copy_model

DOMAIN: Final = "onnxport"
GATED_SILU: Final = "GatedSilu"  # [..., 2 * inner] -> [..., inner], gates first
OPSET: Final = 1


@dataclass(frozen=True, slots=True)
class Gate:
    """The nodes of a gate; nothing else reads what is between them, nor is it a graph output."""

    split: onnx.NodeProto  # into gate and up
    activation: tuple[onnx.NodeProto, ...]  # of the gate
    product: onnx.NodeProto  # of that and up


@dataclass(frozen=True, slots=True)
class Values:
    """Who reads the values of a graph.

    Attributes:
        readers: nodes by the value that they read.
        outputs: of the graph.
    """

    readers: Mapping[str, Sequence[onnx.NodeProto]]
    outputs: frozenset[str]

    def inner_readers(self, value: str) -> Sequence[onnx.NodeProto]:
        """Nodes that read a value; none where the graph gives it out as well."""
        return () if value in self.outputs else self.readers.get(value, ())

    def product(self, activated: str, up: str) -> onnx.NodeProto | None:
        """The product of two values that nothing else reads."""
        of_activated, of_up = self.inner_readers(activated), self.inner_readers(up)
        if len(of_activated) != 1 or len(of_up) != 1:
            return None
        found = of_up[0]
        is_product = found.op_type == "Mul" and set(found.input) == {activated, up}
        return found if is_product else None


def fuse_gated_silu(model: onnx.ModelProto) -> PassResult:
    """Replace every `Split, Sigmoid, Mul, Mul` that is a gated SiLU.

    A pattern fires only where the Split halves the last axis and nothing else reads what it
    leaves out: the halves, the sigmoid and the activated gate are neither graph outputs nor
    inputs of other nodes.
    """
    copy, found = fuse_gates(model, GATED_SILU, _match)
    return PassResult("gated_silu", copy, {"gated SiLUs fused": found} if found else {})


def fuse_gates(
    model: onnx.ModelProto,
    operator: str,
    match: Callable[[onnx.NodeProto, Values], Gate | None],
) -> tuple[onnx.ModelProto, int]:
    """Replace gates by one operator of our own.

    Args:
        model: left as it is.
        operator: [..., 2 * inner] to [..., inner], gates first.
        match: the gate that starts at a Split into two halves of the last axis, if one does.

    Returns:
        The new model, and how many gates were replaced.
    """
    readers = {name: [node for node, _ in nodes] for name, nodes in consumers(model).items()}
    values = Values(readers, frozenset(info.name for info in model.graph.output))
    splits = [node for node in model.graph.node if _halves(node)]
    found = [gate for split in splits if (gate := match(split, values)) is not None]
    copy = copy_model(model)
    if not found:
        return copy, 0
    fused = {gate.product.output[0]: gate for gate in found}
    dropped = {node.output[0] for gate in found for node in (gate.split, *gate.activation)}
    del copy.graph.node[:]
    for node in model.graph.node:
        if node.output[0] in fused:
            joined = fused[node.output[0]].split.input[0]
            outputs = list(node.output)
            copy.graph.node.append(
                onnx.helper.make_node(operator, [joined], outputs, name=node.name, domain=DOMAIN)
            )
        elif node.output[0] not in dropped:
            copy.graph.node.append(node)
    if DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    return copy, len(found)


def _halves(node: onnx.NodeProto) -> bool:
    """Whether a node splits its last axis into two halves."""
    return bool(
        node.op_type == "Split"
        and node.domain == ""
        and len(node.input) == 1
        and len(node.output) == 2
        and attribute_int(node, "axis", 0) == -1
    )


def _match(split: onnx.NodeProto, values: Values) -> Gate | None:
    """The gated SiLU that starts at `split`, if one does."""
    gate, up = split.output
    of_gate = values.inner_readers(gate)
    sigmoids = [node for node in of_gate if node.op_type == "Sigmoid"]
    silus = [node for node in of_gate if node.op_type == "Mul"]
    if len(of_gate) != 2 or len(sigmoids) != 1 or len(silus) != 1:
        return None
    sigmoid, silu = sigmoids[0], silus[0]
    if set(silu.input) != {gate, sigmoid.output[0]}:
        return None
    if len(values.inner_readers(sigmoid.output[0])) != 1:
        return None
    product = values.product(silu.output[0], up)
    return None if product is None else Gate(split, (sigmoid, silu), product)
