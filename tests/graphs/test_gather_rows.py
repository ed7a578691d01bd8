"""Rows of tables: which nodes change, and which must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.gather_rows import use_gather_rows
from onnxport.graphs.passes.stored_scales import use_stored_scales
from onnxport.providers.cpu.library import find_library
from tests.graphs.paged_models import op_types, run

KERNEL = pytest.mark.skipif(find_library() is None, reason="the C++ kernels were not built")
IDS = np.array([3, 0, 3])


def graph(dtype: type[np.floating[Any]] = np.float16) -> onnx.ModelProto:
    """Rows of a table in 8 bits, and of one in floats, as the exporter writes them."""
    dice = np.random.default_rng(0)
    g = GraphBuilder("tables")
    ids = g.input("input_ids", TensorProto.INT64, ["tokens"])
    quants = g.constant(dice.integers(0, 256, (5, 64)).astype(np.uint8), "quants")
    scales = g.constant(dice.standard_normal((5, 2)).astype(np.float32), "scales")
    rows = ops.gather_block_quantized(g, quants, ids, scales, bits=8, block_size=32, name="embed")
    table = g.constant(dice.standard_normal((5, 64)).astype(dtype), "table")
    floats = g.node("Gather", [table, ids], name="gather")
    if dtype is not np.float32:
        floats = g.node("Cast", [floats], name="cast", to=TensorProto.FLOAT)
    g.node("Add", [rows, floats], outputs=[g.output("y", TensorProto.FLOAT, ["tokens", 64])])
    return g.build()


def node(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(one for one in model.graph.node if one.op_type == op_type)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_nodes(dtype: type) -> None:
    model = graph(dtype)
    before = model.SerializeToString()
    result = use_gather_rows(model)
    assert model.SerializeToString() == before
    assert result.changes == {"rows of tables": 2}
    assert op_types(result.model) == ["GatherRows", "GatherRows", "Add"]
    quantized, floats = result.model.graph.node[:2]
    inputs = list(node(model, "GatherBlockQuantized").input)
    assert (quantized.name, list(quantized.input)) == ("embed", inputs)
    assert {one.name: one.i for one in quantized.attribute} == {"block_size": 32}
    assert (list(floats.input), list(floats.attribute)) == ([*node(model, "Gather").input], [])
    types = element_types(result.model)
    assert {types[quantized.output[0]], types[floats.output[0]]} == {TensorProto.FLOAT}
    assert use_gather_rows(result.model).changes == {}


@KERNEL
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_they_compute_what_was_there(dtype: type) -> None:
    model = graph(dtype)
    expected = run(model, {"input_ids": IDS})["y"]
    changed = use_gather_rows(model).model
    assert run(changed, {"input_ids": IDS}, find_library())["y"].tobytes() == expected.tobytes()


def test_scales_are_read_as_they_are_stored() -> None:
    changed = use_gather_rows(graph()).model
    stored = onnx.ModelProto()
    name = node(changed, "GatherRows").input[2]
    halves = np.zeros((5, 2), np.float16)
    stored.graph.initializer.append(onnx.numpy_helper.from_array(halves, name))
    result = use_stored_scales(changed, stored)
    assert result.changes == {"scales as they are stored": 1}
    assert node(result.model, "GatherRows").input[2] == f"{name}.stored"


def set_attribute(op_type: str, name: str, value: int) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        found = node(model, op_type)
        kept = [one for one in found.attribute if one.name != name]
        del found.attribute[:]
        found.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return edit


def let_be_given(op_type: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        name = node(model, op_type).input[0]
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None))

    return edit


def read_twice(model: onnx.ModelProto) -> None:
    value = node(model, "Gather").output[0]
    model.graph.node.append(onnx.helper.make_node("Identity", [value], ["other"]))


def give_out(model: onnx.ModelProto) -> None:
    value = node(model, "Gather").output[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(value, TensorProto.FLOAT16, None))


def always_the_same(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(IDS, "fixed"))
    node(model, "Gather").input[1] = "fixed"


def add_zero_points(model: onnx.ModelProto) -> None:
    zeros = np.full((5, 2), 128, np.uint8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(zeros, "zeros"))
    node(model, "GatherBlockQuantized").input.append("zeros")


EDITS: list[tuple[str, Callable[[onnx.ModelProto], None]]] = [
    ("GatherBlockQuantized", set_attribute("GatherBlockQuantized", "bits", 4)),
    ("GatherBlockQuantized", set_attribute("GatherBlockQuantized", "gather_axis", 1)),
    ("GatherBlockQuantized", set_attribute("GatherBlockQuantized", "quantize_axis", 0)),
    ("GatherBlockQuantized", add_zero_points),
    ("GatherBlockQuantized", let_be_given("GatherBlockQuantized")),
    ("Gather", set_attribute("Gather", "axis", 1)),
    ("Gather", set_attribute("Cast", "to", TensorProto.DOUBLE)),
    ("Gather", let_be_given("Gather")),
    ("Gather", read_twice),
    ("Gather", give_out),
    ("Gather", always_the_same),
]


@pytest.mark.parametrize(("stays", "edit"), EDITS)
def test_what_is_another_thing_stays(stays: str, edit: Callable[[onnx.ModelProto], None]) -> None:
    model = graph()
    edit(model)
    result = use_gather_rows(model)
    assert result.changes == {"rows of tables": 1}
    assert node(result.model, stays) == node(model, stays)
