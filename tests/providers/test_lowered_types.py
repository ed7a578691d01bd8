"""Exported artifacts of every family and precision in every type that a device may like."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxport.graphs import contract as c
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.accuracy import set_accuracy
from onnxport.graphs.passes.decompose import Bounds, decompose
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import FLOAT_DTYPES, retype, retyped_bytes
from onnxport.graphs.passes.split_experts import split_experts
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers.ort import ort_value, start_session
from tests.exporter import checkpoints
from tests.providers.conftest import ArtifactMaker
from tests.tiers import crossed

FAMILIES = (
    "gemma2",
    "gemma3",
    "llama",
    "mistral-window",
    "olmo3",
    "phi3-longrope",
    "qwen2",
    "qwen3",
)
PRECISIONS = ("fp32", "fp16", "int8", "int4")
NUM_BLOCKS, BLOCK_SIZE = 8, 16


def logits(artifact: Artifact, lowered: PassResult) -> np.ndarray:
    """Of every position of two prompts, on the CPU, in decomposed attention."""
    model = decompose(set_accuracy(lowered.model, 1).model).model
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    values = [ort_value(value) for value in lowered.attached.values()]
    options.add_external_initializers(list(lowered.attached), values)
    session = start_session(model.SerializeToString(), artifact.path, options)
    spec, ids = artifact.manifest.model, checkpoints.tokens(5, 40)
    feeds = {
        c.INPUT_IDS: ids,
        c.BLOCK_TABLE: np.array([[5, 2], [0, 7]], np.int32),
        c.CUMULATIVE_SEQUENCE_LENGTHS: np.array([0, 23, 40], np.int32),
        c.PAST_SEQUENCE_LENGTHS: np.zeros(2, np.int32),
        c.ATTENTION_METADATA: np.zeros(3, np.int32),
        c.LOGITS_INDICES: np.arange(40, dtype=np.int32),
    }
    shape = (NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
    for info in model.graph.input:
        if info.name.startswith("past_key_values."):
            kind = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            feeds[info.name] = np.zeros(shape, kind)
    found: np.ndarray = session.run([c.LOGITS], feeds)[0]
    return found


def converted_bytes(stored: onnx.ModelProto, result: PassResult) -> int:
    """What was made of initializers, attached or in the model."""
    before = {t.name: t.data_type for t in stored.graph.initializer}
    made = [t for t in result.model.graph.initializer if before.get(t.name) != t.data_type]
    return sum(math.prod(t.dims) * numpy_dtype(t.data_type).itemsize for t in made)


@pytest.mark.parametrize(("family", "precision"), crossed(4, FAMILIES, PRECISIONS))
def test_float16_is_near_float32(tiny_artifact: ArtifactMaker, family: str, precision: str) -> None:
    artifact = Artifact.read(tiny_artifact(family, precision))
    model = artifact.load_graph("paged")
    exact = logits(artifact, retype(model, artifact.read_tensor))
    half = retype(model, artifact.read_tensor, "float16")
    assert bool(half.changes) == (precision == "fp32"), "the others are stored in float16"
    found = logits(artifact, half)
    assert found.dtype == np.float32
    assert 0 < np.abs(found - exact).max() < 1e-2 * np.abs(exact).max()


@pytest.mark.parametrize(
    "family", ["dots1", "ernie-moe", "gemma2", "glm4-moe", "gpt-oss-16bit", "mixtral", "solar-open"]
)
def test_what_is_stored_in_float32_chooses_the_experts_that_float16_does(
    tiny_artifact: ArtifactMaker, family: str
) -> None:
    """The same checkpoint, stored in either, is the same graph in the end, bit by bit."""
    found = []
    for precision in ("fp32", "fp16"):
        artifact = Artifact.read(tiny_artifact(family, precision))
        split = split_experts(artifact.load_graph("paged"))
        half = retype(split.model, artifact.read_tensor, "float16")
        assert (half.changes.get("parts kept in float32", 0) > 0) == (precision == "fp32")
        onnx.shape_inference.infer_shapes(half.model, check_type=True, strict_mode=True)
        found.append(logits(artifact, half))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kind", ["paged", "gqa"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("family", "precision"), crossed(2, FAMILIES, PRECISIONS))
def test_every_value_has_the_type(
    tiny_artifact: ArtifactMaker, family: str, precision: str, dtype: str, kind: str
) -> None:
    artifact = Artifact.read(tiny_artifact(family, precision))
    stored = artifact.load_graph(kind)
    result = retype(stored, artifact.read_tensor, dtype)
    assert retyped_bytes(stored, dtype) == converted_bytes(stored, result)
    bare = retype(stored, artifact.read_tensor, dtype, keep_tables=False)
    assert retyped_bytes(stored, dtype, keep_tables=False) == converted_bytes(stored, bare)
    graph, target = result.model.graph, FLOAT_DTYPES[dtype]
    onnx.shape_inference.infer_shapes(result.model, check_type=True, strict_mode=True)
    types = element_types(result.model)
    floating = {name: t for name, t in types.items() if t in FLOAT_DTYPES.values()}
    tables = {t.name for t in graph.initializer if t.name.startswith("rope.")}
    assert len(tables) == 2 * len(artifact.manifest.model.ropes)
    gathered = {n.input[0] for n in graph.node if n.op_type == "Gather"} | {
        n.output[0] for n in graph.node if n.output[0].endswith(".stored")
    }
    gathered = gathered if dtype == "float32" and precision == "fp16" else set()
    others = {name for name, t in floating.items() if t != target}
    # Logits are capped in float32, whose Cast is in the artifact unless that is in float32.
    capped = {name for name in others if name in ("cap", "over") or name.startswith("head.ca")}
    assert bool(capped) == (family == "gemma2" and dtype != "float32")
    assert others <= tables | {c.LOGITS} | gathered | capped
    assert types[c.LOGITS] == onnx.TensorProto.FLOAT
    made = {name for node in graph.node for name in node.output if name}
    assert made <= set(types), "no value escapes the check"
    for name, value in result.attached.items():
        assert onnx.helper.np_dtype_to_tensor_dtype(value.dtype) == target
        assert math.prod(value.shape) > 0, name


@pytest.mark.parametrize("bounds", ["metadata", "shapes"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("family", "precision"), crossed(2, FAMILIES, PRECISIONS))
def test_decomposed_graphs_are_valid_in_every_type(
    tiny_artifact: ArtifactMaker, family: str, precision: str, dtype: str, bounds: Bounds
) -> None:
    artifact = Artifact.read(tiny_artifact(family, precision))
    typed = retype(artifact.load_graph("paged"), artifact.read_tensor, dtype).model
    model = decompose(typed, bounds=bounds).model
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    types = element_types(model)
    chosen = {types[n.output[0]] for n in model.graph.node if n.op_type in ("Softmax", "ScatterND")}
    assert chosen == {FLOAT_DTYPES[dtype]}
