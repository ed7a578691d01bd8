"""Biases fused into products: where, where not, and that no bit changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.input_norm import fuse_input_norm
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.product_bias import fuse_product_bias
from onnxport.graphs.passes.retype import retype
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.conformance.make import make_artifact
from tests.kernels import matmul_cases, norm_cases

K, N = 96, 40
PRODUCT, ADD = 0, 1  # places in the model
FIRED = {"biases added by their products": 1}


def product() -> matmul_cases.MatMulCase:
    return matmul_cases.make_case(5, 4, 32, K, N, 3)


def model(serialized: bytes | None = None, names: tuple[str, str] = ("p", "b")) -> onnx.ModelProto:
    """A product and the addition of its bias."""
    of = onnx.load_from_string(serialized or matmul_cases.model(product()))
    of.graph.node[PRODUCT].output[0] = "p"
    of.graph.node.append(helper.make_node("Add", names, ["y"]))
    bias = np.random.default_rng(7).standard_normal(N).astype(np.float32)
    of.graph.initializer.append(numpy_helper.from_array(bias, "b"))
    return of


def run(of: onnx.ModelProto, **feeds: np.ndarray) -> bytes:
    library = find_library()
    if library is None or matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    session = matmul_cases.session(library, of.SerializeToString())
    found: np.ndarray = session.run(["y"], {"x": product().x, **feeds})[0]
    return found.tobytes()


@pytest.mark.parametrize("names", [("p", "b"), ("b", "p")])
def test_it_goes_into_the_product(names: tuple[str, str]) -> None:
    before = model(names=names)
    untouched = before.SerializeToString()
    result = fuse_product_bias(before)
    assert result.changes == FIRED
    assert before.SerializeToString() == untouched
    (node,) = result.model.graph.node
    assert list(node.input) == ["x", "w", "s", "", "", "b"]
    assert list(node.output) == ["y"]
    assert not fuse_product_bias(result.model).changes
    assert run(result.model) == run(before)


def test_behind_a_norm() -> None:
    norm = norm_cases.random_norm(1, product().x)
    before = model(norm_cases.add_norm(matmul_cases.model(product()), norm))
    result = fuse_product_bias(before)
    assert result.changes == FIRED
    (node,) = result.model.graph.node
    assert list(node.input) == ["x", "w", "s", "skip", "gamma", "b"]
    assert list(node.output) == ["y", "residual"]
    assert run(result.model, skip=norm.skip) == run(before, skip=norm.skip)


@pytest.mark.parametrize(("family", "biases"), [("qwen2", 1), ("llama", 0)])
def test_the_biases_of_a_decoder(
    tmp_path_factory: pytest.TempPathFactory, family: str, biases: int
) -> None:
    """Of the projections to queries, keys and values, one product of each layer."""
    int4 = Artifact.read(make_artifact(tmp_path_factory.mktemp("bias"), family, "int4"))
    graph = retype(int4.load_graph("paged"), int4.read_tensor).model
    before = fuse_input_norm(use_int8_matmul(fuse_gated_silu(graph).model).model).model
    result = fuse_product_bias(before)
    found = biases * int4.manifest.model.num_layers
    assert result.changes == ({"biases added by their products": found} if found else {})
    assert len(before.graph.node) - len(result.model.graph.node) == found


Change = Callable[[onnx.ModelProto], None]


def _also_reads(of: onnx.ModelProto) -> None:
    of.graph.node.append(helper.make_node("Neg", ["p"], ["other"]))


def _is_an_output(of: onnx.ModelProto) -> None:
    of.graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, None))


def _twice(of: onnx.ModelProto) -> None:
    of.graph.node[ADD].input[1] = "p"


def _from_outside(of: onnx.ModelProto) -> None:
    of.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [N]))


def _computed(of: onnx.ModelProto) -> None:
    of.graph.initializer[-1].name = "stored"
    of.graph.node.insert(0, helper.make_node("Neg", ["stored"], ["b"]))


def _replaced(bias: np.ndarray) -> Change:
    return lambda of: of.graph.initializer[-1].CopyFrom(numpy_helper.from_array(bias, "b"))


def _kind(place: int, kind: str) -> Change:
    def change(of: onnx.ModelProto) -> None:
        of.graph.node[place].op_type = kind

    return change


def _domain(place: int, domain: str) -> Change:
    def change(of: onnx.ModelProto) -> None:
        of.graph.node[place].domain = domain

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_also_reads, id="another reader"),
        pytest.param(_is_an_output, id="an output"),
        pytest.param(_twice, id="the product twice"),
        pytest.param(_from_outside, id="the caller may replace it"),
        pytest.param(_computed, id="computed"),
        pytest.param(_replaced(np.ones(1, np.float32)), id="one number"),
        pytest.param(_replaced(np.ones((1, N), np.float32)), id="a matrix"),
        pytest.param(_replaced(np.ones(N, np.float16)), id="float16"),
        pytest.param(_kind(ADD, "Mul"), id="no sum"),
        pytest.param(_kind(PRODUCT, "GatedMlp"), id="no product"),
        pytest.param(_domain(ADD, "somewhere"), id="another domain's sum"),
        pytest.param(_domain(PRODUCT, "com.microsoft"), id="ONNX Runtime's product"),
    ],
)
def test_where_it_does_not(change: Change) -> None:
    before = model()
    change(before)
    result = fuse_product_bias(before)
    assert not result.changes
    assert result.model == before
