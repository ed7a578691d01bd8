"""Norms fused into the operators that read them: where, where not, and what is computed then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.gated_mlp import fuse_gated_mlp
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.input_norm import SKIP_NORM, fuse_input_norm
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.lora import add_lora_operator
from onnxport.graphs.passes.retype import retype
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.conformance.make import make_artifact
from tests.kernels import matmul_cases, mlp_cases, norm_cases

K, N, EPSILON = 96, 40, 1e-5
NORM, PRODUCT, ADD = 0, 1, 2  # places in the model


def product() -> matmul_cases.MatMulCase:
    return matmul_cases.make_case(5, 4, 32, K, N, 3)


def model(serialized: bytes | None = None) -> onnx.ModelProto:
    """A norm, an operator that reads it, and a reader of the sum: total = -(x + skip)."""
    of = onnx.load_from_string(serialized or matmul_cases.model(product()))
    of.graph.node[0].input[0] = "normed"
    norm = helper.make_node(
        "SkipSimplifiedLayerNormalization",
        ["x", "skip", "gamma"],
        ["normed", "", "", "sum"],
        domain="com.microsoft",
        epsilon=EPSILON,
    )
    of.graph.node.insert(0, norm)
    of.graph.node.append(helper.make_node("Neg", ["sum"], ["total"]))
    gamma = norm_cases.random_norm(1, product().x).gamma
    of.graph.initializer.append(numpy_helper.from_array(gamma, "gamma"))
    for infos, name in ((of.graph.input, "skip"), (of.graph.output, "total")):
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        info.type.tensor_type.shape.CopyFrom(of.graph.input[0].type.tensor_type.shape)
        infos.append(info)
    of.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return of


def layer() -> onnx.ModelProto:
    return model(mlp_cases.fused(mlp_cases.make_case(5, (4, 32), (8, 64), (K, 70, N), 3)))


def run(of: onnx.ModelProto, *others: str) -> list[np.ndarray]:
    library = find_library()
    if library is None or matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    x = product().x
    feeds = {"x": x, "skip": norm_cases.random_norm(2, x).skip}
    session = matmul_cases.session(library, of.SerializeToString())
    return list(session.run(["y", "total", *others], feeds))


def epsilon_of(node: onnx.NodeProto) -> float:
    (value,) = (a.f for a in node.attribute if a.name == "epsilon")
    return float(value)


@pytest.mark.parametrize(
    ("before", "inputs"),
    [
        pytest.param(model(), ["x", "w", "s", "skip", "gamma"], id="MatMulNBits"),
        pytest.param(layer(), ["x", "w1", "s1", "w2", "s2", "skip", "gamma"], id="GatedMlp"),
    ],
)
def test_it_goes_into_the_operator(before: onnx.ModelProto, inputs: list[str]) -> None:
    untouched = before.SerializeToString()
    result = fuse_input_norm(before)
    assert result.changes == {"norms fused into what reads them": 1}
    assert before.SerializeToString() == untouched
    node, reader = result.model.graph.node
    assert (list(node.input), list(node.output)) == (inputs, ["y", "sum"])
    assert epsilon_of(node) == np.float32(EPSILON)
    kept = {a.name: a.i for a in before.graph.node[PRODUCT].attribute}
    assert {a.name: a.i for a in node.attribute if a.name != "epsilon"} == kept
    assert reader == before.graph.node[ADD]
    assert element_types(result.model)["sum"] == TensorProto.FLOAT
    assert not fuse_input_norm(result.model).changes
    (apart, sum_apart), (together, sum_together) = run(before), run(result.model)
    assert sum_together.tobytes() == sum_apart.tobytes()
    # ONNX Runtime adds squares up in another order, and some quants round the other way for it.
    assert np.abs(together - apart).max() < 1e-2 * np.abs(apart).max()


def test_a_sum_that_nobody_reads_is_returned_nevertheless() -> None:
    for outputs in (["normed"], ["normed", "", "", ""], ["normed", "", "", "sum"]):
        before = model()
        del before.graph.node[ADD]
        del before.graph.output[1]
        del before.graph.node[NORM].output[:]
        before.graph.node[NORM].output.extend(outputs)
        (node,) = fuse_input_norm(before).model.graph.node
        assert list(node.output) == ["y", outputs[3] if any(outputs[1:]) else "normed"]
        library = find_library()
        if library is None or matmul_isa() is None:
            pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
        after = fuse_input_norm(before).model.SerializeToString()
        x = product().x
        found = matmul_cases.session(library, after).run(["y"], {"x": x, "skip": x})[0]
        assert found.shape == (3, N)


def test_the_schemas_own_epsilon() -> None:
    before = model()
    del before.graph.node[NORM].attribute[:]
    node = fuse_input_norm(before).model.graph.node[0]
    assert epsilon_of(node) == np.float32(1e-12)


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.read(make_artifact(tmp_path_factory.mktemp("norm"), "qwen2", "int4"))


def prepared(of: onnx.ModelProto) -> onnx.ModelProto:
    return fuse_gated_mlp(use_int8_matmul(fuse_gated_silu(of).model).model).model


def test_norms_that_take_the_mean_away_stay(tmp_path: Path) -> None:
    """Command R7B's, of which both products of a layer read one."""
    artifact = Artifact.read(make_artifact(tmp_path, "cohere2", "int4"))
    before = prepared(retype(artifact.load_graph("paged"), artifact.read_tensor).model)
    layers = artifact.manifest.model.num_layers
    kinds = [node.op_type for node in before.graph.node]
    assert (kinds.count("GatedMlp"), kinds.count("LayerNormalization")) == (layers, layers + 1)
    assert not fuse_input_norm(before).changes


