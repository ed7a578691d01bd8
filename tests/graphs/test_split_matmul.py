"""Taking joined projections apart: where it fires, where it must not, and the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.passes.split_matmul import split_matmul

DEPTH, FEATURES, BLOCK = 64, 48, 32
BLOCKS = DEPTH // BLOCK
FILE = "weights.bin"
Edit = Callable[[onnx.ModelProto], None]


def stored(flat_scales: bool, zero_points: bool) -> list[tuple[str, NDArray[np.generic]]]:
    random = np.random.default_rng(0)
    scales = random.random((FEATURES, BLOCKS), np.float32)
    zeros = random.integers(0, 256, (FEATURES, BLOCKS // 2), np.uint8)
    return [
        ("weight", random.integers(0, 256, (FEATURES, BLOCKS, BLOCK // 2), np.uint8)),
        ("scales", scales.reshape(-1) if flat_scales else scales),
        *([("zero_points", zeros)] if zero_points else []),
    ]


def model(
    folder: Path, *, parts: int = 2, flat_scales: bool = False, zero_points: bool = False
) -> onnx.ModelProto:
    """A MatMulNBits and the Split of its result, weights in a file behind 64 other bytes."""
    initializers, content = [], bytes(64)
    for name, value in stored(flat_scales, zero_points):
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=value.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in (("location", FILE), ("offset", len(content)), ("length", value.nbytes)):
            tensor.external_data.add(key=key, value=str(entry))
        content += value.tobytes()
        initializers.append(tensor)
    (folder / FILE).write_bytes(content)
    outputs = [f"y{part}" for part in range(parts)]
    product = helper.make_node(
        "MatMulNBits", ["x", *(one.name for one in initializers)], ["joined"], name="gate_up",
        domain="com.microsoft", K=DEPTH, N=FEATURES, bits=4, block_size=BLOCK, accuracy_level=1,
    )  # fmt: skip
    split = helper.make_node("Split", ["joined"], outputs, axis=-1, num_outputs=parts)
    graph = helper.make_graph(
        [product, split],
        "joined",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", DEPTH])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["rows", None]) for y in outputs],
        initializers,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(of: onnx.ModelProto, folder: Path) -> list[NDArray[np.float32]]:
    options = ort.SessionOptions()
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    session = ort.InferenceSession(
        of.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    x = np.random.default_rng(1).standard_normal((3, DEPTH)).astype(np.float32)
    found: list[NDArray[np.float32]] = session.run(None, {"x": x})
    return found


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("flat_scales", [True, False])
@pytest.mark.parametrize("zero_points", [True, False])
def test_each_part_becomes_a_product_of_its_own(
    tmp_path: Path, parts: int, flat_scales: bool, zero_points: bool
) -> None:
    before = model(tmp_path, parts=parts, flat_scales=flat_scales, zero_points=zero_points)
    untouched = before.SerializeToString()
    result = split_matmul(before)
    assert before.SerializeToString() == untouched
    assert result.changes == {"joined projections split": 1}
    assert [node.op_type for node in result.model.graph.node] == ["MatMulNBits"] * parts
    names = [tensor.name for tensor in result.model.graph.initializer]
    assert len(names) == (3 if zero_points else 2) * parts
    assert not {"weight", "scales", "zero_points"} & set(names)
    for found, expected in zip(run(result.model, tmp_path), run(before, tmp_path), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def second_reader(of: onnx.ModelProto) -> None:
    of.graph.node.append(helper.make_node("Relu", ["joined"], ["other"]))


def shared_weight(of: onnx.ModelProto) -> None:
    of.graph.node.append(helper.make_node("Identity", ["weight"], ["other"]))


def output_too(of: onnx.ModelProto) -> None:
    of.graph.output.append(helper.make_tensor_value_info("joined", TensorProto.FLOAT, None))


def other_axis(of: onnx.ModelProto) -> None:
    of.graph.node[1].attribute[0].i = 0


def bias(of: onnx.ModelProto) -> None:
    of.graph.node[0].input.extend(["", "", "bias"])


def inline(of: onnx.ModelProto) -> None:
    of.graph.initializer[0].data_location = TensorProto.DEFAULT


def uneven(of: onnx.ModelProto) -> None:
    of.graph.node[1].input.append("sizes")


def other_domain(of: onnx.ModelProto) -> None:
    of.graph.node[0].domain = "elsewhere"


@pytest.mark.parametrize(
    "edit",
    [second_reader, shared_weight, output_too, other_axis, bias, inline, uneven, other_domain],
)
def test_a_near_miss_is_left_alone(tmp_path: Path, edit: Edit) -> None:
    before = model(tmp_path)
    edit(before)
    result = split_matmul(before)
    assert result.changes == {}
    assert result.model == before
