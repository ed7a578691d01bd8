"""Fusing gated feed-forward layers: where it fires, where it must not, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx
import pytest
from onnx import TensorProto, helper

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import attribute_int, input_at, set_input
from onnxport.graphs.lora import SlotDtype
from onnxport.graphs.passes.gated_mlp import (
    MLP_OFFSETS,
    MLP_ZERO_POINTS,
    fuse_gated_mlp,
    zero_point_bytes,
)
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.lora import add_lora, add_lora_operator
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.split_matmul import split_matmul
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.conformance.make import make_artifact
from tests.kernels import matmul_cases, mlp_cases, mlp_lora_cases
from tests.kernels.mlp_cases import MlpCase


def case() -> MlpCase:
    return mlp_cases.make_case(2, (4, 32), (8, 64), (96, 70, 40), 5)


def model() -> onnx.ModelProto:
    """The three operators, as the passes before leave them."""
    of = onnx.load_from_string(mlp_cases.separate(case()))
    for node, name in zip(of.graph.node, ("gate_up", "gate", "down"), strict=True):
        node.name = name
    return of


def test_it_becomes_one_node_with_the_same_bits() -> None:
    before = model()
    untouched = before.SerializeToString()
    result = fuse_gated_mlp(before)
    assert result.changes == {"gated feed-forward layers fused": 1}
    assert before.SerializeToString() == untouched
    (node,) = result.model.graph.node
    assert (node.op_type, node.domain, node.name) == ("GatedMlp", "onnxport", "down")
    assert list(node.input) == ["x", "w1", "s1", "w2", "s2"]
    assert list(node.output) == ["y"]
    assert {a.name: a.i for a in node.attribute} == {
        "K": 96,
        "inner": 70,
        "N": 40,
        "bits": 4,
        "block_size": 32,
        "down_bits": 8,
        "down_block_size": 64,
    }
    library = find_library()
    if library is None or matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    apart, together = (
        matmul_cases.session(library, of.SerializeToString()).run(["y"], {"x": case().x})[0]
        for of in (before, result.model)
    )
    assert together.tobytes() == apart.tobytes()


@pytest.mark.parametrize("has_zeros", [(True, False), (False, True), (True, True)])
def test_zero_points_go_along(has_zeros: tuple[bool, bool]) -> None:
    of = mlp_cases.make_case(2, (4, 32), (8, 64), (96, 70, 40), 5, has_zeros)
    (node,) = fuse_gated_mlp(onnx.load_from_string(mlp_cases.separate(of))).model.graph.node
    (wanted,) = onnx.load_from_string(mlp_cases.fused(of)).graph.node
    assert list(node.input) == list(wanted.input)
    assert [bool(input_at(node, place)) for place in MLP_ZERO_POINTS] == list(has_zeros)


@pytest.mark.parametrize("has_offsets", [(True, False), (False, True), (True, True)])
def test_offsets_go_along(has_offsets: tuple[bool, bool]) -> None:
    of = mlp_cases.make_case(
        2, (4, 32), (4, 32), (96, 70, 40), 5, (not has_offsets[0], False), has_offsets
    )
    (node,) = fuse_gated_mlp(onnx.load_from_string(mlp_cases.separate(of))).model.graph.node
    (wanted,) = onnx.load_from_string(mlp_cases.fused(of)).graph.node
    assert list(node.input) == list(wanted.input)
    assert [bool(input_at(node, place)) for place in MLP_OFFSETS] == list(has_offsets)


@pytest.mark.parametrize("at", [0, 2])
def test_a_product_that_does_more_is_left_alone(at: int) -> None:
    before = model()
    set_input(before.graph.node[at], 5, "bias")
    assert not fuse_gated_mlp(before).changes


@pytest.mark.parametrize("has_zeros", [(False, False), (True, False), (False, True), (True, True)])
def test_what_zero_points_take(has_zeros: tuple[bool, bool]) -> None:
    of = mlp_cases.make_case(2, (4, 32), (8, 64), (96, 70, 40), 5, has_zeros)
    taken = has_zeros[0] * 2 * 140 * 3 + has_zeros[1] * 2 * 40 * 2
    apart = onnx.load_from_string(mlp_cases.separate(of))
    for graph in (apart, fuse_gated_mlp(apart).model):
        assert zero_point_bytes(graph) == taken


def test_a_gelu_is_told() -> None:
    before = onnx.load_from_string(mlp_cases.separate(replace(case(), is_gelu=True)))
    (node,) = fuse_gated_mlp(before).model.graph.node
    assert (node.op_type, attribute_int(node, "is_gelu", 0)) == ("GatedMlp", 1)


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.read(make_artifact(tmp_path_factory.mktemp("mlp"), "qwen2", "int4"))


def lowered(artifact: Artifact) -> onnx.ModelProto:
    return retype(artifact.load_graph("paged"), artifact.read_tensor).model


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    return use_int8_matmul(fuse_gated_silu(model).model).model


def test_every_layer_of_a_decoder_is_fused(int4: Artifact) -> None:
    before = prepared(lowered(int4))
    result = fuse_gated_mlp(before)
    layers = int4.manifest.model.num_layers
    assert result.changes == {"gated feed-forward layers fused": layers}
    kinds = [node.op_type for node in result.model.graph.node]
    assert kinds.count("GatedMlp") == layers
    assert "GatedSilu" not in kinds
    assert len(before.graph.node) - len(kinds) == 2 * layers


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4)])
def test_every_layer_with_adapters_in_integers_is_fused(
    int4: Artifact, dtype: SlotDtype, bits: int
) -> None:
    spec = int4.manifest.model
    before = prepared(add_lora_operator(lowered(int4), spec, 8, dtype).model)
    result = fuse_gated_mlp(before)
    assert result.changes == {"gated feed-forward layers fused": spec.num_layers}
    kinds = [node.op_type for node in result.model.graph.node]
    assert kinds.count("AddLora") == 2 * spec.num_layers, "of qkv and o"
    assert len(before.graph.node) - len(kinds) == 4 * spec.num_layers
    last = [node for node in result.model.graph.node if node.op_type == "GatedMlp"][-1]
    adding = [node for node in before.graph.node if node.op_type == "AddLora"][-2:]
    assert list(last.input[5:]) == ["", "", *adding[0].input[2:]]
    assert last.output == adding[1].output
    for name, node in zip(("gate_up", "down"), adding, strict=True):
        for what in ("offset", "ranks"):
            assert attribute_int(last, f"{name}_{what}", -1) == attribute_int(node, what, -2)
    assert attribute_int(last, "max_rank", -1) == 8
    assert attribute_int(last, "adapter_bits", -1) == bits


def test_layers_with_adapters_in_floats_are_left_alone(int4: Artifact) -> None:
    spec = int4.manifest.model
    floats: tuple[SlotDtype, ...] = ("float32", "float16")
    for adapted in (
        add_lora(lowered(int4), spec),
        *(add_lora_operator(lowered(int4), spec, 8, dtype) for dtype in floats),
    ):
        before = prepared(adapted.model)
        assert any(node.op_type == "GatedSilu" for node in before.graph.node)
        assert not fuse_gated_mlp(before).changes


def test_split_products_are_left_alone(int4: Artifact) -> None:
    halves = retype(split_matmul(int4.load_graph("paged")).model, int4.read_tensor).model
    assert not fuse_gated_mlp(prepared(halves)).changes


Change = Callable[[onnx.ModelProto], None]


def _also_reads(value: str) -> Change:
    return lambda of: of.graph.node.append(helper.make_node("Neg", [value], ["other"]))


def _is_an_output(value: str) -> Change:
    info = helper.make_tensor_value_info(value, TensorProto.FLOAT, None)
    return lambda of: of.graph.output.append(info)


def _follows(index: int) -> Change:
    """Puts a sum, such as a bias or an adapter's, behind a node."""

    def change(of: onnx.ModelProto) -> None:
        node = of.graph.node[index]
        result = node.output[0]
        node.output[0] = "base"
        of.graph.node.insert(index + 1, helper.make_node("Add", ["base", "base"], [result]))

    return change


