"""Experts with weights in floats: which nodes change, which must not, and what they compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from onnxport.graphs.inspect import initializers
from onnxport.graphs.passes.float_experts import float_expert_weights, use_float_experts
from onnxport.graphs.passes.retype import retype
from onnxport.providers.cpu.library import find_library
from tests.graphs.expert_models import (
    COUNT,
    HIDDEN,
    PER_TOKEN,
    SIZE,
    TYPES,
    UNGATED,
    VARIANTS,
    Edit,
    as_input,
    in_float16,
    inputs,
    layer,
    with_attribute,
)

KERNEL = pytest.mark.skipif(find_library() is None, reason="the C++ kernels were not built")
WEIGHTS = frozenset({"gate_up.weight", "down.weight"})


def test_the_node(tmp_path: Path) -> None:
    made = layer(tmp_path, None, TYPES["float32"])
    before = made.model.SerializeToString()
    assert float_expert_weights(made.model) == WEIGHTS
    result = use_float_experts(made.model)
    assert made.model.SerializeToString() == before
    assert result.changes == {"layers of experts in floats": 1}
    node = result.model.graph.node[0]
    assert (node.op_type, node.domain, node.name) == ("FloatExperts", "onnxport", "experts")
    assert list(node.input) == ["x", "router", "gate_up.weight", "down.weight"]
    assert {a.name: a.i for a in node.attribute} == {
        "K": HIDDEN,
        "inner": SIZE,
        "N": HIDDEN,
        "num_experts": COUNT,
        "top_k": PER_TOKEN,
        "normalize": 1,
    }


def test_the_node_with_all_that_there_may_be(tmp_path: Path) -> None:
    model = layer(tmp_path, None, TYPES["float32"], "all").model
    assert float_expert_weights(model) == WEIGHTS
    node = use_float_experts(model).model.graph.node[0]
    assert list(node.input)[4:] == ["gate_up.bias", "down.bias"]
    wanted = {"alpha": 1.702, "up_offset": 1.0, "limit": 0.75}
    found = {a.name: a.f for a in node.attribute if a.name in wanted}
    assert found == pytest.approx(wanted)


def test_the_node_without_a_gate(tmp_path: Path) -> None:
    node = use_float_experts(
        layer(tmp_path, None, TYPES["float32"], "relu2").model
    ).model.graph.node[0]
    found = {a.name: a.i for a in node.attribute}
    assert (found["inner"], found["is_relu2"]) == (SIZE, 1)
    assert not found.keys() & {"is_gelu", "alpha", "up_offset", "limit"}


@KERNEL
@pytest.mark.parametrize("variant", [*VARIANTS, *UNGATED])
@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_what_it_computes(tmp_path: Path, dtype: str, variant: str) -> None:
    made = layer(tmp_path, None, TYPES[dtype], variant)

    def read(tensor: TensorProto) -> np.ndarray:
        assert tensor.name not in WEIGHTS, "it was to stay as it is"
        return made.read(tensor)

    kept = float_expert_weights(made.model)
    model = use_float_experts(retype(made.model, read, kept=kept).model).model
    assert [node.op_type for node in model.graph.node].count("FloatExperts") == 1
    assert {initializers(model)[name].data_type for name in WEIGHTS} == {TYPES[dtype]}
    x, logits = inputs(41)
    expected = made.expected(x, logits)
    found = made.run(model, x, logits, find_library())
    assert 0 < np.abs(found - expected).max() < 2e-6 * np.ptp(expected)
    for size in (1, 3, 8):
        parts = [slice(i, i + size) for i in range(0, len(x), size)]
        several = [made.run(model, x[part], logits[part], find_library()) for part in parts]
        np.testing.assert_array_equal(np.concatenate(several), found)


@pytest.mark.parametrize(
    "edit",
    [
        with_attribute("activation_type", "relu"),
        with_attribute("swiglu_fusion", 2),
        with_attribute("normalize_routing_weights", 0),
        in_float16("down.weight"),
        in_float16("gate_up.bias"),
        as_input("gate_up.weight"),
        as_input("down.bias"),
    ],
)
def test_others_stay(tmp_path: Path, edit: Edit) -> None:
    model = layer(tmp_path, None, TYPES["float32"], "all").model
    edit(model)
    result = use_float_experts(model)
    assert result.changes == {}
    assert result.model == model


def test_quantized_experts_stay(tmp_path: Path) -> None:
    model = layer(tmp_path, 4, TYPES["float32"], level=4).model
    assert float_expert_weights(model) == frozenset()
    assert use_float_experts(model).model == model
