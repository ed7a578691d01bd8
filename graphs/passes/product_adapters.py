"""Let our products add what LoRA adapters make of their inputs themselves.

`onnxport.AddLora` behind an `onnxport.MatMulNBits` is one more operator that a decode step has to
start, and one between the product and its bias, which is another then. The product does what both
do, with their bits. For devices whose operator library has it, after `fuse_gated_mlp`, which takes
in adapters of its own, and before `fuse_input_norm` and `fuse_product_bias`: a norm need not write
what it normalizes once nothing but the product reads it, and a bias that follows the adapters is
added before them then.
"""

from __future__ import annotations

from typing import Final

import onnx

from onnxport.graphs.inspect import attribute_int, consumers, set_input
from onnxport.graphs.passes.followers import take_in
from onnxport.graphs.passes.gated_mlp import adapter_attributes, adds_integer_adapters
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS, ZERO_POINTS
from onnxport.graphs.passes.result import PassResult

ADAPTERS_INPUT: Final = 8  # of MatMulNBits, behind those of norm, bias and logits


def fuse_product_adapters(model: onnx.ModelProto) -> PassResult:
    """Give each product the inputs and attributes of the `AddLora` that follows it.

    That is done where adapters are integers, and nobody else reads the product.
    """
    found = _find(model)
    changes = {"adapters added by their products": len(found)} if found else {}
    return PassResult("product_adapters", take_in(model, found, _fused), changes)


def _find(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The `AddLora` behind a product, by the name of what the product returns."""
    readers, outputs = consumers(model), {info.name for info in model.graph.output}
    places = {name: at for at, node in enumerate(model.graph.node) for name in node.output}
    found = {}
    for at, node in enumerate(model.graph.node):
        product = node.output[0] if node.output else ""
        reading = readers.get(product, [])
        if node.op_type != MATMUL_NBITS or node.domain != DOMAIN or any(node.input[3:ZERO_POINTS]):
            continue
        if product in outputs or len(reading) != 1 or reading[0][1] != 0:
            continue
        adding = reading[0][0]
        # what the product reads now must be there when it runs
        is_ready = all(places.get(name, -1) < at for name in adding.input[2:])
        if is_ready and adds_integer_adapters(adding, node):
            found[product] = adding
    return found


def _fused(node: onnx.NodeProto, adding: onnx.NodeProto) -> onnx.NodeProto:
    fused = onnx.NodeProto()
    fused.CopyFrom(node)
    for place, name in enumerate(adding.input[2:], ADAPTERS_INPUT):
        set_input(fused, place, name)
    fused.output[0] = adding.output[0]
    places = ("offset", "ranks", "columns0", "columns1", "columns2")
    copied = {name: attribute_int(adding, name, 0) for name in places}
    for name, value in (adapter_attributes(adding) | copied).items():
        fused.attribute.append(onnx.helper.make_attribute(name, value))
    return fused
