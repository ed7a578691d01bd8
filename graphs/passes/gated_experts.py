"""Give experts with int8 activations to an operator of our own.

`com.microsoft.QMoE` at accuracy level 4 may round its activations to int8 in blocks.
`onnxport.GatedExperts` does just that, and what it returns for a row depends on that row alone.
For devices whose operator library has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.experts import FP4, Swiglu, bits_of, offsets_of
from onnxport.graphs.inspect import attribute_int, initializers, names, set_input
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.int8_experts import WEIGHTS, check_fp4, is_fp4
from onnxport.graphs.passes.int8_matmul import BITS, BLOCK_SIZES
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.split_experts import EXPERTS_INPUTS, QMOE, biases_of, is_swiglu
from onnxport.graphs.passes.split_matmul import drop_unread

# [..., K] and the router's logits [rows, num_experts] -> [..., N]
GATED_EXPERTS: Final = "GatedExperts"
EXPERTS_ZERO_POINTS: Final = (8, 9)  # inputs: of gate and up, and of down
EXPERTS_OFFSETS: Final = (10, 11)  # likewise


def expert_offsets(model: onnx.ModelProto) -> frozenset[str]:
    """Offsets of experts, which the operator takes as they are stored."""
    nodes = (node for node in model.graph.node if node.op_type == QMOE)
    return frozenset(name for node in nodes for name in offsets_of(node) if name)


def use_gated_experts(model: onnx.ModelProto) -> PassResult:
    """Replace every QMoE that the operator can compute.

    That is: accuracy level 4; 4 or 8 bits in blocks of 16 to 256, or MXFP4; gate and up that take
    turns, or no gate; weights that add up to 1; weights, float32 scales, float16 offsets, if there
    are some (see `expert_offsets`), and, of both products or of none, float32 biases that are
    initializers; no zero points or third product.

    Scales of MXFP4 are exponents, which the operator reads as bytes, for its library knows no E8M0.

    Raises:
        ArtifactError: Experts in MXFP4 of another kind than the exporter writes.
    """
    copy = copy_model(model)
    replaceable = {info.name for info in copy.graph.input}
    tensors = {
        name: tensor for name, tensor in initializers(copy).items() if name not in replaceable
    }
    nodes = [node for node in copy.graph.node if _fits(node, tensors)]
    in_fp4 = [node for node in nodes if is_fp4(node)]
    for node in in_fp4:
        for place in WEIGHTS:
            node.input[place + 1] = _as_bytes(copy, tensors[node.input[place + 1]])
    for node in nodes:
        node.CopyFrom(_replacement(node, tensors))
    if in_fp4:
        drop_unread(copy)
    if nodes and DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    changes = {"layers of experts with int8 activations": len(nodes)} if nodes else {}
    return PassResult("gated_experts", copy, changes)


def _fits(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    scales = TensorProto.FLOAT
    if is_fp4(node):
        check_fp4(node, tensors)
        scales = TensorProto.FLOAT8E8M0
    if node.op_type != QMOE or node.domain != contract.MICROSOFT or not is_swiglu(node):
        return False
    read = [*_weights(node), *biases_of(node)]
    types = [tensors[name].data_type for name in read if name in tensors]
    floats = [TensorProto.FLOAT] * len(biases_of(node))
    offsets = [tensors.get(name) for name in offsets_of(node) if name]
    return (
        types == [TensorProto.UINT8, scales] * 2 + floats
        and all(one is not None and one.data_type == TensorProto.FLOAT16 for one in offsets)
        and attribute_int(node, "accuracy_level", 0) == contract.INT8_LEVEL
        and set(bits_of(node)) <= set(BITS)
        and attribute_int(node, "block_size", 0) in BLOCK_SIZES
    )


def _as_bytes(model: onnx.ModelProto, exponents: TensorProto) -> str:
    """Declare the same bytes under another name, as bytes."""
    name, taken = f"{exponents.name}.bytes", names(model)
    while name in taken:
        name += "_"
    tensor = model.graph.initializer.add()
    tensor.CopyFrom(exponents)
    tensor.name, tensor.data_type = name, TensorProto.UINT8
    return name


def _weights(node: onnx.NodeProto) -> list[str]:
    """gate_up and its scales, down and its scales."""
    return [node.input[index] for index in EXPERTS_INPUTS[QMOE][2:]]


def _replacement(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> onnx.NodeProto:
    block_size, (bits, down_bits) = attribute_int(node, "block_size", 0), bits_of(node)
    gate_up, down = (tensors[name].dims for name in _weights(node)[::2])
    made = onnx.helper.make_node(
        GATED_EXPERTS,
        [*node.input[:2], *_weights(node), *biases_of(node)],
        list(node.output),
        name=node.name,
        domain=DOMAIN,
        K=gate_up[2] * 8 // bits,
        inner=gate_up[1] // Swiglu.of(node).parts,
        N=down[1],
        num_experts=gate_up[0],
        top_k=attribute_int(node, "k", 1),
        normalize=1,
        bits=bits,
        block_size=block_size,
        down_bits=down_bits,
        down_block_size=block_size,
        **({"quant_type": FP4} if is_fp4(node) else {}),
        **swiglu_attributes(node),
    )
    for place, name in zip(EXPERTS_OFFSETS, offsets_of(node), strict=True):
        if name:
            set_input(made, place, name)
    return made


def swiglu_attributes(node: onnx.NodeProto) -> dict[str, float]:
    """What the activation of a `MoE` or `QMoE` differs in from a SiLU, as our operators have it."""
    swiglu, silu = Swiglu.of(node), Swiglu()
    for name in ("is_gelu", "is_relu2"):
        if getattr(swiglu, name):
            return {name: 1}
    found = {name: getattr(swiglu, name) for name in ("alpha", "up_offset", "limit")}
    return {name: value for name, value in found.items() if value != getattr(silu, name)}
