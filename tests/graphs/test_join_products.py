"""Products that are added up, made one: where it fires, where it must not, and the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.passes.join_products import join_products, joined_bytes
from onnxport.graphs.passes.split_experts import split_experts
from tests.graphs.expert_models import COUNT, TYPES, inputs, layer

PARTS, DEPTH, FEATURES, BLOCK = 3, 32, 8, 16
Edit = Callable[[onnx.ModelProto], None]


def reader(folder: Path) -> Callable[[TensorProto], NDArray[Any]]:
    """Reads initializers, also of a file that is described by ranges."""

    def read(tensor: TensorProto) -> NDArray[Any]:
        return numpy_helper.to_array(tensor, base_dir=str(folder))

    return read


def run(
    model: onnx.ModelProto,
    feeds: dict[str, NDArray[Any]],
    attached: dict[str, NDArray[Any]],
    folder: Path,
) -> list[NDArray[Any]]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    values = [ort.OrtValue.ortvalue_from_numpy(value) for value in attached.values()]
    options.add_external_initializers(list(attached), values)
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: list[NDArray[Any]] = session.run(None, feeds)
    return found


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_second_halves_of_experts_become_one_product(
    tmp_path: Path, bits: int | None, dtype: str
) -> None:
    made = layer(tmp_path, bits, TYPES[dtype])
    split = split_experts(made.model).model
    untouched = split.SerializeToString()
    result = join_products(split, reader(tmp_path))
    assert split.SerializeToString() == untouched
    assert joined_bytes(split) == sum(value.nbytes for value in result.attached.values()) > 0
    assert joined_bytes(result.model) == 0
    assert result.changes == {"products joined": COUNT}
    # Of COUNT products and their COUNT - 1 sums one product is left, and the Split is gone.
    assert len(split.graph.node) - len(result.model.graph.node) == 2 * COUNT - 1
    assert max(len(node.output) for node in result.model.graph.node) == 2
    x, logits = inputs(9)
    kind = helper.tensor_dtype_to_np_dtype(TYPES[dtype])
    feeds = {"x": x.astype(kind), "router": logits.astype(kind)}
    (found,) = run(result.model, feeds, dict(result.attached), tmp_path)
    atol = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found, made.expected(x, logits), atol=atol)


def test_an_expert_that_is_not_chosen_adds_nothing(tmp_path: Path) -> None:
    made = layer(tmp_path, None, TYPES["float32"])
    x, logits = inputs(2)
    logits[:, 5] = -10
    split = split_experts(made.model).model

    def change(tensor: TensorProto) -> NDArray[Any]:
        value = reader(tmp_path)(tensor)
        return np.full_like(value, 3e38) if "5.down" in tensor.name else value

    feeds = {"x": x, "router": logits}
    found = [
        run(result.model, feeds, dict(result.attached), tmp_path)[0]
        for result in (join_products(split, read) for read in (reader(tmp_path), change))
    ]
    np.testing.assert_array_equal(*found)


def model(kind: str) -> onnx.ModelProto:
    """`y = x[0] w0^T + x[1] w1^T + x[2] w2^T + b`, and a bias behind it."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Split", ["x"], [f"x{i}" for i in range(PARTS)], axis=-1, num_outputs=3)
    ]
    tensors = {"b": random.standard_normal(FEATURES).astype(np.float32)}
    for part in range(PARTS):
        names = [f"w{part}"]
        if kind == "Gemm":
            attributes: dict[str, Any] = {"transB": 1}
            tensors[names[0]] = random.standard_normal((FEATURES, DEPTH)).astype(np.float32)
        else:
            names.append(f"s{part}")
            attributes = {
                "domain": "com.microsoft", "K": DEPTH, "N": FEATURES, "bits": 4,
                "block_size": BLOCK, "accuracy_level": 1,
            }  # fmt: skip
            shape = (FEATURES, DEPTH // BLOCK, BLOCK // 2)
            tensors[names[0]] = random.integers(0, 256, shape, np.uint8)
            tensors[names[1]] = random.random(shape[:2], np.float32)
        inner = [f"x{part}", *names]
        nodes.append(helper.make_node(kind, inner, [f"p{part}"], name=f"p{part}", **attributes))
    nodes += [
        helper.make_node("Add", ["p0", "p1"], ["a1"], name="first"),
        helper.make_node("Add", ["a1", "p2"], ["a2"], name="second"),
        helper.make_node("Add", ["a2", "b"], ["y"], name="bias"),
    ]
    graph = helper.make_graph(
        nodes,
        "sum",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", PARTS * DEPTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", FEATURES])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