def test_the_norms_of_a_decoder(int4: Artifact) -> None:
    """All of them but the first one, which has no skip."""
    before = prepared(retype(int4.load_graph("paged"), int4.read_tensor).model)
    result = fuse_input_norm(before)
    layers = int4.manifest.model.num_layers
    assert result.changes == {"norms fused into what reads them": 2 * layers}
    assert len(before.graph.node) - len(result.model.graph.node) == 2 * layers
    types = element_types(result.model)
    assert all(name in types for node in result.model.graph.node for name in node.output if name)


def test_the_norms_that_adapters_read(int4: Artifact) -> None:
    """All of them but the first one; what they normalize is there for the adapters."""
    adapted = add_lora_operator(
        retype(int4.load_graph("paged"), int4.read_tensor).model, int4.manifest.model, 8
    )
    before = prepared(adapted.model)
    result = fuse_input_norm(before)
    layers = int4.manifest.model.num_layers
    assert result.changes == {"norms fused into what reads them": 2 * layers}
    nodes = list(result.model.graph.node)
    products = [node for node in nodes if node.op_type in ("MatMulNBits", "GatedMlp")]
    shared = [node.output[2] for node in products if len(node.output) == 3]
    adding = [node for node in nodes if node.op_type == "AddLora"]
    assert len(shared) == 2 * layers - 1, "adapters have no part in the logits"
    assert set(shared) <= {node.input[1] for node in adding}
    types = element_types(result.model)
    assert all(name in types for name in shared)


def test_a_layer_that_takes_in_adapters_takes_in_its_norm(int4: Artifact) -> None:
    """Between what it has of its own and the adapters; nobody else reads what is normalized."""
    adapted = add_lora_operator(
        retype(int4.load_graph("paged"), int4.read_tensor).model, int4.manifest.model, 8, "int8"
    )
    before = prepared(adapted.model)
    result = fuse_input_norm(before)
    layers = int4.manifest.model.num_layers
    assert result.changes == {"norms fused into what reads them": 2 * layers}
    fused, unfused = (
        [node for node in of.graph.node if node.op_type == "GatedMlp"]
        for of in (result.model, before)
    )
    norms = [node for node in before.graph.node if node.op_type == SKIP_NORM]
    made = {norm.output[0]: norm for norm in norms}
    for node, old in zip(fused, unfused, strict=True):
        norm = made[old.input[0]]
        skip, gamma = norm.input[1:3]
        assert list(node.input) == [norm.input[0], *old.input[1:5], skip, gamma, *old.input[7:]]
        assert len(node.output) == 2
    assert not fuse_input_norm(result.model).changes


