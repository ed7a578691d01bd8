"""Give products with int8 activations to an operator of our own.

`com.microsoft.MatMulNBits` at accuracy level 4 may round its activations to int8 in blocks.
`onnxport.MatMulNBits` does just that, with the attributes and the first four inputs of the
operator it replaces, and its result for a row does not depend on the other rows. For devices whose
operator library has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, input_at, set_input
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.result import PassResult, copy_model

MATMUL_NBITS: Final = "MatMulNBits"  # [..., K] -> [..., N]
ZERO_POINTS: Final = 14  # their place among the inputs, behind what other passes give
OFFSETS: Final = 15  # likewise of offsets, see `graphs.passes.block_offsets`
BITS: Final = (4, 8)
BLOCK_SIZES: Final = (16, 32, 64, 128, 256)
_DEFAULTS: Final = {"K": 0, "N": 0, "bits": 4, "block_size": 0}  # the schema requires all but bits


def use_int8_matmul(model: onnx.ModelProto) -> PassResult:
    """Replace every MatMulNBits that the operator can compute.

    That is: accuracy level 4; 4 or 8 bits in blocks of 16 to 256; weights, float32 scales, which
    make activations float32, and zero points in uint8, if there are some, all of them initializers;
    no order of inputs or bias. Level 1 asks for float32 arithmetic and stays as it is.
    """
    copy = copy_model(model)
    # An initializer that is a graph input, too, is a default that the caller may replace.
    replaceable = {info.name for info in copy.graph.input}
    constants = {
        tensor.name: tensor.data_type
        for tensor in copy.graph.initializer
        if tensor.name not in replaceable
    }
    nodes = [node for node in copy.graph.node if _fits(node, constants)]
    for node in nodes:
        replacement = onnx.helper.make_node(
            MATMUL_NBITS,
            list(node.input[:3]),
            list(node.output),
            name=node.name,
            domain=DOMAIN,
            **{name: attribute_int(node, name, default) for name, default in _DEFAULTS.items()},
        )
        if zero_points := input_at(node, 3):
            set_input(replacement, ZERO_POINTS, zero_points)
        node.CopyFrom(replacement)
    if nodes and DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    changes = {"products with int8 activations": len(nodes)} if nodes else {}
    return PassResult("int8_matmul", copy, changes)


def _fits(node: onnx.NodeProto, constants: Mapping[str, int]) -> bool:
    if node.op_type != MATMUL_NBITS or node.domain != contract.MICROSOFT:
        return False
    inputs = list(node.input)
    return (
        len(inputs) >= 3
        and not any(inputs[4:])
        and (not any(inputs[3:]) or constants.get(inputs[3]) == TensorProto.UINT8)
        and constants.get(inputs[1]) == TensorProto.UINT8
        and constants.get(inputs[2]) == TensorProto.FLOAT
        and attribute_int(node, "accuracy_level", 0) == contract.INT8_LEVEL
        and attribute_int(node, "bits", 4) in BITS
        and attribute_int(node, "block_size", 0) in BLOCK_SIZES
        and attribute_int(node, "weight_prepacked", 0) == 0
    )
