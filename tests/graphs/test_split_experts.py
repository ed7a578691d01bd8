"""Experts in standard operators: what they compute, and which nodes they are made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxport.errors import ArtifactError
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.passes.split_experts import split_experts
from tests.graphs.expert_models import COUNT, TYPES, inputs, layer


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


def test_onnx_runtime_computes_the_same(tmp_path: Path) -> None:
    made = layer(tmp_path, 4, TYPES["float32"])
    x, logits = inputs(5)
    split = split_experts(made.model).model
    np.testing.assert_allclose(
        made.run(split, x, logits), made.run(made.model, x, logits), atol=1e-5
    )


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
def test_experts_of_another_kind_are_refused(
    tmp_path: Path, attribute: str, value: int | str
) -> None:
    made = layer(tmp_path, 4, TYPES["float32"])
    (node,) = [node for node in made.model.graph.node if node.op_type == "QMoE"]
    set_attribute(node, attribute, value)
    with pytest.raises(ArtifactError, match="QMoE 'experts' is not as the exporter writes it"):
        split_experts(made.model)
