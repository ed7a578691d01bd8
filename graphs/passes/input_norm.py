"""Let our operators with int8 activations normalize their input themselves.

A decoder adds a residual, normalizes the sum and rounds it to int8 for a product.
`com.microsoft.SkipSimplifiedLayerNormalization` does the first two and writes what it normalized to
memory; `onnxport.MatMulNBits` and `onnxport.GatedMlp` do all three at once, and write that only
where others read it too, as adapters do. For devices whose operator library has them, after
`use_int8_matmul` and `fuse_gated_mlp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx

from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, consumers, initializers
from onnxport.graphs.passes.gated_mlp import GATED_MLP, NORM_INPUT
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS
from onnxport.graphs.passes.result import PassResult, copy_model

SKIP_NORM: Final = "SkipSimplifiedLayerNormalization"
_INPUTS: Final[Mapping[str, int]] = {MATMUL_NBITS: 3, GATED_MLP: NORM_INPUT}  # skip's place
_EPSILON: Final = 1e-12  # the schema's default, as ONNX Runtime defines it


def fuse_input_norm(model: onnx.ModelProto) -> PassResult:
    """Give an operator of ours the inputs of the norm before it, and what that returned to return.

    That is done where the operator is the first to read what the norm returns, the sum included;
    where the norm has no bias; and where its gamma is an initializer of the operator's width. Its
    two addends must have one shape, as they do in decoders: the operator refuses others when it
    runs.
    """
    copy = copy_model(model)
    found = _find(model)
    if not found:
        return PassResult("input_norm", copy, {})
    dropped = {one.norm.output[0] for one in found.values()}
    del copy.graph.node[:]
    for index, node in enumerate(model.graph.node):
        if index in found:
            copy.graph.node.append(_fused(node, found[index]))
        elif node.output[0] not in dropped:
            copy.graph.node.append(node)
    return PassResult("input_norm", copy, {"norms fused into what reads them": len(found)})


@dataclass(frozen=True, slots=True)
class _Found:
    """A norm that the operator behind it can take in."""

    norm: onnx.NodeProto
    is_shared: bool  # others read what it normalizes, too


def _find(model: onnx.ModelProto) -> dict[int, _Found]:
    """The places of operators that can take in the norm before them."""
    first_read: dict[str, int] = {}
    for index, node in enumerate(model.graph.node):
        for name in node.input:
            first_read.setdefault(name, index)
    readers, tensors = consumers(model), initializers(model)
    constants = tensors.keys() - {info.name for info in model.graph.input}
    outputs = {info.name for info in model.graph.output}
    found = {}
    for norm in model.graph.node:
        if not _is_plain_norm(norm) or norm.input[2] not in constants:
            continue
        normalized, residual = norm.output[0], _residual(norm)
        reading, place = readers.get(normalized, []), first_read.get(normalized, 0)
        if not reading or {normalized, residual} & outputs:
            continue
        node, at = reading[0]
        width = [attribute_int(node, "K", 0)]
        if at != 0 or not _is_ours(node) or list(tensors[norm.input[2]].dims) != width:
            continue
        is_shared = len(reading) > 1
        if is_shared and (not residual or normalized in node.input[1:]):
            continue
        if not residual or first_read.get(residual, place + 1) > place:
            found[place] = _Found(norm, is_shared)
    return found


def _is_plain_norm(node: onnx.NodeProto) -> bool:
    """Whether it is a norm that returns nothing but its result and the sum."""
    return bool(
        node.op_type == SKIP_NORM
        and node.domain == contract.MICROSOFT
        and len(node.input) >= 3
        and not any(node.input[3:])
        and not any(node.output[1:3])
    )


def _is_ours(node: onnx.NodeProto) -> bool:
    """Whether it is an operator of ours that has no norm yet."""
    first = _INPUTS.get(node.op_type, 0) if node.domain == DOMAIN else 0
    return first > 0 and len(node.input) >= first and not any(node.input[first : first + 2])


def _residual(norm: onnx.NodeProto) -> str:
    return norm.output[3] if len(norm.output) > 3 else ""


def _fused(node: onnx.NodeProto, found: _Found) -> onnx.NodeProto:
    norm = found.norm
    fused = onnx.NodeProto()
    fused.CopyFrom(node)
    del fused.input[:]
    first = _INPUTS[node.op_type]
    inputs = [norm.input[0], *node.input[1:first], *norm.input[1:3], *node.input[first + 2 :]]
    fused.input.extend(inputs)
    # The operator returns the sum even if nobody reads it: under a name that the norm leaves free.
    fused.output.append(_residual(norm) or norm.output[0])
    if found.is_shared:
        fused.output.append(norm.output[0])
    epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), _EPSILON)
    fused.attribute.append(onnx.helper.make_attribute("epsilon", float(epsilon)))
    return fused
