"""Experts in standard operators: what they compute, and which nodes they are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxport.errors import ArtifactError
from onnxport.graphs.experts import Swiglu
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.passes.split_experts import split_experts
from tests.graphs.expert_models import COUNT, TYPES, UNGATED, VARIANTS, inputs, layer


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_definition_is_computed(
    tmp_path: Path, bits: int | None, dtype: str, normalized: bool
) -> None:
    made = layer(tmp_path, bits, TYPES[dtype], normalized=normalized)
    result = split_experts(made.model)
    assert result.changes == {"layers of experts split": 1}
    kinds = {node.op_type for node in result.model.graph.node}
    assert not kinds & {"MoE", "QMoE"}
    assert ("MatMulNBits" in kinds) == (bits is not None)
    x, logits = inputs(9)
    expected, found = made.expected(x, logits), made.run(result.model, x, logits)
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("variant", sorted((VARIANTS | UNGATED).keys() - {"plain"}))
def test_biases_and_other_activations(
    tmp_path: Path, variant: str, bits: int | None, dtype: str
) -> None:
    made = layer(tmp_path, bits, TYPES[dtype], variant)
    x, logits = inputs(9)
    expected = made.expected(x, logits)
    plain = replace(made, swiglu=Swiglu(), biases=None).expected(x, logits)
    assert np.abs(expected - plain).max() > 0.1  # it tells
    found = made.run(split_experts(made.model).model, x, logits)
    np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("bits", [None, 4])
def test_onnx_runtime_computes_the_same(tmp_path: Path, bits: int | None, variant: str) -> None:
    made = layer(tmp_path, bits, TYPES["float32"], variant)
    x, logits = inputs(5)
    split = split_experts(made.model).model
    np.testing.assert_allclose(
        made.run(split, x, logits), made.run(made.model, x, logits), atol=1e-5
    )


@pytest.mark.parametrize("bits", [None, 4])
def test_onnx_runtime_refuses_experts_without_a_gate(tmp_path: Path, bits: int | None) -> None:
    made = layer(tmp_path, bits, TYPES["float32"], "relu2")
    with pytest.raises(Exception, match="relu2"):
        made.run(made.model, *inputs(5))


def test_beyond_the_limit_nothing_changes(tmp_path: Path) -> None:
    made = layer(tmp_path, None, TYPES["float32"], "limit")
    made.gate_up[:] = np.abs(made.gate_up)  # so that all of gate and up are beyond it
    x, logits = inputs(4)
    stored = made.gate_up.tobytes() + made.down.tobytes()
    (made.folder / "model.onnx.data").write_bytes(bytes(64) + stored)
    model = split_experts(made.model).model
    far, farther = (made.run(model, np.abs(x) * scale, logits) for scale in (50, 1000))
    np.testing.assert_array_equal(far, farther)
    np.testing.assert_allclose(far, made.expected(np.abs(x) * 50, logits), atol=1e-5)


def test_a_row_that_overflows_spoils_no_other_one(tmp_path: Path) -> None:
    made = layer(tmp_path, None, TYPES["float32"], "all")
    model = split_experts(made.model).model
    x, logits = inputs(7)
    spoiled = x.copy()
    spoiled[3] = np.inf
    found = made.run(model, spoiled, logits)
    others = [0, 1, 2, 4, 5, 6]
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(found[others], made.run(model, x, logits)[others])


def test_of_equal_logits_the_first_are_chosen(tmp_path: Path) -> None:
    made = layer(tmp_path, None, TYPES["float32"])
    x, _ = inputs(3)
    logits = np.zeros((3, COUNT), np.float32)
    logits[1, [2, 4, 5]] = 1
    found = made.run(split_experts(made.model).model, x, logits)
    np.testing.assert_allclose(found, made.expected(x, logits), atol=1e-5)


def test_what_is_not_finite_stays_where_it_is(tmp_path: Path) -> None:
    made = layer(tmp_path, None, TYPES["float32"])
    x, logits = inputs(4)
    clean = made.run(split_experts(made.model).model, x, logits)
    x[1], logits[2, 3] = 1e30, np.nan  # experts that are not chosen overflow, too
    found = made.run(split_experts(made.model).model, x, logits)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(found[[0, 3]], clean[[0, 3]])


def test_an_expert_that_overflows_spoils_nothing_where_it_is_not_chosen(tmp_path: Path) -> None:
    made = layer(tmp_path, None, TYPES["float32"])
    x, logits = inputs(2)
    logits[:, 5] = -10
    model = split_experts(made.model).model
    before = made.run(model, x, logits)
    path = made.folder / "model.onnx.data"
    stored = np.frombuffer(path.read_bytes()[64:], np.float32).copy()
    stored[5 * made.gate_up[0].size : 6 * made.gate_up[0].size] = np.float32(3e38)
    path.write_bytes(bytes(64) + stored.tobytes())
    np.testing.assert_array_equal(made.run(model, x, logits), before)


def test_some_may_stay(tmp_path: Path) -> None:
    made = layer(tmp_path, 8, TYPES["float32"])
    result = split_experts(made.model, lambda node: node.op_type == "MoE")
    assert result.changes == {}
    assert result.model == made.model


def test_graphs_without_experts_stay() -> None:
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "none", [], []))
    assert split_experts(empty).model == empty


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("activation_type", "relu"), ("swiglu_fusion", 2), ("normalize_routing_weights", 0)],
)
@pytest.mark.parametrize("variant", ["plain", "all", "relu2"])
def test_experts_of_another_kind_are_refused(
    tmp_path: Path, variant: str, attribute: str, value: int | str
) -> None:
    made = layer(tmp_path, 4, TYPES["float32"], variant)
    (node,) = [node for node in made.model.graph.node if node.op_type == "QMoE"]
    set_attribute(node, attribute, value)
    with pytest.raises(ArtifactError, match="QMoE 'experts' is not as the exporter writes it"):
        split_experts(made.model)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("which", ["gate_up.bias", "down.bias"])
def test_a_bias_without_the_other_is_refused(tmp_path: Path, which: str, bits: int | None) -> None:
    made = layer(tmp_path, bits, TYPES["float32"], "all")
    (node,) = [node for node in made.model.graph.node if node.op_type in ("MoE", "QMoE")]
    node.input[:] = ["" if name == which else name for name in node.input]
    with pytest.raises(ArtifactError, match="'experts' is not as the exporter writes it"):
        split_experts(made.model)
