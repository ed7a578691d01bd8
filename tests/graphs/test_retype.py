"""16-bit artifacts compute in float32, with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import HALF_TYPES, retype
from tests.graphs.artifacts import HIDDEN, SPEC, VOCAB, caches, reads, step_inputs, write
from tests.graphs.paged_models import inline, op_types


def session(artifact: Artifact, result: PassResult) -> ort.InferenceSession:
    """The lowered model over the artifact's weights, as a provider starts it."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(artifact.path)
    )
    values = [ort.OrtValue.ortvalue_from_numpy(value) for value in result.attached.values()]
    options.add_external_initializers(list(result.attached), values)
    data = result.model.SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def dequantized(weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    """[N, K] float32 of a 4-bit block-quantized weight."""
    data, scales = weights[f"{name}.weight"], weights[f"{name}.scales"].astype(np.float32)
    low, high = data & 15, data >> 4
    values = np.stack([low, high], -1).reshape(*data.shape[:2], -1).astype(np.float32) - 8
    return (values * scales[..., None]).reshape(data.shape[0], -1)


def expected_logits(weights: dict[str, np.ndarray], inputs: dict, quantized: bool) -> np.ndarray:
    """The decoder in NumPy, float64, with its own attention."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    if quantized:
        table = dequantized(weights, "head").astype(np.float64)
        head = table
    else:
        table = head = w["embed.weight"]
    x = table[inputs[c.INPUT_IDS]]
    cumulative, past = inputs[c.CUMULATIVE_SEQUENCE_LENGTHS], inputs[c.PAST_SEQUENCE_LENGTHS]
    pools = {name: value.astype(np.float64) for name, value in caches(np.float32).items()}
    tokens = [(b, i) for b in range(len(past)) for i in range(cumulative[b + 1] - cumulative[b])]
    for layer in range(SPEC.num_layers):
        total = x + x
        rms = np.sqrt((total**2).mean(-1, keepdims=True) + SPEC.rms_norm_eps)
        normed = total / rms * w[f"layers.{layer}.norm"]
        name = f"layers.{layer}.qkv"
        weight = dequantized(weights, name).T if quantized else w[f"{name}.weight"]
        qkv = (normed @ weight + w[f"{name}.bias"]).reshape(len(tokens), -1, SPEC.head_size)
        keys, values = pools[c.past_key(layer)], pools[c.past_value(layer)]
        out = np.zeros((len(tokens), SPEC.num_heads, SPEC.head_size))

        def rotated(head_row: np.ndarray, position: int) -> np.ndarray:
            cos, sin = w["cos"][position], w["sin"][position]
            a, b = head_row[:16], head_row[16:]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin])

        for t, (b, i) in enumerate(tokens):
            position = int(past[b]) + i
            block = inputs[c.BLOCK_TABLE][b, position // 8], position % 8
            for h in range(SPEC.num_kv_heads):
                keys[(*block, h)] = rotated(qkv[t, SPEC.num_heads + h], position)
                values[(*block, h)] = qkv[t, SPEC.num_heads + SPEC.num_kv_heads + h]
        for t, (b, i) in enumerate(tokens):
            position = int(past[b]) + i
            window = SPEC.sliding_window[layer]
            first = 0 if window is None else max(0, position - window + 1)
            rows = [(inputs[c.BLOCK_TABLE][b, p // 8], p % 8) for p in range(first, position + 1)]
            for h in range(SPEC.num_heads):
                k = np.stack([keys[(*row, h // 2)] for row in rows])
                v = np.stack([values[(*row, h // 2)] for row in rows])
                scores = k @ rotated(qkv[t, h], position) * SPEC.scale
                p = np.exp(scores - scores.max())
                out[t, h] = p @ v / p.sum()
        name = f"layers.{layer}.o"
        weight = dequantized(weights, name).T if quantized else w[f"{name}.weight"]
        x = total + out.reshape(len(tokens), -1) @ weight
    return x[inputs[c.LOGITS_INDICES]] @ head.T


@pytest.mark.parametrize("quantized", [True, False], ids=["int4", "fp16"])
def test_a_float16_artifact_computes_in_float32(tmp_path: Path, quantized: bool) -> None:
    artifact = Artifact.read(write(tmp_path / "model", quantized=quantized), verify="sha256")
    lowered = retype(artifact.load_graph("paged"), artifact.read_tensor)
    lowered = PassResult("both", decompose(lowered.model).model, {}, lowered.attached)
    inputs = step_inputs(new=[3, 1, 9], past=[0, 13, 5])
    found = session(artifact, lowered).run([c.LOGITS], {**inputs, **caches(np.float32)})[0]
    expected = expected_logits(reads(artifact), inputs, quantized)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("quantized", [True, False], ids=["int4", "fp16"])
def test_what_is_left(tmp_path: Path, quantized: bool) -> None:
    artifact = Artifact.read(write(tmp_path / "model", quantized=quantized))
    model = artifact.load_graph("paged")
    result = retype(model, artifact.read_tensor)
    kinds = element_types(result.model)
    halves = {name for name, kind in kinds.items() if kind in HALF_TYPES}
    assert halves == (set() if quantized else {"embed.weight", "embed.out.stored"})
    casts = op_types(result.model).count("Cast")
    assert casts == (0 if quantized else 1), "only the rows of a 16-bit embedding are cast"
    assert {result.model.graph.output[0].name} == {c.LOGITS}
    attention = next(n for n in result.model.graph.node if n.op_type == "PagedAttention")
    assert list(attention.input[8:10]) == ["cos", "sin"], "the tables are used as they are stored"
    assert result.changes["casts removed"] == 3
    large = {f"layers.{layer}.qkv.weight" for layer in range(2)}  # 128 KiB each
    assert large & set(result.attached) == (set() if quantized else large)
    assert all(value.dtype == np.float32 for value in result.attached.values())


def test_a_tied_table_is_kept_and_converted(tmp_path: Path) -> None:
    """The Gather reads the stored rows; only the Gemm gets a float32 copy."""
    artifact = Artifact.read(write(tmp_path / "model", quantized=False))
    result = retype(artifact.load_graph("paged"), artifact.read_tensor)
    nodes = {node.name: node for node in result.model.graph.node}
    assert nodes["embed"].input[0] == "embed.weight"
    assert nodes["head"].input[1] == "embed.weight.float32"


def test_a_device_without_16_bits_gets_none(tmp_path: Path) -> None:
    artifact = Artifact.read(write(tmp_path / "model", quantized=False))
    result = retype(artifact.load_graph("paged"), artifact.read_tensor, keep_tables=False)
    assert not set(HALF_TYPES) & set(element_types(result.model).values())
    nodes = {node.name: node for node in result.model.graph.node}
    assert nodes["embed"].input[0] == nodes["head"].input[1], "one table, converted once"


def small(nodes: list[onnx.NodeProto], *tensors: onnx.TensorProto, out: int) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 4]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
    ]
    outputs = [helper.make_tensor_value_info("y", out, None)]
    graph = helper.make_graph(nodes, "small", inputs, outputs, list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_float32_graph_is_left_alone() -> None:
    model = small([helper.make_node("Cast", ["ids"], ["y"], to=TensorProto.FLOAT)], out=1)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    result = retype(model, numpy_helper.to_array)
    assert result.model == model
    assert not result.changes
    assert str(result) == "retype: nothing to do"


def test_casts_that_convert_are_kept() -> None:
    """Integers to 16 bits become integers to float32; rounding to integers stays."""
    nodes = [
        helper.make_node("Cast", ["ids"], ["a"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.INT32),
        helper.make_node("Cast", ["b"], ["c"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["c"], ["d"], to=TensorProto.FLOAT16),
        helper.make_node("Add", ["a", "d"], ["y"]),
    ]
    result = retype(small(nodes, out=TensorProto.FLOAT16), numpy_helper.to_array)
    kept = [(n.input[0], n.attribute[0].i) for n in result.model.graph.node if n.op_type == "Cast"]
    assert kept == [("ids", TensorProto.FLOAT), ("x", TensorProto.INT32), ("b", TensorProto.FLOAT)]
    assert list(result.model.graph.node[-1].input) == ["a", "c"]


def test_a_gather_of_activations_is_no_table() -> None:
    nodes = [helper.make_node("Gather", ["x", "ids"], ["y"])]
    result = retype(small(nodes, out=TensorProto.FLOAT16), numpy_helper.to_array)
    assert op_types(result.model) == ["Gather"]


def test_a_value_of_unknown_type_keeps_its_cast() -> None:
    nodes = [
        helper.make_node("Mystery", ["x"], ["a"], domain="example"),
        helper.make_node("Cast", ["a"], ["y"], to=TensorProto.FLOAT16),
    ]
    result = retype(small(nodes, out=TensorProto.FLOAT16), numpy_helper.to_array)
    assert op_types(result.model) == ["Mystery", "Cast"]


def test_constants_and_inline_initializers_are_converted() -> None:
    half = numpy_helper.from_array(np.array([1, 2, 3, 4], np.float16), "half")
    nodes = [
        helper.make_node("Constant", [], ["k"], value=half),
        helper.make_node("Add", ["x", "k"], ["a"]),
        helper.make_node("Mul", ["a", "half"], ["y"]),
    ]
    result = retype(small(nodes, half, out=TensorProto.FLOAT16), numpy_helper.to_array)
    assert inline(result.model)["half"].dtype == np.float32
    constant = numpy_helper.to_array(result.model.graph.node[0].attribute[0].t)
    assert constant.dtype == np.float32
    np.testing.assert_array_equal(constant, [1, 2, 3, 4])


def test_a_number_stays_one() -> None:
    number = numpy_helper.from_array(np.array(0.5, np.float16), "number")
    node = helper.make_node("Min", ["x", "number"], ["y"])
    result = retype(small([node], number, out=TensorProto.FLOAT16), numpy_helper.to_array)
    (converted,) = result.model.graph.initializer
    assert (converted.data_type, list(converted.dims)) == (TensorProto.FLOAT, [])


def test_an_unknown_type_attribute_is_refused() -> None:
    node = helper.make_node("RandomNormal", [], ["y"], shape=[2], dtype=TensorProto.FLOAT16)
    with pytest.raises(ArtifactError, match="RandomNormal"):
        retype(small([node], out=TensorProto.FLOAT16), numpy_helper.to_array)


def test_control_flow_is_refused() -> None:
    branch = helper.make_graph([], "branch", [], [])
    node = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    with pytest.raises(ArtifactError, match="control flow"):
        retype(small([node], out=TensorProto.FLOAT16), numpy_helper.to_array)


def test_every_weight_of_the_small_model_is_read(tmp_path: Path) -> None:
    weights = reads(Artifact.read(write(tmp_path / "model")))
    assert weights["embed.weight"].shape == (VOCAB, HIDDEN // 2)
    np.testing.assert_array_equal(
        weights["embed.weight"].reshape(-1), weights["head.weight"].reshape(-1)
    )
