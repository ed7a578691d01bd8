"""Give products that each head has with a matrix of its own to an operator of our own.

`Transpose, MatMul, Transpose` around a batch of matrices, as latent attention has it, is
`onnxport.HeadProducts`, with the same bits for a row in any batch, which a MatMul of a batch does
not have on ONNX Runtime's CPU. It reads weights as they are stored, 16 bits or 32 of a number, and
so takes a half or less of the time of few rows; of many it is as fast or somewhat slower. For
devices whose operator library has it, around `retype`: that leaves these weights as they are where
it is told to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs.inspect import consumers, initializers, producers
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.result import PassResult, copy_model

# [tokens, heads, K] and weights [heads, N, K] -> [tokens, heads, N]
HEAD_PRODUCTS: Final = "HeadProducts"
_BY_HEAD: Final = [1, 0, 2]  # tokens and heads, and back
_TURNED: Final = [0, 2, 1]
_WEIGHT_TYPES: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True, slots=True)
class _Match:
    """The nodes of a product; nothing else reads what is between them."""

    rows: onnx.NodeProto
    turned: onnx.NodeProto  # of the weights
    product: onnx.NodeProto
    tokens: onnx.NodeProto
    weights: TensorProto  # [heads, N, K]


def head_product_weights(model: onnx.ModelProto) -> frozenset[str]:
    """The initializers that `use_head_products` takes in any floating type."""
    return frozenset(match.weights.name for match in _matches(model))


def use_head_products(model: onnx.ModelProto) -> PassResult:
    """Replace every product of a matrix for each head, in a graph whose activations are float32."""
    copy = copy_model(model)
    for match in list(_matches(copy)):
        heads, outputs, depth = match.weights.dims
        match.tokens.CopyFrom(
            onnx.helper.make_node(
                HEAD_PRODUCTS,
                [match.rows.input[0], match.weights.name],
                list(match.tokens.output),
                name=match.product.name,
                domain=DOMAIN,
                heads=heads,
                K=depth,
                N=outputs,
            )
        )
        for node in (match.rows, match.turned, match.product):
            copy.graph.node.remove(node)
    count = sum(node.op_type == HEAD_PRODUCTS for node in copy.graph.node)
    if count and DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    changes = {"products of heads": count} if count else {}
    return PassResult("head_products", copy, changes)


def _matches(model: onnx.ModelProto) -> Iterator[_Match]:
    makers, readers = producers(model), consumers(model)
    replaceable = {info.name for info in model.graph.input}
    tensors = {name: one for name, one in initializers(model).items() if name not in replaceable}
    outputs = {info.name for info in model.graph.output}
    for product in model.graph.node:
        if product.op_type != "MatMul" or product.domain:
            continue
        rows, turned = (makers.get(name) for name in product.input)
        after = readers.get(product.output[0], [])
        if rows is None or turned is None or len(after) != 1:
            continue
        inner = (rows.output[0], turned.output[0], product.output[0])
        match = _matched(rows, turned, product, after[0][0], tensors)
        alone = all(len(readers.get(name, ())) == 1 and name not in outputs for name in inner)
        if match is not None and alone:
            yield match


def _matched(
    rows: onnx.NodeProto,
    turned: onnx.NodeProto,
    product: onnx.NodeProto,
    tokens: onnx.NodeProto,
    tensors: Mapping[str, TensorProto],
) -> _Match | None:
    weights = tensors.get(turned.input[0])
    if weights is None or len(weights.dims) != 3 or weights.data_type not in _WEIGHT_TYPES:
        return None
    transposes = ((rows, _BY_HEAD), (turned, _TURNED), (tokens, _BY_HEAD))
    if not all(_turns(node, order) for node, order in transposes):
        return None
    return _Match(rows, turned, product, tokens, weights)


def _turns(node: onnx.NodeProto, order: list[int]) -> bool:
    """Whether a node is the Transpose of three axes in an order."""
    if node.op_type != "Transpose" or node.domain:
        return False
    return any(one.name == "perm" and list(one.ints) == order for one in node.attribute)
