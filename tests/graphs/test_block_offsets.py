"""Offsets of blocks added by products: where, where not, and what is computed then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs import contract, ops
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.passes.accuracy import set_accuracy
from onnxport.graphs.passes.block_offsets import fuse_block_offsets
from onnxport.graphs.passes.gated_mlp import GATED_MLP, MLP_OFFSETS, fuse_gated_mlp
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.input_norm import fuse_input_norm
from onnxport.graphs.passes.int8_matmul import OFFSETS, use_int8_matmul
from onnxport.graphs.passes.lora import add_lora_operator
from onnxport.graphs.passes.product_adapters import fuse_product_adapters
from onnxport.graphs.passes.product_bias import fuse_product_bias
from onnxport.graphs.passes.retype import retype
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.conformance.make import Q4_1, make_artifact
from tests.kernels import matmul_cases

K, N, SIZE = 96, 40, 32
FIRED = {"offsets of blocks added by their products": 1}
CASE = matmul_cases.with_offsets(2, matmul_cases.make_case(2, 4, SIZE, K, N, 7))


def model(case: matmul_cases.MatMulCase = CASE, *, is_flat: bool = True) -> onnx.ModelProto:
    """A product and its offsets as the exporter writes them, after retyping."""
    assert case.offsets is not None
    g = GraphBuilder("offsets")
    rows: list[int | str] = ["rows"] if is_flat else ["batch", "seq"]
    x = g.input("x", TensorProto.FLOAT, [*rows, K])
    y = ops.matmul_nbits(
        g,
        x,
        g.constant(case.quants, "w"),
        g.constant(case.scales, "s"),
        k=K,
        n=N,
        bits=4,
        block_size=SIZE,
        accuracy_level=4,
        name="product",
    )
    offsets = g.constant(case.offsets.astype(np.float32), "offsets")
    total = ops.add_offsets(g, x, y, offsets, k=K, n=N, block_size=SIZE, is_flat=is_flat)
    g.node("Identity", [total], outputs=[g.output("y", TensorProto.FLOAT, [*rows, N])])
    return g.build()


def stored_of(of: onnx.ModelProto) -> onnx.ModelProto:
    """The graph that it was made of: offsets in float16."""
    copy = onnx.ModelProto.FromString(of.SerializeToString())
    tensor = tensor_of(copy, "offsets")
    halves = numpy_helper.to_array(tensor).astype(np.float16)
    tensor.CopyFrom(numpy_helper.from_array(halves, tensor.name))
    return copy


def tensor_of(of: onnx.ModelProto, part: str) -> TensorProto:
    (found,) = (one for one in of.graph.initializer if part in one.name)
    return found


def node_of(of: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    (found,) = (one for one in of.graph.node if one.op_type == kind)
    return found


def run(of: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    library = find_library()
    if library is None or matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    found: np.ndarray = matmul_cases.session(library, of.SerializeToString()).run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("is_flat", [True, False])
def test_what_the_exporter_writes_is_the_product_with_offsets(is_flat: bool) -> None:
    of = set_accuracy(model(is_flat=is_flat), 1).model
    x = CASE.x / np.abs(CASE.x).max(1, keepdims=True)
    fed = x if is_flat else x[None]
    session = ort.InferenceSession(of.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": fed})[0].reshape(-1, N)
    wanted = matmul_cases.float_product(CASE.replace(x=x))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_they_go_into_the_product() -> None:
    plain = model()
    before = use_int8_matmul(plain).model
    untouched = before.SerializeToString()
    result = fuse_block_offsets(before, stored_of(plain))
    assert result.changes == FIRED
    assert before.SerializeToString() == untouched
    product, last = result.model.graph.node
    assert (product.op_type, last.op_type) == ("MatMulNBits", "Identity")
    assert list(product.input[:OFFSETS]) == ["x", "w", "s", *[""] * (OFFSETS - 3)]
    assert product.output[0] == last.input[0]
    assert {one.name for one in result.model.graph.initializer} == {*product.input[1:]} - {""}
    assert tensor_of(result.model, "offsets").data_type == TensorProto.FLOAT16
    assert not fuse_block_offsets(result.model, stored_of(plain)).changes
    matmul_cases.check(CASE, run(result.model, CASE.x))


def test_sums_that_others_read_stay() -> None:
    """As where two products read one input, and only one of them is ours."""
    before = use_int8_matmul(model()).model
    sums = node_of(before, "ReduceSum").output[0]
    before.graph.output.append(helper.make_tensor_value_info(sums, TensorProto.FLOAT, None))
    result = fuse_block_offsets(before, stored_of(model()))
    assert result.changes == FIRED
    kinds = [node.op_type for node in result.model.graph.node]
    assert sorted(kinds) == ["Identity", "MatMulNBits", "ReduceSum", "Reshape"]


def _other_domain(of: onnx.ModelProto) -> None:
    node_of(of, "MatMulNBits").domain = contract.MICROSOFT


def _zero_points(of: onnx.ModelProto) -> None:
    node_of(of, "MatMulNBits").input.extend(["", "", "s"])


def _factor(of: onnx.ModelProto) -> None:
    set_attribute(node_of(of, "Gemm"), "alpha", 2.0)


def _not_turned(of: onnx.ModelProto) -> None:
    set_attribute(node_of(of, "Gemm"), "transB", 0)


def _read_twice(of: onnx.ModelProto) -> None:
    product = node_of(of, "MatMulNBits").output[0]
    of.graph.output.append(helper.make_tensor_value_info(product, TensorProto.FLOAT, None))


def _of_something_else(of: onnx.ModelProto) -> None:
    of.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["rows", K]))
    node_of(of, "Reshape").input[0] = "z"


def _other_blocks(of: onnx.ModelProto) -> None:
    tensor = tensor_of(of, node_of(of, "Reshape").input[1])
    tensor.CopyFrom(numpy_helper.from_array(np.array([-1, 32, 3]), tensor.name))


def _kept_axis(of: onnx.ModelProto) -> None:
    set_attribute(node_of(of, "ReduceSum"), "keepdims", 1)


def _another_axis(of: onnx.ModelProto) -> None:
    tensor = tensor_of(of, node_of(of, "ReduceSum").input[1])
    tensor.CopyFrom(numpy_helper.from_array(np.array([1]), tensor.name))


def _another_reduction(of: onnx.ModelProto) -> None:
    node_of(of, "ReduceSum").op_type = "ReduceMean"


def _no_addend(of: onnx.ModelProto) -> None:
    node_of(of, "Gemm").input.pop()


def _from_outside(of: onnx.ModelProto) -> None:
    tensor = tensor_of(of, "offsets")
    info = helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, list(tensor.dims))
    of.graph.input.append(info)


@pytest.mark.parametrize(
    "change",
    [
        *(_other_domain, _zero_points, _factor, _not_turned, _read_twice, _of_something_else),
        *(_other_blocks, _kept_axis, _another_axis, _another_reduction, _no_addend, _from_outside),
    ],
)
def test_what_only_looks_like_it_is_left_alone(change: Callable[[onnx.ModelProto], None]) -> None:
    before = use_int8_matmul(model()).model
    change(before)
    result = fuse_block_offsets(before, stored_of(model()))
    assert not result.changes
    assert result.model == before


def test_offsets_that_are_no_halves_are_left_alone() -> None:
    before = use_int8_matmul(model()).model
    assert not fuse_block_offsets(before, before).changes


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.read(make_artifact(tmp_path_factory.mktemp("offsets"), "qwen2", Q4_1))


def test_a_decoder(artifact: Artifact) -> None:
    """Biases, norms and feed-forward layers are fused as they are without offsets."""
    stored = artifact.load_graph("paged")
    layers = artifact.manifest.model.num_layers
    step = fuse_gated_silu(retype(stored, artifact.read_tensor).model)
    step = fuse_block_offsets(use_int8_matmul(step.model).model, stored)
    assert step.changes == {"offsets of blocks added by their products": 3 * layers}
    step = fuse_gated_mlp(step.model)
    assert step.changes == {"gated feed-forward layers fused": layers}
    step = fuse_input_norm(step.model)
    assert step.changes == {"norms fused into what reads them": 2 * layers}
    step = fuse_product_bias(step.model)
    assert step.changes == {"biases added by their products": layers}
    left = {node.op_type for node in step.model.graph.node}
    assert left.isdisjoint({"Gemm", "ReduceSum", "Reshape"})
    for node in step.model.graph.node:
        if node.op_type == GATED_MLP:
            assert all(node.input[place] for place in MLP_OFFSETS)


def test_behind_adapters(artifact: Artifact) -> None:
    """They are added to the product with its offsets, or go into it."""
    stored = artifact.load_graph("paged")
    spec = artifact.manifest.model
    step = retype(stored, artifact.read_tensor)
    for dtype, left in (("float32", 4), ("int8", 0)):
        adapted = add_lora_operator(step.model, spec, 8, dtype)  # type: ignore[arg-type]
        made = fuse_gated_silu(adapted.model)
        made = fuse_block_offsets(use_int8_matmul(made.model).model, stored)
        assert made.changes == {"offsets of blocks added by their products": 3 * spec.num_layers}
        made = fuse_product_adapters(fuse_gated_mlp(made.model).model)
        found = [node.op_type for node in made.model.graph.node]
        assert found.count("AddLora") == left * spec.num_layers
        assert "ReduceSum" not in found
