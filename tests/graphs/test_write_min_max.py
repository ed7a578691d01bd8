"""Min and Max, written out: the same numbers, in any type, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.passes.write_min_max import write_min_max

X = np.array([-np.inf, -65504, -3, -0.5, 0, 0.5, 0.75, 3, 65504, np.inf, np.nan])


def model(dtype: int, number: np.ndarray, *, stored_first: bool = False) -> onnx.ModelProto:
    value = numpy_helper.from_array(number, "number")
    inputs = ["number", "x"] if stored_first else ["x", "number"]
    nodes = [
        helper.make_node("Max", inputs, ["most"], name="first"),
        helper.make_node("Min", inputs, ["least"], name="second"),
    ]
    infos = [helper.make_tensor_value_info(name, dtype, ["n"]) for name in ("x", "most", "least")]
    graph = helper.make_graph(nodes, "min_max", infos[:1], infos[1:], [value])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_it_computes_the_same(dtype: int) -> None:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    before = model(dtype, np.array(0.5, kind))
    result = write_min_max(before)
    assert result.changes == {"minima and maxima written out": 2}
    assert {node.op_type for node in result.model.graph.node} == {"Less", "Greater", "Where"}
    onnx.checker.check_model(result.model, full_check=True)
    x = X.astype(kind)
    session = ort.InferenceSession(result.model.SerializeToString())
    most, least = session.run(["most", "least"], {"x": x})
    np.testing.assert_array_equal(most, np.maximum(x, kind.type(0.5)))
    np.testing.assert_array_equal(least, np.minimum(x, kind.type(0.5)))


@pytest.mark.parametrize(
    ("dtype", "number", "stored_first"),
    [
        (TensorProto.INT64, np.array(3), False),
        (TensorProto.FLOAT, np.array([0.5], np.float32), False),
        (TensorProto.FLOAT, np.array(0.5, np.float32), True),
    ],
)
def test_others_stay(dtype: int, number: np.ndarray, stored_first: bool) -> None:
    before = model(dtype, number, stored_first=stored_first)
    result = write_min_max(before)
    assert not result.changes
    assert result.model == before


def test_two_that_are_computed_stay() -> None:
    before = model(TensorProto.FLOAT, np.array(0.5, np.float32))
    for node in before.graph.node:
        node.input[1] = "x"
    assert write_min_max(before).model == before
