"""Scales as they are stored: where they are read, where they must not be, and the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import initializers
from onnxport.graphs.passes.gated_mlp import fuse_gated_mlp
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.stored_scales import use_stored_scales
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.conformance.make import make_artifact
from tests.kernels import matmul_cases, mlp_cases

Graphs = tuple[onnx.ModelProto, onnx.ModelProto]  # in float32, and as it is stored
SCALES = ("s1", "s2")


def graphs(*, fused: bool = True) -> Graphs:
    """A feed-forward layer of our operators, and a graph that holds its scales in float16."""
    case = mlp_cases.make_case(2, (4, 32), (8, 64), (96, 70, 40), 5)
    make = mlp_cases.fused if fused else mlp_cases.separate
    stored = onnx.load_from_string(make(case))
    model = onnx.load_from_string(make(case))
    for name in SCALES:
        half = numpy_helper.to_array(initializers(model)[name]).astype(np.float16)
        initializers(stored)[name].CopyFrom(numpy_helper.from_array(half, name))
        full = numpy_helper.from_array(half.astype(np.float32), name)
        initializers(model)[name].CopyFrom(full)
    return model, stored


@pytest.mark.parametrize("fused", [True, False])
def test_stored_scales_give_the_same_bits(fused: bool) -> None:
    model, stored = graphs(fused=fused)
    untouched = model.SerializeToString()
    result = use_stored_scales(model, stored)
    assert result.changes == {"scales as they are stored": 2}
    assert model.SerializeToString() == untouched
    left = initializers(result.model)
    assert left.keys() == {"w1", "w2", "s1.stored", "s2.stored"}
    assert left["s1.stored"].data_type == left["s2.stored"].data_type == TensorProto.FLOAT16
    library = find_library()
    if library is None or matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    x = mlp_cases.make_case(2, (4, 32), (8, 64), (96, 70, 40), 5).x
    found, wanted = (
        matmul_cases.session(library, of.SerializeToString()).run(["y"], {"x": x})[0]
        for of in (result.model, model)
    )
    assert found.tobytes() == wanted.tobytes()


def test_scales_that_others_read_stay_beside() -> None:
    model, stored = graphs()
    model.graph.node.append(helper.make_node("Neg", ["s1"], ["negative"]))
    result = use_stored_scales(model, stored)
    assert {"s1", "s1.stored", "s2.stored"} < initializers(result.model).keys()
    assert "s2" not in initializers(result.model)
    assert initializers(result.model)["s1"].data_type == TensorProto.FLOAT


def test_a_name_that_is_taken_is_not_taken_again() -> None:
    model, stored = graphs()
    model.graph.node.append(helper.make_node("Neg", ["x"], ["s1.stored"]))
    node = use_stored_scales(model, stored).model.graph.node[0]
    assert node.input[2] == "s1.stored_"


def _one_in_float32(stored: onnx.ModelProto) -> None:
    half = numpy_helper.to_array(initializers(stored)["s2"])
    full = numpy_helper.from_array(half.astype(np.float32), "s2")
    initializers(stored)["s2"].CopyFrom(full)


def _one_of_another_name(stored: onnx.ModelProto) -> None:
    initializers(stored)["s1"].name = "t1"


@pytest.mark.parametrize("change", [_one_in_float32, _one_of_another_name])
def test_a_node_takes_all_its_scales_or_none(change: Callable[[onnx.ModelProto], None]) -> None:
    model, stored = graphs()
    change(stored)
    result = use_stored_scales(model, stored)
    assert not result.changes
    assert result.model.SerializeToString() == model.SerializeToString()


def test_operators_of_others_keep_float32() -> None:
    model, stored = graphs(fused=False)
    for node in model.graph.node:
        node.domain = "com.microsoft"
    assert not use_stored_scales(model, stored).changes


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.read(make_artifact(tmp_path_factory.mktemp("scales"), "qwen2", "int4"))


def test_all_scales_of_a_decoder(int4: Artifact) -> None:
    stored = int4.load_graph("paged")
    retyped = retype(stored, int4.read_tensor)
    model = use_int8_matmul(fuse_gated_silu(retyped.model).model).model
    result = use_stored_scales(fuse_gated_mlp(model).model, stored)
    layers = int4.manifest.model.num_layers
    assert result.changes == {"scales as they are stored": 4 * layers + 1}
    known = initializers(stored)
    for name, tensor in initializers(result.model).items():
        if name.endswith(".stored"):
            assert tensor.external_data == known[name.removesuffix(".stored")].external_data