def _domain(index: int) -> Change:
    """As a product at another accuracy level is, or another operator of the name."""

    def change(of: onnx.ModelProto) -> None:
        of.graph.node[index].domain = "com.microsoft"

    return change


def _kind(index: int, kind: str) -> Change:
    def change(of: onnx.ModelProto) -> None:
        of.graph.node[index].op_type = kind

    return change


def _other_width(of: onnx.ModelProto) -> None:
    (inner,) = (a for a in of.graph.node[2].attribute if a.name == "K")
    inner.i -= 1


def _as_scales(of: onnx.ModelProto) -> None:
    """The gated features are the second product's scales."""
    of.graph.node[2].input[0], of.graph.node[2].input[2] = "s2", "activated"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_also_reads("joined"), id="second reader of the projection"),
        pytest.param(_also_reads("activated"), id="second reader of the activation"),
        pytest.param(_is_an_output("joined"), id="projection is an output"),
        pytest.param(_is_an_output("activated"), id="activation is an output"),
        pytest.param(_follows(0), id="sum behind the projection"),
        pytest.param(_follows(1), id="sum behind the activation"),
        pytest.param(_domain(0), id="first product is not ours"),
        pytest.param(_domain(1), id="activation is not ours"),
        pytest.param(_domain(2), id="second product is not ours"),
        pytest.param(_kind(0, "AddLora"), id="no first product"),
        pytest.param(_kind(1, "GatedTanh"), id="another activation"),
        pytest.param(_kind(2, "AddLora"), id="no second product"),
        pytest.param(_other_width, id="widths that do not fit"),
        pytest.param(_as_scales, id="another input of the second product"),
    ],
)
def test_near_misses_are_left_alone(change: Change) -> None:
    before = model()
    change(before)
    result = fuse_gated_mlp(before)
    assert not result.changes
    assert result.model == before
    assert str(result) == "gated_mlp: nothing to do"


