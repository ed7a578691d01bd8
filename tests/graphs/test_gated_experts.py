"""Experts with int8 activations: which nodes change, which must not, and what they compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs.experts import FP4, Swiglu
from onnxport.graphs.inspect import initializers
from onnxport.graphs.passes.gated_experts import use_gated_experts
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.stored_scales import use_stored_scales
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.graphs.expert_models import (
    BLOCK,
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
from tests.graphs.test_int8_experts import EDITS

KERNEL = pytest.mark.skipif(
    find_library() is None or matmul_isa() is None,
    reason="the C++ kernels were not built, or this processor has no kernel of ours",
)


def test_the_node(tmp_path: Path) -> None:
    made = layer(tmp_path, 4, TYPES["float32"], level=4)
    before = made.model.SerializeToString()
    result = use_gated_experts(made.model)
    assert made.model.SerializeToString() == before
    assert result.changes == {"layers of experts with int8 activations": 1}
    node = result.model.graph.node[0]
    assert (node.op_type, node.domain, node.name) == ("GatedExperts", "onnxport", "experts")
    names = ["gate_up.weight", "gate_up.scales", "down.weight", "down.scales"]
    assert list(node.input) == ["x", "router", *names]
    assert {a.name: a.i for a in node.attribute} == {
        "K": HIDDEN,
        "inner": SIZE,
        "N": HIDDEN,
        "num_experts": COUNT,
        "top_k": PER_TOKEN,
        "normalize": 1,
        "bits": 4,
        "block_size": BLOCK,
        "down_bits": 4,
        "down_block_size": BLOCK,
    }


def test_the_node_with_all_that_there_may_be(tmp_path: Path) -> None:
    plain = use_gated_experts(layer(tmp_path, 4, TYPES["float32"], level=4).model).model
    made = use_gated_experts(layer(tmp_path, 4, TYPES["float32"], "all", level=4).model).model
    before, after = plain.graph.node[0], made.graph.node[0]
    assert list(after.input) == [*before.input, "gate_up.bias", "down.bias"]
    added = [a for a in after.attribute if a not in before.attribute]
    assert len(after.attribute) == len(before.attribute) + len(added)
    wanted = {"alpha": 1.702, "up_offset": 1.0, "limit": 0.75}
    assert {a.name: a.f for a in added} == pytest.approx(wanted)


def test_the_node_without_a_gate(tmp_path: Path) -> None:
    made = layer(tmp_path, 4, TYPES["float32"], "relu2", level=4)
    node = use_gated_experts(made.model).model.graph.node[0]
    found = {a.name: a.i for a in node.attribute}
    assert (found["inner"], found["is_relu2"]) == (SIZE, 1)
    assert not found.keys() & {"is_gelu", "alpha", "up_offset", "limit"}


OTHERS = [name for name in (*VARIANTS, *UNGATED) if name != "plain"]
CASES = [("plain", True), ("plain", False), *((name, True) for name in OTHERS)]


@KERNEL
@pytest.mark.parametrize(("variant", "normalized"), CASES)
@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("bits", [4, 8, FP4])
def test_what_it_computes(
    tmp_path: Path, bits: int | str, dtype: str, variant: str, normalized: bool
) -> None:
    made = layer(tmp_path, bits, TYPES[dtype], variant, normalized=normalized, level=4)
    stored = made.model
    model = use_gated_experts(retype(stored, made.read).model).model
    model = use_stored_scales(model, stored).model
    (node,) = [node for node in model.graph.node if node.op_type == "GatedExperts"]
    scales = initializers(model)[node.input[3]]
    assert scales.data_type == (TensorProto.UINT8 if bits == FP4 else TYPES[dtype])
    x, logits = inputs(9)
    expected = made.expected(x, logits)
    found = made.run(model, x, logits, find_library())
    assert 0 < np.abs(found - expected).max() < 0.02 * np.ptp(expected)
    if variant != "plain":  # it tells, by more than what rounding may change
        plain = replace(made, swiglu=Swiglu(), biases=None).expected(x, logits)
        assert np.abs(plain - expected).max() > 0.05 * np.ptp(expected)
    alone = [made.run(model, x[i : i + 1], logits[i : i + 1], find_library()) for i in range(9)]
    np.testing.assert_array_equal(np.concatenate(alone), found)


@KERNEL
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("sigmoid", "corrected"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_a_row_has_the_same_bits_however_its_experts_are_chosen(
    tmp_path: Path, sigmoid: bool, corrected: bool, normalized: bool
) -> None:
    made = layer(
        *(tmp_path, 4, TYPES["float32"]),
        normalized=normalized,
        level=4,
        sigmoid=sigmoid,
        corrected=corrected,
    )
    model = use_gated_experts(made.model).model
    x, logits = inputs(41)
    found = made.run(model, x, logits, find_library())
    expected = made.expected(x, logits)
    assert 0 < np.abs(found - expected).max() < 0.02 * np.ptp(expected)
    for size in (1, 3, 8):
        parts = [slice(i, i + size) for i in range(0, len(x), size)]
        several = [made.run(model, x[part], logits[part], find_library()) for part in parts]
        np.testing.assert_array_equal(np.concatenate(several), found)


def _bias(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "QMoE")
    node.input[4] = "bias"
    zeros = numpy_helper.from_array(np.zeros((COUNT, 2 * SIZE), np.float32), "bias")
    model.graph.initializer.append(zeros)


def _without(name: str) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "QMoE")
        node.input[:] = ["" if one == name else one for one in node.input]

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        with_attribute("accuracy_level", 1),
        with_attribute("expert_weight_bits", 2),
        with_attribute("block_size", 512),
        with_attribute("activation_type", "relu"),
        with_attribute("swiglu_fusion", 2),
        with_attribute("normalize_routing_weights", 0),
        _bias,
        in_float16("down.scales"),
    ],
)
def test_others_stay(tmp_path: Path, edit: Edit) -> None:
    model = layer(tmp_path, 4, TYPES["float32"], level=4).model
    edit(model)
    result = use_gated_experts(model)
    assert result.changes == {}
    assert result.model == model


@pytest.mark.parametrize(
    "edit",
    [
        with_attribute("accuracy_level", 1),
        with_attribute("activation_type", "relu"),
        *(
            make(f"{of}.bias")
            for make in (in_float16, as_input, _without)
            for of in ("gate_up", "down")
        ),
    ],
)
def test_others_with_biases_stay(tmp_path: Path, edit: Edit) -> None:
    model = layer(tmp_path, 4, TYPES["float32"], "all", level=4).model
    edit(model)
    result = use_gated_experts(model)
    assert result.changes == {}
    assert result.model == model


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_the_node_of_experts_in_mxfp4(tmp_path: Path, variant: str) -> None:
    made = layer(tmp_path, FP4, TYPES["float32"], variant, level=4)
    before = made.model.SerializeToString()
    result = use_gated_experts(made.model)
    assert made.model.SerializeToString() == before
    node = result.model.graph.node[0]
    names = ["gate_up.weight", "gate_up.scales.bytes", "down.weight", "down.scales.bytes"]
    biases = ["gate_up.bias", "down.bias"] if variant == "all" else []
    assert list(node.input) == ["x", "router", *names, *biases]
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert values["quant_type"] == b"fp4"
    assert (values["K"], values["inner"], values["N"]) == (HIDDEN, SIZE, HIDDEN)
    sizes = ("bits", "down_bits", "block_size", "down_block_size")
    assert [values[name] for name in sizes] == [4, 4, 32, 32]
    tensors = initializers(result.model)
    assert tensors.keys() == {*names, *biases}
    stored = initializers(made.model)
    for name in ("gate_up", "down"):
        found = tensors[f"{name}.scales.bytes"]
        assert found.data_type == TensorProto.UINT8
        expected = made.read(stored[f"{name}.scales"]).view(np.uint8)
        np.testing.assert_array_equal(made.read(found), expected)
    assert use_stored_scales(result.model, made.model).model == result.model


@pytest.mark.parametrize("edit", EDITS)
def test_experts_in_mxfp4_of_another_kind_are_refused(tmp_path: Path, edit: Edit) -> None:
    model = layer(tmp_path, FP4, TYPES["float32"], level=4).model
    edit(model)
    with pytest.raises(ArtifactError, match="QMoE 'experts', of experts in MXFP4, is not as"):
        use_gated_experts(model)


@pytest.mark.parametrize("edit", [with_attribute("accuracy_level", 1), in_float16("down.bias")])
def test_others_in_mxfp4_stay(tmp_path: Path, edit: Edit) -> None:
    model = layer(tmp_path, FP4, TYPES["float32"], "all", level=4).model
    edit(model)
    assert use_gated_experts(model).model == model


def test_floats_stay(tmp_path: Path) -> None:
    model = layer(tmp_path, None, TYPES["float32"], level=4).model
    assert use_gated_experts(model).model == model
