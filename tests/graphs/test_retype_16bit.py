"""Graphs change to 16-bit types: what stays float32, what fits, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.passes.kv_dtype import set_kv_dtype
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import FLOAT_DTYPES, retype
from tests.graphs.artifacts import SPEC, caches, step_inputs, write
from tests.graphs.paged_models import inline, op_types, paged_case, paged_model
from tests.graphs.test_retype import session, small

FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16


@pytest.fixture(scope="module", params=["int4", "fp16"])
def artifact(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Artifact:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return Artifact.read(write(folder, quantized=request.param == "int4"))


def again(artifact: Artifact, first: PassResult, dtype: str) -> PassResult:
    """The result of another `retype`, which reads what the first one attached."""

    def read(tensor: TensorProto) -> Any:
        if tensor.name in first.attached:
            return first.attached[tensor.name]
        is_stored = tensor.data_location == TensorProto.EXTERNAL
        return artifact.read_tensor(tensor) if is_stored else numpy_helper.to_array(tensor)

    second = retype(first.model, read, dtype)
    external = {t.name for t in second.model.graph.initializer if t.external_data}
    attached = {**first.attached, **second.attached}
    attached = {name: value for name, value in attached.items() if name in external}
    return PassResult("both", second.model, second.changes, attached)


def kinds(model: onnx.ModelProto) -> dict[str, int]:
    """The types of the floating graph inputs and outputs."""
    infos = (*model.graph.input, *model.graph.output)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return {name: kind for name, kind in types.items() if kind in FLOAT_DTYPES.values()}


def check_types(model: onnx.ModelProto, target: int) -> None:
    """The whole graph computes in one type, but for the RoPE tables and the logits."""
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    assert kinds(model) == {name: FLOAT if name == c.LOGITS else target for name in kinds(model)}
    types = element_types(model)
    made = [name for node in model.graph.node for name in node.output if name]
    values = {name: types[name] for name in made if name in types}
    stray = {name for name, kind in values.items() if kind in FLOAT_DTYPES.values()} - {
        name for name, kind in values.items() if kind == target
    }
    assert stray == {c.LOGITS}
    stored = {t.name for t in model.graph.initializer if t.data_type in FLOAT_DTYPES.values()}
    assert {name for name in stored if types[name] != target} == {"cos", "sin"}


def logits(artifact: Artifact, lowered: PassResult) -> np.ndarray:
    """What the decomposed graph gives, its caches in the graph's own type."""
    kind = next(i for i in lowered.model.graph.input if i.name == c.past_key(0))
    dtype = helper.tensor_dtype_to_np_dtype(kind.type.tensor_type.elem_type)
    lowered = PassResult("all", decompose(lowered.model).model, {}, lowered.attached)
    feeds = {**step_inputs(new=[3, 1, 9], past=[0, 13, 5]), **caches(dtype)}
    return session(artifact, lowered).run([c.LOGITS], feeds)[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_from_float32_every_value_changes_type(artifact: Artifact, dtype: str) -> None:
    wide = retype(artifact.load_graph("paged"), artifact.read_tensor)
    narrow = again(artifact, wide, dtype)
    check_types(narrow.model, FLOAT_DTYPES[dtype])
    casts = [node for node in narrow.model.graph.node if node.op_type == "Cast"]
    cast = {node.input[0] for node in casts}
    assert {"cos", "sin"} <= cast
    assert len(casts) == 3, "each table once, and the logits"
    assert narrow.changes["RoPE tables cast"] == 2


def test_from_float16_to_bfloat16(artifact: Artifact) -> None:
    result = retype(artifact.load_graph("paged"), artifact.read_tensor, "bfloat16")
    check_types(result.model, BFLOAT16)
    assert op_types(result.model) == op_types(artifact.load_graph("paged"))
    scales = inline(result.model).get("layers.0.norm")
    assert scales is not None
    assert scales.dtype == ml_dtypes.bfloat16


def test_logits_in_float16_are_near_those_in_float32(artifact: Artifact) -> None:
    wide = retype(artifact.load_graph("paged"), artifact.read_tensor)
    exact, found = logits(artifact, wide), logits(artifact, again(artifact, wide, "float16"))
    assert found.dtype == np.float32
    assert 0 < np.abs(found - exact).max() < 1e-2 * np.abs(exact).max()
    stored = PassResult("none", artifact.load_graph("paged"), {})
    np.testing.assert_array_equal(found, logits(artifact, stored), "there and back")


def test_a_graph_of_the_type_is_left_alone(artifact: Artifact) -> None:
    model = artifact.load_graph("paged")
    result = retype(model, artifact.read_tensor, "float16")
    assert result.model == model
    assert not result.changes
    other = retype(model, artifact.read_tensor, "bfloat16")
    assert again(artifact, other, "bfloat16").model == other.model
    assert not again(artifact, other, "bfloat16").changes


def test_integer_weights_stay_and_their_scales_follow(tmp_path: Path) -> None:
    artifact = Artifact.read(write(tmp_path / "model"))
    wide = retype(artifact.load_graph("paged"), artifact.read_tensor)
    model = again(artifact, wide, "bfloat16").model
    types = element_types(model)
    products = [n for n in model.graph.node if n.op_type in ("MatMulNBits", "GatherBlockQuantized")]
    assert len(products) == 2 * SPEC.num_layers + 2
    for node in products:
        data = node.input[0 if node.op_type == "GatherBlockQuantized" else 1]
        assert types[data] == TensorProto.UINT8
        assert types[node.input[2]] == BFLOAT16


def logits_model(op_type: str, kind: int = FLOAT) -> onnx.ModelProto:
    """x -> `op_type` -> logits, which one more node reads."""
    nodes = [
        helper.make_node(op_type, ["x"], [c.LOGITS]),
        helper.make_node("Neg", ["logits"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 4])],
        [helper.make_tensor_value_info(name, kind, ["n", 4]) for name in (c.LOGITS, "y")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("kind", [FLOAT, BFLOAT16])
def test_logits_that_nobody_cast_are_cast(kind: int) -> None:
    result = retype(logits_model("Neg", kind), numpy_helper.to_array, "float16")
    assert kinds(result.model) == {"x": FLOAT16, "logits": FLOAT, "y": FLOAT16}
    assert op_types(result.model) == ["Neg", "Neg", "Cast"]
    assert element_types(result.model)["y"] == FLOAT16
    onnx.checker.check_model(result.model, full_check=True)


def test_16_bit_logits_become_float32_in_a_graph_of_the_type() -> None:
    result = retype(logits_model("Neg", FLOAT16), numpy_helper.to_array, "float16")
    assert kinds(result.model) == {"x": FLOAT16, "logits": FLOAT, "y": FLOAT16}
    assert result.changes == {"inputs and outputs": 1}


def test_float32_on_purpose_stays_in_a_16_bit_graph() -> None:
    """A table that is multiplied in float32, between two Casts."""
    table = numpy_helper.from_array(np.ones(4, np.float32), "table")
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=FLOAT),
        helper.make_node("Mul", ["wide", "table"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["y"], to=FLOAT16),
    ]
    result = retype(small(nodes, table, out=FLOAT16), numpy_helper.to_array, "bfloat16")
    types = element_types(result.model)
    assert [types[name] for name in ("x", "wide", "table", "y")] == [BFLOAT16, FLOAT, FLOAT, 16]
    assert kinds(result.model) == {"x": BFLOAT16, "y": BFLOAT16}


def test_an_int8_cache_stays_int8() -> None:
    model = set_kv_dtype(paged_model(paged_case(4)), "int8").model
    result = retype(model, numpy_helper.to_array, "float16")
    types, node = element_types(result.model), result.model.graph.node[-1]
    assert [types[node.input[i]] for i in (0, 3, 4)] == [FLOAT16, *[TensorProto.INT8] * 2]


def test_a_cache_in_another_type_says_nothing_of_the_activations() -> None:
    model = set_kv_dtype(paged_model(paged_case(4), dtype=FLOAT16), "float32").model
    assert retype(model, numpy_helper.to_array, "float16").model == model


def large(value: float, dtype: object = np.float32) -> onnx.ModelProto:
    """x * [1, `value`, 1, 1]."""
    tensor = numpy_helper.from_array(np.array([1, value, 1, 1], dtype), "gain")
    model = small([helper.make_node("Mul", ["x", "gain"], ["y"])], tensor, out=FLOAT)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model.graph.input[0].type.tensor_type.elem_type = kind
    return model


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_number_that_float16_cannot_hold_is_refused(dtype: object) -> None:
    with pytest.raises(ArtifactError, match=r"'gain' holds 7[\d.e+]+, which is too large.*float16"):
        retype(large(-70000, dtype), numpy_helper.to_array, "float16")
    retype(large(-70000), numpy_helper.to_array, "bfloat16")


def test_a_constant_that_float16_cannot_hold_is_refused() -> None:
    value = numpy_helper.from_array(np.array([1e5], np.float32))
    nodes = [
        helper.make_node("Constant", [], ["k"], value=value, name="limit"),
        helper.make_node("Add", ["x", "k"], ["y"]),
    ]
    model = small(nodes, out=FLOAT)
    model.graph.input[0].type.tensor_type.elem_type = FLOAT
    with pytest.raises(ArtifactError, match="'limit' holds 100000"):
        retype(model, numpy_helper.to_array, "float16")


@pytest.mark.parametrize("value", [65519, float("inf"), float("-inf")])
def test_the_largest_number_and_what_was_infinite_stay(value: float) -> None:
    found = inline(retype(large(value), numpy_helper.to_array, "float16").model)["gain"]
    stored = 65504 if value == 65519 else value
    np.testing.assert_array_equal(found, [1, stored, 1, 1])


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        retype(large(1), numpy_helper.to_array, "float64")


def test_attention_that_reads_an_unknown_type_is_refused() -> None:
    model = paged_model(paged_case(4))
    model.graph.node[-1].input[0] = "mystery"
    model.graph.node.insert(0, helper.make_node("Mystery", ["query"], ["mystery"], domain="x"))
    with pytest.raises(ArtifactError, match="mystery"):
        retype(model, numpy_helper.to_array, "float16")
    retype(model, numpy_helper.to_array)
