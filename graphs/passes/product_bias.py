"""Let our products add their bias themselves.

`onnxport.MatMulNBits` adds it to outputs that it has just written. An operator of its own is one
more that a decode step has to start, in every layer whose projections have a bias. A product that
adds adapters, too, adds the bias first. For devices whose operator library has them, after
`fuse_input_norm`.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs.inspect import attribute_int, consumers, initializers
from onnxport.graphs.passes.followers import take_in
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS
from onnxport.graphs.passes.result import PassResult

_BIAS: Final = 5  # the input's place, behind skip and gamma


def fuse_product_bias(model: onnx.ModelProto) -> PassResult:
    """Give each product the bias that is added to it: an initializer, one number for each output.

    That is done where nobody else reads the product.
    """
    found = _find(model)
    changes = {"biases added by their products": len(found)} if found else {}
    return PassResult("product_bias", take_in(model, found, _fused), changes)


def _find(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The addition of a bias, by the name of the product that it is added to."""
    replaceable = {info.name for info in model.graph.input}
    tensors = initializers(model)
    readers, outputs = consumers(model), {info.name for info in model.graph.output}
    found = {}
    for node in model.graph.node:
        if (
            node.op_type != MATMUL_NBITS
            or node.domain != DOMAIN
            or any(node.input[_BIAS : _BIAS + 1])
        ):
            continue
        product = node.output[0]
        reading = readers.get(product, [])
        if product in outputs or len(reading) != 1:
            continue
        add, place = reading[0]
        if add.op_type != "Add" or add.domain:
            continue
        bias = tensors.get(add.input[1 - place])
        if bias is None or bias.name in replaceable or bias.data_type != TensorProto.FLOAT:
            continue
        if list(bias.dims) == [attribute_int(node, "N", 0)]:
            found[product] = add
    return found


def _fused(node: onnx.NodeProto, add: onnx.NodeProto) -> onnx.NodeProto:
    fused = onnx.NodeProto()
    fused.CopyFrom(node)
    bias = next(name for name in add.input if name != node.output[0])
    fused.input.extend([""] * (_BIAS + 1 - len(fused.input)))
    fused.input[_BIAS] = bias
    fused.output[0] = add.output[0]
    return fused
