"""Fusing the gated GELU: where it fires, where it must not, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import helper

from onnxport.graphs.passes.gated_gelu import fuse_gated_gelu
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from tests.graphs import test_gated_silu
from tests.graphs.test_gated_silu import INNER, ISAS, Nodes, check_extremes, model, run, run_with


def nodes(axis: int = -1, approximate: str = "tanh") -> Nodes:
    return [
        *test_gated_silu.nodes(axis)[:2],
        helper.make_node("Gelu", ["gate"], ["gelu"], approximate=approximate),
        helper.make_node("Mul", ["up", "gelu"], ["y"], name="gated"),
    ]


def reference(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    power = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-power)) * up


def test_it_becomes_one_node_of_the_same_name_and_result() -> None:
    before = model(nodes())
    result = fuse_gated_gelu(before)
    assert result.changes == {"gated GELUs fused": 1}
    assert [node.op_type for node in result.model.graph.node] == ["Identity", "GatedGelu"]
    assert result.model.graph.node[1].name == "gated"
    assert len(before.graph.node) == 4
    x = np.random.default_rng(0).standard_normal((5, 2 * INNER)).astype(np.float32) * 4
    np.testing.assert_allclose(run(result.model, x), reference(x), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(run(before, x), reference(x), rtol=1e-5, atol=2e-5)


@ISAS
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (700, 130), (0, 24)])
def test_every_instruction_set_computes_it(isa: str, shape: tuple[int, int]) -> None:
    rows, inner = shape
    random = np.random.default_rng(inner)
    x = (random.standard_normal((rows, 2 * inner)) * 4).astype(np.float32)
    found = run_with(isa, fuse_gated_gelu(model(nodes(), inner=inner)).model, x)
    assert found.shape == (rows, inner)
    # 2^power is as exact as power, which is near 126 at most where the result is no zero
    np.testing.assert_allclose(found, reference(x), rtol=3e-5, atol=1e-30)


def test_extremes_stay_what_they_are() -> None:
    check_extremes(fuse_gated_gelu, nodes, 10, -20)


def _other_axis(_: Nodes) -> Nodes:
    return nodes(axis=0)


def _exact(_: Nodes) -> Nodes:
    return nodes(approximate="none")


def _three_parts(of: Nodes) -> Nodes:
    of[1] = helper.make_node("Split", ["joined"], ["gate", "up", "rest"], axis=-1, num_outputs=3)
    return of


def _of_another_domain(of: Nodes) -> Nodes:
    of[2].domain = "com.microsoft"
    return of


def _product_with_the_gate(of: Nodes) -> Nodes:
    of[3] = helper.make_node("Mul", ["gate", "gelu"], ["y"])
    return of


def _sum_instead_of_product(of: Nodes) -> Nodes:
    of[3] = helper.make_node("Add", ["up", "gelu"], ["y"])
    return of


def _activated_used_elsewhere(of: Nodes) -> Nodes:
    return [*of, helper.make_node("Neg", ["gelu"], ["other"])]


def _gate_used_elsewhere(of: Nodes) -> Nodes:
    return [*of, helper.make_node("Neg", ["gate"], ["other"])]


def _silu(_: Nodes) -> Nodes:
    return test_gated_silu.nodes()


@pytest.mark.parametrize(
    "change",
    [
        _other_axis,
        _exact,
        _three_parts,
        _of_another_domain,
        _product_with_the_gate,
        _sum_instead_of_product,
        _activated_used_elsewhere,
        _gate_used_elsewhere,
        _silu,
    ],
)
def test_near_misses_are_left_alone(change: Callable[[Nodes], Nodes]) -> None:
    before = model(change(nodes()))
    result = fuse_gated_gelu(before)
    assert not result.changes
    assert result.model == before


@pytest.mark.parametrize("name", ["gate", "up", "gelu"])
def test_a_graph_output_inside_the_pattern_is_kept(name: str) -> None:
    assert not fuse_gated_gelu(model(nodes(), (name,))).changes


def test_the_pass_for_silus_leaves_it_alone() -> None:
    assert not fuse_gated_silu(model(nodes())).changes
