"""Give experts whose weights are floats to an operator of our own.

`com.microsoft.MoE` on ONNX Runtime's CPU gives a row other bits where an expert has other rows.
What `onnxport.FloatExperts` returns for a row depends on that row alone. It reads weights as they
are stored, 16 bits or 32 of a number, so nothing is converted or kept twice. For devices whose
operator library has it, around `retype`: that leaves these weights as they are where it is told to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, initializers
from onnxport.graphs.passes.gated_experts import swiglu_attributes
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.split_experts import EXPERTS_INPUTS, MOE, biases_of, is_swiglu

# [..., K] and the router's logits [rows, num_experts] -> [..., N]
FLOAT_EXPERTS: Final = "FloatExperts"
_WEIGHT_TYPES: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def float_expert_weights(model: onnx.ModelProto) -> frozenset[str]:
    """The initializers that `use_float_experts` takes in any floating type."""
    tensors = _constants(model)
    return frozenset(
        name for node in model.graph.node if _fits(node, tensors) for name in _weights(node)
    )


def use_float_experts(model: onnx.ModelProto) -> PassResult:
    """Replace every MoE that the operator can compute, in a graph whose activations are float32.

    That is: gate and up that take turns, or no gate; weights that add up to 1; both products'
    weights, of one floating type, and biases, of both or of none, that are initializers; no third
    product.
    """
    copy = copy_model(model)
    tensors = _constants(copy)
    nodes = [
        node
        for node in copy.graph.node
        if _fits(node, tensors)
        and all(tensors[name].data_type == TensorProto.FLOAT for name in biases_of(node))
    ]
    for node in nodes:
        node.CopyFrom(_replacement(node, tensors))
    if nodes and DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    changes = {"layers of experts in floats": len(nodes)} if nodes else {}
    return PassResult("float_experts", copy, changes)


def _constants(model: onnx.ModelProto) -> dict[str, TensorProto]:
    replaceable = {info.name for info in model.graph.input}
    return {name: tensor for name, tensor in initializers(model).items() if name not in replaceable}


def _fits(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    if node.op_type != MOE or node.domain != contract.MICROSOFT or not is_swiglu(node):
        return False
    names = [*_weights(node), *biases_of(node)]
    types = {tensors[name].data_type for name in _weights(node) if name in tensors}
    return all(name in tensors for name in names) and len(types) == 1 and types <= {*_WEIGHT_TYPES}


def _weights(node: onnx.NodeProto) -> list[str]:
    """gate_up and down."""
    return [node.input[index] for index in EXPERTS_INPUTS[MOE][2:]]


def _replacement(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> onnx.NodeProto:
    gate_up, down = (tensors[name].dims for name in _weights(node))
    return onnx.helper.make_node(
        FLOAT_EXPERTS,
        [*node.input[:2], *_weights(node), *biases_of(node)],
        list(node.output),
        name=node.name,
        domain=DOMAIN,
        K=gate_up[2],
        inner=down[2],
        N=down[1],
        num_experts=gate_up[0],
        top_k=attribute_int(node, "k", 1),
        normalize=1,
        **swiglu_attributes(node),
    )