@pytest.mark.parametrize("before", [model(), layer()], ids=["MatMulNBits", "GatedMlp"])
def test_what_others_read_is_returned(before: onnx.ModelProto) -> None:
    alone = fuse_input_norm(before).model
    before.graph.node.append(helper.make_node("Neg", ["normed"], ["other"]))
    before.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, None))
    result = fuse_input_norm(before)
    assert result.changes == {"norms fused into what reads them": 1}
    node = result.model.graph.node[0]
    assert list(node.output) == ["y", "sum", "normed"]
    assert element_types(result.model)["normed"] == TensorProto.FLOAT
    y, total, other = run(result.model, "other")
    assert [y.tobytes(), total.tobytes()] == [x.tobytes() for x in run(alone)]
    np.testing.assert_allclose(other, run(before, "other")[2], rtol=1e-5)


Change = Callable[[onnx.ModelProto], None]


def _also_reads(value: str, place: int) -> Change:
    node = helper.make_node("Neg", [value], ["other"])
    return lambda of: of.graph.node.insert(place, node)


def _is_an_output(value: str) -> Change:
    info = helper.make_tensor_value_info(value, TensorProto.FLOAT, None)
    return lambda of: of.graph.output.append(info)


def _domain(place: int, domain: str) -> Change:
    def change(of: onnx.ModelProto) -> None:
        of.graph.node[place].domain = domain

    return change


def _kind(place: int, kind: str) -> Change:
    def change(of: onnx.ModelProto) -> None:
        of.graph.node[place].op_type = kind

    return change


def _bias(of: onnx.ModelProto) -> None:
    of.graph.node[NORM].input.append("gamma")


def _mean(of: onnx.ModelProto) -> None:
    of.graph.node[NORM].output[1] = "mean"


def _gamma_from_outside(of: onnx.ModelProto) -> None:
    of.graph.input.append(helper.make_tensor_value_info("gamma", TensorProto.FLOAT, [K]))


def _computed_gamma(of: onnx.ModelProto) -> None:
    of.graph.initializer[-1].name = "stored"
    of.graph.node.insert(0, helper.make_node("Neg", ["stored"], ["gamma"]))


def _wide_gamma(of: onnx.ModelProto) -> None:
    of.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.ones(K + 1, np.float32), "gamma"))


def _no_skip(of: onnx.ModelProto) -> None:
    norm = helper.make_node("SimplifiedLayerNormalization", ["x", "gamma"], ["normed"])
    of.graph.node[NORM].CopyFrom(norm)
    of.graph.node[ADD].input[0] = "x"


def _as_scales(of: onnx.ModelProto) -> None:
    """What is normalized are the product's scales."""
    of.graph.node[PRODUCT].input[0], of.graph.node[PRODUCT].input[2] = "s", "normed"


def _shared_without_a_sum(of: onnx.ModelProto) -> None:
    del of.graph.node[NORM].output[1:]
    of.graph.node[ADD].input[0] = "normed"


def _as_scales_too(of: onnx.ModelProto) -> None:
    of.graph.node[PRODUCT].input[2] = "normed"


def _has_a_norm(of: onnx.ModelProto) -> None:
    of.graph.node[PRODUCT].input.extend(["skip", "gamma"])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_also_reads("normed", 1), id="another reader before"),
        pytest.param(_shared_without_a_sum, id="another reader and no sum"),
        pytest.param(_is_an_output("normed"), id="norm is an output"),
        pytest.param(_is_an_output("sum"), id="sum is an output"),
        pytest.param(_also_reads("sum", 1), id="sum is read before the operator"),
        pytest.param(_domain(NORM, "other"), id="another norm"),
        pytest.param(_kind(NORM, "SkipLayerNormalization"), id="a norm around the mean"),
        pytest.param(_domain(PRODUCT, "com.microsoft"), id="product is not ours"),
        pytest.param(_kind(PRODUCT, "AddLora"), id="no product"),
        pytest.param(_bias, id="bias"),
        pytest.param(_mean, id="mean"),
        pytest.param(_gamma_from_outside, id="gamma is an input"),
        pytest.param(_computed_gamma, id="gamma is computed"),
        pytest.param(_wide_gamma, id="gamma of another size"),
        pytest.param(_no_skip, id="no skip"),
        pytest.param(_as_scales, id="another input"),
        pytest.param(_as_scales_too, id="another input, too"),
        pytest.param(_has_a_norm, id="operator has a norm"),
    ],
)
def test_near_misses_are_left_alone(change: Change) -> None:
    before = model()
    change(before)
    result = fuse_input_norm(before)
    assert not result.changes
    assert result.model == before
    assert str(result) == "input_norm: nothing to do"
