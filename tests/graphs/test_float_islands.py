"""What stays float32 where a graph of float32 changes its type, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs import contract as c
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.float_islands import float_islands
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.split_experts import split_experts
from tests.graphs.expert_models import COUNT, TYPES, Layer, inputs, layer

FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
CAP = 3.0
# A correction near 8, where numbers of float16 are 1/128 apart: scores would be the same.
NEAR = (8 + np.arange(COUNT, 0, -1) / 1024).astype(np.float32)


def corrected(
    folder: Path, *, sigmoid: bool, normalized: bool = True, grouped: bool = False
) -> Layer:
    made = layer(
        *(folder, None, TYPES["float32"]),
        corrected=True,
        sigmoid=sigmoid,
        normalized=normalized,
        grouped=grouped,
    )
    (tensor,) = [one for one in made.model.graph.initializer if one.name == "correction"]
    tensor.CopyFrom(numpy_helper.from_array(NEAR, "correction"))
    return replace(made, correction=NEAR)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_experts_are_chosen_in_float32(
    tmp_path: Path, sigmoid: bool, normalized: bool, grouped: bool
) -> None:
    made = corrected(tmp_path, sigmoid=sigmoid, normalized=normalized, grouped=grouped)
    half = retype(split_experts(made.model).model, made.read, "float16")
    assert half.changes["parts kept in float32"] == 2
    x, logits = inputs(64)
    # Scores that differ by less than float16 tells near 8, and by more than it tells near 1/2.
    logits = (logits / 256).astype(np.float16).astype(np.float32)
    expected = made.expected(x.astype(np.float16).astype(np.float32), logits)
    found = made.run(half.model, x, logits, attached=half.attached)
    np.testing.assert_allclose(found, expected, atol=2e-2 * np.abs(expected).max())
    others = replace(made, correction=NEAR[::-1].copy()).expected(x, logits)
    assert np.abs(others - expected).max() > np.abs(expected).max() / 2  # it tells


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_a_choice_has_the_nodes_that_a_16_bit_graph_has(
    tmp_path: Path, dtype: int, sigmoid: bool, normalized: bool, grouped: bool
) -> None:
    kinds = []
    for stored in (FLOAT, dtype):
        made = layer(
            *(tmp_path, None, stored),
            corrected=True,
            sigmoid=sigmoid,
            normalized=normalized,
            grouped=grouped,
        )
        name = {FLOAT16: "float16", BFLOAT16: "bfloat16"}[dtype]
        model = retype(made.model, made.read, name).model
        types = element_types(model)
        kinds.append(
            sorted(
                str((node.op_type, *(types.get(each) for each in (*node.input, *node.output))))
                for node in model.graph.node
            )
        )
    assert kinds[0] == kinds[1]


def capped(edit: Callable[[GraphBuilder, str], str] | None = None) -> onnx.ModelProto:
    """Logits -x, with a cap of their own."""
    g = GraphBuilder("capped")
    x = g.input("x", FLOAT, ["n", 4])
    values = ops.cast(g, g.node("Neg", [x], name="head"), FLOAT, "head.cast")
    values = ops.softcap(g, values, CAP, "head.cap")
    if edit is not None:
        values = edit(g, values)
    g.output(c.LOGITS, FLOAT, ["n", 4])
    g.node("Cast", [values], outputs=[c.LOGITS], name="head.capped", to=FLOAT)
    return g.build()


def run(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {"x": x})
    return found


def test_logits_are_capped_in_float32() -> None:
    x = np.linspace(-20, 20, 400, dtype=np.float32).reshape(-1, 4).astype(np.float16)
    half = retype(capped(), numpy_helper.to_array, "float16")
    assert half.changes["parts kept in float32"] == 1
    (found,) = run(half.model, x)
    np.testing.assert_array_equal(found, run(capped(), x.astype(np.float32))[0])
    assert len(np.unique(found)) > len(np.unique(found.astype(np.float16)))
    assert [node.op_type for node in half.model.graph.node if node.op_type == "Cast"] == [
        "Cast"
    ] * 2
    assert retype(half.model, numpy_helper.to_array, "float16").model == half.model


def test_a_number_that_others_read_too_is_there_twice() -> None:
    """A constant of the cap, which the rest of the graph multiplies with."""
    model = capped()
    (over,) = [tensor.name for tensor in model.graph.initializer if tensor.name.startswith("over")]
    model.graph.node.append(helper.make_node("Mul", ["x", over], ["y"]))
    model.graph.output.append(helper.make_tensor_value_info("y", FLOAT, ["n", 4]))
    half = retype(model, numpy_helper.to_array, "float16").model
    x = np.array([[1, 2, 3, 4]], np.float16)
    logits, y = run(half, x)
    np.testing.assert_array_equal(logits, run(capped(), x.astype(np.float32))[0])
    np.testing.assert_array_equal(y, x * np.float16(1 / CAP))


def in_half(g: GraphBuilder, values: str) -> str:
    return g.node("Relu", [values], name="more")


def test_what_is_no_cap_of_logits_changes_its_type() -> None:
    """Another operator is between, or the cap is of something else."""
    model = capped(in_half)
    assert float_islands(model) == []
    types = element_types(retype(model, numpy_helper.to_array, "float16").model)
    assert {kind for name, kind in types.items() if name != c.LOGITS} == {FLOAT16}
    model = capped()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "other"
    assert float_islands(model) == []


def cut_off(middle: Callable[[GraphBuilder, str], str] | None = None) -> onnx.ModelProto:
    """What is more than half a deviation above the mean, of float32."""
    g = GraphBuilder("test")
    x = g.input("x", FLOAT, ["n", 64])
    g.output("y", FLOAT, ["n", 64])
    values = ops.above_deviations(g, x, 0.5, FLOAT)
    values = middle(g, values) if middle else values
    g.node("Mul", [values, x], outputs=["y"], name="gated")
    return g.build()


def test_deviations_are_of_float32() -> None:
    """Squares of these are more than float16 holds."""
    random = np.random.default_rng(0)
    x = (random.standard_normal((5, 64)) * 400 + 1000).astype(np.float16)
    half = retype(cut_off(), numpy_helper.to_array, "float16")
    assert half.changes["parts kept in float32"] == 1
    expected = np.maximum(
        x.astype(np.float32)
        - x.mean(-1, keepdims=True, dtype=np.float32)
        - 0.5 * x.std(-1, keepdims=True, dtype=np.float32),
        0,
    )
    (node,) = [one for one in half.model.graph.node if one.op_type == "Relu"]
    half.model.graph.output.append(helper.make_tensor_value_info(node.output[0], FLOAT, ["n", 64]))
    _, above = run(half.model, x)
    np.testing.assert_allclose(above, expected, atol=1e-2)
    assert retype(half.model, numpy_helper.to_array, "float16").model == half.model


@pytest.mark.parametrize(("old", "new"), [("Sqrt", "Exp"), ("ReduceMean", "ReduceMax")])
def test_what_cuts_nothing_off_by_deviations_is_none(old: str, new: str) -> None:
    model = cut_off()
    assert len(float_islands(model)) == 1
    next(node for node in model.graph.node if node.op_type == old).op_type = new
    assert float_islands(model) == []


def replaced(made: Layer, old: str, new: str) -> onnx.ModelProto:
    (node,) = [node for node in made.model.graph.node if node.op_type == old]
    node.op_type = new
    return made.model


@pytest.mark.parametrize(("old", "new"), [("Sigmoid", "Tanh"), ("Log", "Exp"), ("Min", "Max")])
def test_what_is_no_choice_of_experts_is_none(tmp_path: Path, old: str, new: str) -> None:
    made = layer(tmp_path, None, FLOAT, sigmoid=True, corrected=True)
    assert len(float_islands(made.model)) == 1
    assert float_islands(replaced(made, old, new)) == []


def test_a_choice_that_reads_something_else_is_none(tmp_path: Path) -> None:
    made = layer(tmp_path, None, FLOAT, sigmoid=True, corrected=True)
    (ranked,) = [node for node in made.model.graph.node if node.op_type == "Add"]
    ranked.input[1] = "x"
    assert float_islands(made.model) == []


@pytest.mark.parametrize(("old", "new"), [("Softmax", "Sigmoid"), ("Less", "LessOrEqual")])
def test_what_is_no_part_of_experts_is_none(tmp_path: Path, old: str, new: str) -> None:
    made = layer(tmp_path, None, FLOAT)
    split = split_experts(made.model).model
    assert len(float_islands(split)) == 1
    assert float_islands(replaced(replace(made, model=split), old, new)) == []
