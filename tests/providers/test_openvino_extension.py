"""Our operator in OpenVINO's CPU plugin; tests/conformance has what it computes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import RANKS, WEIGHTS
from onnxport.providers.cpu import library
from onnxport.providers.openvino import extension
from onnxport.providers.openvino.core import new_core
from onnxport.providers.openvino.model import OpenVinoModel
from tests.conformance.adapting import MAX_RANK, SHAPES, make_adapter
from tests.conformance.models import step
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened

ov = pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")
if extension.load_extension() is None:
    pytest.skip("the extension was not built against this openvino", allow_module_level=True)

TOKENS = [[3, 17, 40, 9], [5, 5, 61, 12, 88, 2, 30], [100], [7, 70, 71, 72, 73]]
SLOTS = np.array([2, 0, 1, 3], np.int32)


def logits(path: Path, **options: Any) -> tuple[NDArray[np.float32], set[str]]:
    """Of a batch of three adapters and none, and the types of the nodes that computed them."""
    sizes = {"max_adapters": len(SHAPES), "max_adapter_rank": MAX_RANK, "kv_cache_tokens": 512}
    with opened(path, None, provider="openvino", **sizes, **options) as model:
        spec = Artifact.read(path).manifest.model
        for slot in SHAPES:
            model.set_adapter(slot, make_adapter(spec, slot))
        rows = [(tokens, 0, [row]) for row, tokens in enumerate(TOKENS)]
        found = model.run(step(rows, adapter_slots=SLOTS)).copy()
        assert isinstance(model, OpenVinoModel)
        graphs = [graph.compiled.get_runtime_model() for graph, _ in model._requests]
        nodes = [
            node.get_rt_info()["layerType"].astype(str) for g in graphs for node in g.get_ops()
        ]
        return found, set(nodes)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No extension is built, but what a test puts into this folder."""
    monkeypatch.setattr(extension, "_FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_it_computes_what_standard_operators_do(
    tiny_artifact: ArtifactMaker, precision: str, request: pytest.FixtureRequest
) -> None:
    path = tiny_artifact("llama", precision)
    exact: dict[str, Any] = {"matmul_accuracy_level": 1, "kv_cache_dtype": "float32"}
    found, nodes = logits(path, **exact)
    request.getfixturevalue("without")
    wanted, standard = logits(path, **exact)
    assert "Reference" in nodes
    assert "Reference" not in standard
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_adapters_in_int8_are_near_those_in_float(tiny_artifact: ArtifactMaker) -> None:
    path = tiny_artifact("llama", "int4")
    exact, _ = logits(path, matmul_accuracy_level=1, kv_cache_dtype="float32")
    rounded, nodes = logits(path, matmul_accuracy_level=4)
    assert "Reference" in nodes
    assert 0 < np.abs(rounded - exact).max() < 0.3 * exact.std()


def test_adapters_in_int4_are_those_of_the_cpu_provider(tiny_artifact: ArtifactMaker) -> None:
    path = tiny_artifact("llama", "int4")
    exact, _ = logits(path, matmul_accuracy_level=4, adapter_dtype="float32")
    found = {
        dtype: np.linalg.norm(logits(path, matmul_accuracy_level=4, adapter_dtype=dtype)[0] - exact)
        for dtype in ("int8", "int4")
    }
    assert 0 < 2 * found["int8"] < found["int4"] < 0.5 * np.linalg.norm(exact)


def test_bfloat16_goes_through_it(tiny_artifact: ArtifactMaker) -> None:
    path = tiny_artifact("llama", "fp32")
    exact, _ = logits(path, matmul_accuracy_level=1, kv_cache_dtype="float32")
    if "BF16" not in new_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bfloat16")
    rounded, nodes = logits(path, dtype="bfloat16")
    assert "Reference" in nodes
    assert 0 < np.abs(rounded - exact).max() < 0.3 * exact.std()


def test_a_library_that_does_not_load_is_said_and_done_without(
    without: Path, tiny_artifact: ArtifactMaker, caplog: pytest.LogCaptureFixture
) -> None:
    (without / "onnxport_openvino.so").write_bytes(b"of another release")
    with caplog.at_level(logging.WARNING, logger=extension.__name__):
        _, nodes = logits(tiny_artifact("llama", "fp32"))
    assert "without our operator for OpenVINO" in caplog.text
    assert "Reference" not in nodes


def test_there_is_none_without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    assert extension.load_extension() is None


def run_node(
    *, slots: list[int], rank: int = 1, rows: int = 2, weights: int = 128, **attributes: int
) -> NDArray[np.float32]:
    """What two adapters in float32 add to 3 columns for 4 inputs, in a graph of its own."""
    import openvino.opset15 as ops

    own = extension.load_extension()
    assert own is not None
    stored = np.zeros((2, weights), np.float32)
    stored[:, :4] = 0.5  # A
    stored[:, 64:67] = [1, 2, 3]  # B
    ranks = np.array([[[0]], [[rank]], [[1]]], np.int32)
    given = extension.Loaded(own)
    given({RANKS: ranks, WEIGHTS: stored})
    activations = ops.parameter([-1, 4], np.float32, name="activations")
    tokens = ops.parameter([-1], np.int32, name="slots")
    settings = {"model": given.model, "max_rank": 1, "columns0": 3, **attributes}
    node = own.node(activations.output(0), tokens.output(0), settings)
    graph = ov.Model([node], [activations, tokens], "node")
    request = new_core().compile_model(graph, "CPU").create_infer_request()
    request.set_tensor("activations", ov.Tensor(np.full((rows, 4), 2, np.float32)))
    request.set_tensor("slots", ov.Tensor(np.array(slots, np.int32)))
    request.infer()
    return np.array(request.get_output_tensor(0).data)


def test_a_node_alone() -> None:
    np.testing.assert_array_equal(run_node(slots=[0, 2]), [[0, 0, 0], [4, 8, 12]])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"slots": [0, 3]}, "slot 3; there are 0 to 2"),
        ({"slots": [0, -1]}, "slot -1; there are 0 to 2"),
        ({"slots": [1, 0], "rank": 2}, "rank 2; there are 0 to 1"),
        ({"slots": [1]}, "number of token slots must be 2, found 1"),
        ({"slots": [1, 1], "model": -1}, "model -1 has no adapters"),
        ({"slots": [1, 1], "weights": 100}, "numbers of a slot, at least, must be 128, found 100"),
        ({"slots": [1, 1], "columns0": 0}, "there are no columns or no ranks"),
        ({"slots": [1, 1], "offset": -64}, "an attribute is negative"),
        ({"slots": [1, 1], "ranks": 1}, "ranks of a slot, at least, must be 2, found 1"),
    ],
)
def test_a_call_that_would_read_elsewhere(call: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        run_node(**call)
