"""GELU, written out: the same numbers, in any type, and nothing else is touched."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxport.graphs.passes.write_gelu import write_gelu

X = np.array([-65504, -300, -41, -8, -3, -1, -1e-3, 0, 1e-3, 0.5, 2, 5, 41, 300, 65504])


def model(dtype: int, **attributes: str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gelu", ["x"], ["once"], name="first", **attributes),
        helper.make_node("Neg", ["once"], ["less"]),
        helper.make_node("Gelu", ["less"], ["y"], name="second", **attributes),
    ]
    infos = [helper.make_tensor_value_info(name, dtype, ["n"]) for name in ("x", "once", "y")]
    graph = helper.make_graph(nodes, "gelu", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(of: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(of.SerializeToString(), options)
    found: np.ndarray = session.run(["once"], {"x": x})[0]
    return found


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(TensorProto.FLOAT, 1e-6), (TensorProto.FLOAT16, 2e-2)]
)
def test_it_computes_the_same(dtype: int, rtol: float) -> None:
    before = model(dtype, approximate="tanh")
    result = write_gelu(before)
    assert result.changes == {"GELUs written out": 2}
    assert not [node for node in result.model.graph.node if node.op_type == "Gelu"]
    onnx.checker.check_model(result.model, full_check=True)
    assert len(result.model.graph.initializer) == 2, "constants are shared"
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    wide = X.astype(kind).astype(np.float64)
    z = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    expected = wide / (1 + np.exp(-2 * np.clip(z, -300, 300)))
    found = run(result.model, X.astype(kind))
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("attributes", [{}, {"approximate": "none"}])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(TensorProto.FLOAT, 1e-6), (TensorProto.FLOAT16, 2e-3)]
)
def test_what_is_exact_is_too(dtype: int, rtol: float, attributes: dict[str, str]) -> None:
    before = model(dtype, **attributes)
    result = write_gelu(before)
    assert result.changes == {"GELUs written out": 2}
    assert not [node for node in result.model.graph.node if node.op_type == "Gelu"]
    onnx.checker.check_model(result.model, full_check=True)
    assert len(result.model.graph.initializer) == 3, "constants are shared"
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    wide = X.astype(kind).astype(np.float64)
    expected = [x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in wide]
    found = run(result.model, X.astype(kind))
    # 1 + erf is a difference of what is near 1 below 0.
    epsilon = float(np.finfo(kind).eps)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=8 * epsilon)


def test_an_approximation_that_is_not_known_stays() -> None:
    before = model(TensorProto.FLOAT, approximate="sigmoid")
    assert write_gelu(before).model == before


def test_an_operator_of_that_name_that_is_not_onnx_s_stays() -> None:
    for attributes in ({"approximate": "tanh"}, {}):
        before = model(TensorProto.FLOAT, **attributes)
        for node in before.graph.node:
            node.domain = "com.microsoft"
        assert write_gelu(before).model == before
