"""Products with int8 activations: which nodes change, which must not, and what they compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, set_attribute
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.int8_matmul import ZERO_POINTS, use_int8_matmul
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.graphs import test_gated_silu
from tests.kernels import matmul_cases
from tests.kernels.matmul_cases import MatMulCase


def case(bits: int = 4, block_size: int = 32) -> MatMulCase:
    return matmul_cases.make_case(5, bits, block_size, 160, 48, 6)


def model(of: MatMulCase) -> onnx.ModelProto:
    """One MatMulNBits as the exporter writes it, after retyping."""
    node = helper.make_node(
        "MatMulNBits",
        ["x", "w", "s"],
        ["y"],
        name="product",
        domain=contract.MICROSOFT,
        K=of.k,
        N=of.n,
        bits=of.bits,
        block_size=of.block_size,
        accuracy_level=4,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", of.k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", of.n])],
        [numpy_helper.from_array(of.quants, "w"), numpy_helper.from_array(of.scales, "s")],
    )
    if of.zero_points is not None:
        graph.node[0].input.append("z")
        graph.initializer.append(numpy_helper.from_array(of.stored_zero_points, "z"))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(contract.MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(of: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    library = find_library()
    if library is None or matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(
        of.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: np.ndarray = session.run(["y"], {"x": x})[0]
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_it_replaces_the_node_and_computes_the_same(bits: int, block_size: int) -> None:
    of = case(bits, block_size)
    before = model(of)
    result = use_int8_matmul(before)
    assert result.changes == {"products with int8 activations": 1}
    assert before.graph.node[0].domain == contract.MICROSOFT
    (node,) = result.model.graph.node
    assert (node.op_type, node.domain, node.name) == ("MatMulNBits", "onnxport", "product")
    assert list(node.input) == ["x", "w", "s"]
    assert {attribute.name for attribute in node.attribute} == {"K", "N", "bits", "block_size"}
    found = run(result.model, of.x)
    matmul_cases.check(of, found)
    # ONNX Runtime rounds activations, too, by a block's largest: both are as far off at most.
    theirs = run(before, of.x)
    assert np.all(np.abs(found - theirs) <= 2.01 * matmul_cases.rounding_bound(of))
    exact = model(of)
    set_attribute(exact.graph.node[0], "accuracy_level", 1)
    bound = matmul_cases.rounding_bound(of)
    floats = np.abs(matmul_cases.float_product(of))
    assert np.all(np.abs(found - run(exact, of.x)) <= bound * 1.001 + floats * 1e-4)


@pytest.mark.parametrize("bits", matmul_cases.BITS)
def test_zero_points_go_along(bits: int) -> None:
    of = matmul_cases.with_zero_points(3, matmul_cases.make_case(3, bits, 32, 160, 48, 5))
    before = model(of)
    result = use_int8_matmul(before)
    assert result.changes
    (node,) = result.model.graph.node
    assert list(node.input) == ["x", "w", "s", *[""] * (ZERO_POINTS - 3), "z"]
    if find_library() is None or matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    exact = model(of)
    set_attribute(exact.graph.node[0], "accuracy_level", 1)
    bound = matmul_cases.rounding_bound(of) + 1e-6 * matmul_cases.magnitudes(of)
    assert np.all(np.abs(run(result.model, of.x) - run(exact, of.x)) <= bound * 1.001)


def test_bits_have_the_schemas_default() -> None:
    of = model(case())
    kept = [attribute for attribute in of.graph.node[0].attribute if attribute.name != "bits"]
    del of.graph.node[0].attribute[:]
    of.graph.node[0].attribute.extend(kept)
    assert attribute_int(use_int8_matmul(of).model.graph.node[0], "bits", 0) == 4


def test_the_domain_is_imported_once() -> None:
    gated = fuse_gated_silu(test_gated_silu.model(test_gated_silu.nodes())).model
    product = model(case())
    gated.graph.node.extend(product.graph.node)
    gated.graph.node[-1].input[0] = "joined"
    gated.graph.node[-1].output[0] = "z"
    gated.graph.initializer.extend(product.graph.initializer)
    result = use_int8_matmul(gated)
    assert result.changes
    assert [opset.domain for opset in result.model.opset_import].count("onnxport") == 1


Change = Callable[[onnx.ModelProto], None]


def _attribute(name: str, value: int) -> Change:
    return lambda of: set_attribute(of.graph.node[0], name, value)


def _input(index: int, kind: int, shape: list[int]) -> Change:
    """Adds an input that the operator does not have."""

    def change(of: onnx.ModelProto) -> None:
        node = of.graph.node[0]
        node.input.extend([""] * (index - len(node.input)))
        node.input.append("extra")
        of.graph.initializer.append(helper.make_tensor("extra", kind, shape, [0] * shape[0]))

    return change


def _becomes_an_input(name: str, keep_default: bool) -> Change:
    def change(of: onnx.ModelProto) -> None:
        (tensor,) = (t for t in of.graph.initializer if t.name == name)
        info = helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        of.graph.input.append(info)
        if not keep_default:
            of.graph.initializer.remove(tensor)

    return change


def _half_scales(of: onnx.ModelProto) -> None:
    scales = of.graph.initializer[1]
    half = numpy_helper.to_array(scales).astype(np.float16)
    scales.CopyFrom(numpy_helper.from_array(half, "s"))


def _zero_points_from_outside(of: onnx.ModelProto) -> None:
    of.graph.node[0].input.append("z")
    of.graph.input.append(helper.make_tensor_value_info("z", TensorProto.UINT8, [144]))


def _other_domain(of: onnx.ModelProto) -> None:
    of.graph.node[0].domain = "elsewhere"


def _no_level(of: onnx.ModelProto) -> None:
    _attribute("accuracy_level", 0)(of)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_attribute("accuracy_level", 1), id="float32"),
        pytest.param(_attribute("accuracy_level", 2), id="float16"),
        pytest.param(_no_level, id="no level"),
        pytest.param(_attribute("bits", 2), id="2 bits"),
        pytest.param(_attribute("block_size", 8), id="blocks of 8"),
        pytest.param(_attribute("block_size", 512), id="blocks of 512"),
        pytest.param(_attribute("weight_prepacked", 1), id="prepacked"),
        pytest.param(_input(3, TensorProto.FLOAT, [240]), id="zero points in floats"),
        pytest.param(_zero_points_from_outside, id="zero points from outside"),
        pytest.param(_input(4, TensorProto.INT32, [160]), id="order of inputs"),
        pytest.param(_input(5, TensorProto.FLOAT, [48]), id="bias"),
        pytest.param(_becomes_an_input("w", False), id="weights from outside"),
        pytest.param(_becomes_an_input("s", False), id="scales from outside"),
        pytest.param(_becomes_an_input("w", True), id="weights that may be replaced"),
        pytest.param(_half_scales, id="float16 scales"),
        pytest.param(_other_domain, id="another domain"),
    ],
)
def test_near_misses_are_left_alone(change: Change) -> None:
    before = model(case())
    change(before)
    result = use_int8_matmul(before)
    assert not result.changes
    assert result.model == before
    assert str(result) == "int8_matmul: nothing to do"
