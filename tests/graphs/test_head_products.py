"""Products of a matrix for each head: which nodes change, and which must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.head_products import head_product_weights, use_head_products
from onnxport.providers.cpu.library import find_library
from tests.graphs.paged_models import op_types, run

HEADS, DEPTH, OUTPUTS = 3, 16, 24
KERNEL = pytest.mark.skipif(find_library() is None, reason="the C++ kernels were not built")
WEIGHTS = np.random.default_rng(0).standard_normal((HEADS, OUTPUTS, DEPTH)).astype(np.float32)


def graph(weights: NDArray[Any] = WEIGHTS) -> onnx.ModelProto:
    """Two products one behind the other, of which the second is no product of heads."""
    g = GraphBuilder("heads")
    x = g.input("x", TensorProto.FLOAT, ["tokens", HEADS, DEPTH])
    stored = g.constant(weights, "weights")
    rows = g.node("Transpose", [x], name="rows", perm=[1, 0, 2])
    turned = g.node("Transpose", [stored], name="turned", perm=[0, 2, 1])
    products = g.node("MatMul", [rows, turned], name="product")
    tokens = g.node("Transpose", [products], name="tokens", perm=[1, 0, 2])
    square = g.constant(np.eye(OUTPUTS, dtype=np.float32), "square")
    out = g.output("y", TensorProto.FLOAT, ["tokens", HEADS, OUTPUTS])
    g.node("MatMul", [tokens, square], outputs=[out], name="plain")
    return g.build()


def test_the_node() -> None:
    model = graph()
    before = model.SerializeToString()
    (name,) = head_product_weights(model)
    result = use_head_products(model)
    assert model.SerializeToString() == before
    assert result.changes == {"products of heads": 1}
    assert op_types(result.model) == ["HeadProducts", "MatMul"]
    node = result.model.graph.node[0]
    assert (node.domain, node.name, list(node.input)) == ("onnxport", "product", ["x", name])
    sizes = {one.name: one.i for one in node.attribute}
    assert sizes == {"heads": HEADS, "K": DEPTH, "N": OUTPUTS}
    assert element_types(result.model)[node.output[0]] == TensorProto.FLOAT
    assert use_head_products(result.model).changes == {"products of heads": 1}


@KERNEL
def test_it_computes_what_the_nodes_did() -> None:
    model = graph()
    x = np.random.default_rng(1).standard_normal((5, HEADS, DEPTH)).astype(np.float32)
    expected = run(model, {"x": x})["y"]
    found = run(use_head_products(model).model, {"x": x}, find_library())["y"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(one for one in model.graph.node if one.name == name)


def turn(name: str, order: list[int]) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        node(model, name).attribute[0].ints[:] = order

    return edit


def read_twice(name: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        value = node(model, name).output[0]
        model.graph.node.append(onnx.helper.make_node("Identity", [value], ["other"]))

    return edit


def give_out(name: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        value = node(model, name).output[0]
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(value, TensorProto.FLOAT, None)
        )

    return edit


def let_weights_be_given(model: onnx.ModelProto) -> None:
    name = node(model, "turned").input[0]
    dims = list(WEIGHTS.shape)
    model.graph.input.append(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))


@pytest.mark.parametrize(
    "edit",
    [
        *(turn("rows", order) for order in ([0, 1, 2], [1, 2, 0])),
        turn("turned", [2, 1, 0]),
        turn("tokens", [0, 2, 1]),
        *(read_twice(name) for name in ("rows", "turned", "product")),
        *(give_out(name) for name in ("rows", "product")),
        let_weights_be_given,
    ],
)
def test_what_is_another_thing_stays(edit: Callable[[onnx.ModelProto], None]) -> None:
    model = graph()
    edit(model)
    assert not head_product_weights(model)
    result = use_head_products(model)
    assert result.changes == {}
    assert result.model == model


def test_weights_that_are_no_floats_or_not_of_heads_stay() -> None:
    for weights in (WEIGHTS.astype(np.float64), WEIGHTS[None]):
        assert use_head_products(graph(weights)).changes == {}
