"""Fusing the gated SiLU: where it fires, where it must not, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.result import PassResult
from onnxport.providers.cpu.library import find_library, load_library

INNER = 37  # no multiple of any register's width

Nodes = list[onnx.NodeProto]
Fuse = Callable[[onnx.ModelProto], PassResult]


def nodes(axis: int = -1) -> Nodes:
    return [
        helper.make_node("Identity", ["x"], ["joined"]),
        helper.make_node("Split", ["joined"], ["gate", "up"], axis=axis, num_outputs=2),
        helper.make_node("Sigmoid", ["gate"], ["sigmoid"]),
        helper.make_node("Mul", ["sigmoid", "gate"], ["silu"]),
        helper.make_node("Mul", ["up", "silu"], ["y"], name="gated"),
    ]


def model(of: Nodes, extra_outputs: tuple[str, ...] = (), inner: int = INNER) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in extra_outputs]
    graph = helper.make_graph(
        of,
        "gated",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2 * inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", None]), *infos],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(of: onnx.ModelProto, x: np.ndarray, threads: int = 2) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    library = find_library()
    if library is None:
        pytest.skip("the C++ kernels were not built: no C++17 compiler on this machine")
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(
        of.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: np.ndarray = session.run(["y"], {"x": x})[0]
    return found


def reference(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def test_it_becomes_one_node_of_the_same_name_and_result() -> None:
    before = model(nodes())
    result = fuse_gated_silu(before)
    assert result.changes == {"gated SiLUs fused": 1}
    assert [node.op_type for node in result.model.graph.node] == ["Identity", "GatedSilu"]
    assert result.model.graph.node[1].name == "gated"
    assert len(before.graph.node) == 5
    x = np.random.default_rng(0).standard_normal((5, 2 * INNER)).astype(np.float32) * 8
    np.testing.assert_allclose(run(result.model, x), reference(x), rtol=1e-5, atol=1e-30)
    # ONNX Runtime's own sigmoid is a coarser polynomial.
    np.testing.assert_allclose(run(before, x), reference(x), rtol=1e-5, atol=2e-5)


ISAS = pytest.mark.parametrize("isa", ["avx512", "avx2", "neon", "portable"])


def run_with(isa: str, of: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """What the operators of one instruction set compute."""
    path = find_library()
    library = None if path is None else load_library(path)
    if library is None or not library.onnxport_cpu_set_isa(isa.encode()):
        pytest.skip(f"this processor or build has no {isa}")
    try:
        return run(of, x)
    finally:
        library.onnxport_cpu_set_isa(None)


def check_extremes(fuse: Fuse, of: Callable[..., Nodes], most: float, least: float) -> None:
    """Gates of 0, of which the activation is `most` and 0 to every digit, and far from them."""
    gates = np.array([0, -0.0, most, least, 127, -127, 1e30, -1e30, np.inf, np.nan], np.float32)
    x = np.concatenate([gates, np.ones_like(gates)])[None]
    found = run(fuse(model(of(), inner=len(gates))).model, x)[0]
    np.testing.assert_allclose(found[:3], [0, 0, most])
    assert abs(found[3]) < 1e-35
    assert found[4] == 127
    assert abs(found[5]) < 1e-35
    assert found[6] == np.float32(1e30)
    assert abs(found[7]) < 1e-5
    assert found[8] == np.inf
    assert np.isnan(found[9])


@ISAS
@pytest.mark.parametrize("shape", [(1, 1), (1, 4864), (3, 16), (700, 130), (0, 24)])
def test_every_instruction_set_computes_it(isa: str, shape: tuple[int, int]) -> None:
    rows, inner = shape
    random = np.random.default_rng(inner)
    x = (random.standard_normal((rows, 2 * inner)) * 20).astype(np.float32)
    found = run_with(isa, fuse_gated_silu(model(nodes(), inner=inner)).model, x)
    assert found.shape == (rows, inner)
    np.testing.assert_allclose(found, reference(x), rtol=1e-5, atol=1e-30)


def test_extremes_stay_what_they_are() -> None:
    check_extremes(fuse_gated_silu, nodes, 88, -88)


def test_an_odd_width_is_refused() -> None:
    odd = model([helper.make_node("GatedSilu", ["x"], ["y"], domain="onnxport")])
    odd.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
    odd.opset_import.append(helper.make_opsetid("onnxport", 1))
    with pytest.raises(Exception, match="last dimension must be even"):
        run(odd, np.zeros((1, 3), np.float32))


def _other_axis(_: Nodes) -> Nodes:
    return nodes(axis=0)


def _three_parts(of: Nodes) -> Nodes:
    of[1] = helper.make_node("Split", ["joined"], ["gate", "up", "rest"], axis=-1, num_outputs=3)
    return of


def _sizes_given(of: Nodes) -> Nodes:
    sizes = helper.make_tensor("sizes", TensorProto.INT64, [2], [INNER, INNER])
    constant = helper.make_node("Constant", [], ["sizes"], value=sizes)
    of[1] = helper.make_node("Split", ["joined", "sizes"], ["gate", "up"], axis=-1)
    return [constant, *of]


def _sigmoid_of_up(of: Nodes) -> Nodes:
    of[2] = helper.make_node("Sigmoid", ["up"], ["sigmoid"])
    return of


def _product_with_the_gate(of: Nodes) -> Nodes:
    of[4] = helper.make_node("Mul", ["gate", "silu"], ["y"])
    return of


def _sum_instead_of_product(of: Nodes) -> Nodes:
    of[4] = helper.make_node("Add", ["up", "silu"], ["y"])
    return of


def _tanh_instead_of_sigmoid(of: Nodes) -> Nodes:
    of[2] = helper.make_node("Tanh", ["gate"], ["sigmoid"])
    return of


def _gelu(of: Nodes) -> Nodes:
    gelu = helper.make_node("Gelu", ["gate"], ["silu"], approximate="tanh")
    return [*of[:2], gelu, *of[4:]]


def _up_used_elsewhere(of: Nodes) -> Nodes:
    return [*of, helper.make_node("Neg", ["up"], ["other"])]


def _sigmoid_used_elsewhere(of: Nodes) -> Nodes:
    return [*of, helper.make_node("Neg", ["sigmoid"], ["other"])]


@pytest.mark.parametrize(
    "change",
    [
        _other_axis,
        _three_parts,
        _sizes_given,
        _sigmoid_of_up,
        _product_with_the_gate,
        _sum_instead_of_product,
        _tanh_instead_of_sigmoid,
        _gelu,
        _up_used_elsewhere,
        _sigmoid_used_elsewhere,
    ],
)
def test_near_misses_are_left_alone(change: Callable[[Nodes], Nodes]) -> None:
    before = model(change(nodes()))
    result = fuse_gated_silu(before)
    assert not result.changes
    assert result.model == before


@pytest.mark.parametrize("name", ["gate", "up", "sigmoid", "silu"])
def test_a_graph_output_inside_the_pattern_is_kept(name: str) -> None:
    before = model(nodes(), (name,))
    assert not fuse_gated_silu(before).changes