def adapted() -> onnx.ModelProto:
    """The five operators of a layer with adapters."""
    return onnx.load_from_string(mlp_lora_cases.separate(mlp_lora_cases.make_case(2, 5)))


def test_adapters_come_along() -> None:
    before = adapted()
    untouched = before.SerializeToString()
    result = fuse_gated_mlp(before)
    assert result.changes == {"gated feed-forward layers fused": 1}
    assert before.SerializeToString() == untouched
    (node,) = result.model.graph.node
    wanted = onnx.load_from_string(mlp_lora_cases.fused(mlp_lora_cases.make_case(2, 5)))
    (same,) = wanted.graph.node
    assert node.input == same.input
    assert {a.name: a.i for a in node.attribute} == {a.name: a.i for a in same.attribute}


def _reads(index: int, at: int, value: str) -> Change:
    """A node has another input, which something makes if the layer does not."""

    def change(of: onnx.ModelProto) -> None:
        of.graph.node[index].input[at] = value

    return change


def _without_scales(of: onnx.ModelProto) -> None:
    for index in (1, 4):
        of.graph.node[index].input.pop()


def _attribute(index: int, name: str, value: int) -> Change:
    def change(of: onnx.ModelProto) -> None:
        (found,) = (a for a in of.graph.node[index].attribute if a.name == name)
        found.i = value

    return change


def _without(index: int) -> Change:
    """One of the products has no adapters."""

    def change(of: onnx.ModelProto) -> None:
        result = of.graph.node[index].output[0]
        del of.graph.node[index]
        of.graph.node[index - 1].output[0] = result

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_without(1), id="the second product's alone"),
        pytest.param(_without(4), id="the first product's alone"),
        pytest.param(_also_reads("base"), id="second reader of the first product"),
        pytest.param(_also_reads("joined"), id="second reader of the first sum"),
        pytest.param(_also_reads("activated"), id="third reader of the activation"),
        pytest.param(_also_reads("sum"), id="second reader of the second product"),
        pytest.param(_is_an_output("base"), id="first product is an output"),
        pytest.param(_is_an_output("sum"), id="second product is an output"),
        pytest.param(_reads(1, 1, "other"), id="adapters of another input"),
        pytest.param(_reads(4, 1, "x"), id="the second product's of another input"),
        pytest.param(_reads(4, 2, "other"), id="other slots"),
        pytest.param(_reads(4, 4, "other"), id="other weights"),
        pytest.param(_without_scales, id="no scales"),
        pytest.param(_attribute(4, "max_rank", 21), id="another largest rank"),
        pytest.param(_attribute(4, "adapter_bits", 4), id="another type"),
        pytest.param(_attribute(1, "columns0", 331), id="other columns"),
        pytest.param(_attribute(4, "columns0", 89), id="other columns of the second product"),
        pytest.param(_domain(1), id="sum is not ours"),
        pytest.param(_domain(4), id="second sum is not ours"),
    ],
)
def test_near_misses_with_adapters_are_left_alone(change: Change) -> None:
    before = adapted()
    change(before)
    result = fuse_gated_mlp(before)
    assert not result.changes
    assert result.model == before


def test_a_sum_behind_the_layer_is_none_of_its_business() -> None:
    before = model()
    _follows(2)(before)
    result = fuse_gated_mlp(before)
    assert [node.op_type for node in result.model.graph.node] == ["GatedMlp", "Add"]
    assert attribute_int(result.model.graph.node[0], "inner", 0) == 70