KINDS = ["Gemm", "MatMulNBits"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_behind_stays(tmp_path: Path, kind: str) -> None:
    before = model(kind)
    result = join_products(before, reader(tmp_path))
    assert [node.op_type for node in result.model.graph.node] == [kind, "Add"]
    names = {tensor.name for tensor in result.model.graph.initializer}
    assert names == {"b", *result.attached}
    x = np.random.default_rng(1).standard_normal((4, PARTS * DEPTH)).astype(np.float32)
    (expected,) = run(before, {"x": x}, {}, tmp_path)
    (found,) = run(result.model, {"x": x}, dict(result.attached), tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def _node(of: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in of.graph.node if node.name == name)


def _another_axis(of: onnx.ModelProto) -> None:
    set_attribute(of.graph.node[0], "axis", 0)


def _another_order(of: onnx.ModelProto) -> None:
    _node(of, "first").input[1], _node(of, "second").input[1] = "p2", "p1"


def _not_a_sum(of: onnx.ModelProto) -> None:
    _node(of, "second").op_type = "Mul"


def _read_twice(of: onnx.ModelProto) -> None:
    of.graph.node.append(helper.make_node("Neg", ["p1"], ["z"]))


def _is_an_output(of: onnx.ModelProto) -> None:
    of.graph.output.append(helper.make_tensor_value_info("a1", TensorProto.FLOAT, None))


def _part_read_twice(of: onnx.ModelProto) -> None:
    of.graph.node.append(helper.make_node("Neg", ["x1"], ["z"]))


def _shared_weights(of: onnx.ModelProto) -> None:
    _node(of, "p2").input[1] = "w1"


def _weights_that_are_made(of: onnx.ModelProto) -> None:
    of.graph.node.insert(0, helper.make_node("Neg", ["w1"], ["made"]))
    _node(of, "p1").input[1] = "made"


def _one_of_another_kind(of: onnx.ModelProto) -> None:
    set_attribute(_node(of, "p1"), "name_of_nothing", 1)


def _with_a_bias(of: onnx.ModelProto) -> None:
    for part in range(PARTS):
        _node(of, f"p{part}").input.append("b")


NEAR_MISSES: list[Edit] = [
    _another_axis,
    _another_order,
    _not_a_sum,
    _read_twice,
    _is_an_output,
    _part_read_twice,
    _shared_weights,
    _weights_that_are_made,
    _one_of_another_kind,
    _with_a_bias,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", NEAR_MISSES)
def test_others_stay(tmp_path: Path, edit: Edit, kind: str) -> None:
    before = model(kind)
    edit(before)
    result = join_products(before, reader(tmp_path))
    assert result.changes == {}
    assert result.model == before


def _not_transposed(of: onnx.ModelProto) -> None:
    for part in range(PARTS):
        set_attribute(_node(of, f"p{part}"), "transB", 0)


def _scaled(of: onnx.ModelProto) -> None:
    for part in range(PARTS):
        _node(of, f"p{part}").attribute.append(helper.make_attribute("alpha", 2.0))


@pytest.mark.parametrize("edit", [_not_transposed, _scaled])
def test_gemms_of_another_kind_stay(tmp_path: Path, edit: Edit) -> None:
    before = model("Gemm")
    edit(before)
    assert join_products(before, reader(tmp_path)).changes == {}


def test_flat_scales_stay(tmp_path: Path) -> None:
    before = model("MatMulNBits")
    for tensor in before.graph.initializer:
        if tensor.name.startswith("s"):
            tensor.dims[:] = [FEATURES * DEPTH // BLOCK]
    assert join_products(before, reader(tmp_path)).changes == {}
