"""Experts in MXFP4 on each way to run them: what they compute, in which operators and memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CapacityError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.passes.int8_experts import int8_bytes
from onnxport.providers import cuda, device, memory
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu import lowering
from onnxport.providers.cpu.library import matmul_isa
from onnxport.providers.openvino.cpu import CpuPlugin
from onnxport.providers.ort import CPU, Target
from onnxport.providers.registry import get_provider
from tests.conformance.make import MXFP4
from tests.conformance.reference import Reference
from tests.exporter import checkpoints
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import Row, opened, run_rows

PROMPTS = [checkpoints.tokens(seed, 20).tolist() for seed in range(4)]
ROWS: list[Row] = [(prompt, 0, [2 * i, 2 * i + 1]) for i, prompt in enumerate(PROMPTS)]
EXACT: dict[str, Any] = {"matmul_accuracy_level": 1, "kv_cache_dtype": "float32"}
served = pytest.mark.skipif(
    matmul_isa() is None, reason="the kernels are not there, or not this processor's"
)
EARLIER = "lowered by an earlier start"


@pytest.fixture(scope="module")
def path(tiny_artifact: ArtifactMaker) -> Path:
    return tiny_artifact("gpt-oss", MXFP4)


@pytest.fixture(scope="module")
def expected(path: Path) -> np.ndarray:
    reference = Reference(path)
    return np.stack([reference.logits(prompt)[-1] for prompt in PROMPTS])


@served
@pytest.mark.parametrize("max_adapters", [0, 1])
def test_cpu_computes_them_as_they_are(
    path: Path,
    expected: np.ndarray,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    max_adapters: int,
) -> None:
    caplog.set_level(logging.INFO)
    options = {"graph_cache": tmp_path, "max_adapters": max_adapters}
    found = []
    for start in range(2):
        with opened(path, "custom", kv_cache_dtype="float32", **options) as model:
            found.append(run_rows(model, ROWS))
            alone = np.concatenate([run_rows(model, [row]) for row in ROWS])
        assert found[-1].tobytes() == found[0].tobytes() == alone.tobytes()
        kept = start and not max_adapters  # graphs with adapters are not
        assert (EARLIER in caplog.text) == bool(kept)
    assert "3 layers of experts with int8 activations" in caplog.text
    assert "written in 8 bits" not in caplog.text
    assert 1e-4 < np.abs(found[0] - expected).max() / expected.std() < 0.6


@pytest.mark.parametrize("attention", ["custom", "decomposed"])
def test_a_later_start_makes_the_same_weights(
    path: Path,
    expected: np.ndarray,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    attention: Any,
) -> None:
    caplog.set_level(logging.INFO)
    found = []
    for start in range(2):
        with opened(path, attention, graph_cache=tmp_path, **EXACT) as model:
            found.append(run_rows(model, ROWS))
        assert (EARLIER in caplog.text) == bool(start)
    assert "3 layers of experts in MXFP4 written in 8 bits" in caplog.text
    assert np.abs(found[0] - expected).max() < 1e-4 * expected.std()
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("start", ["first", "later"])
def test_what_does_not_fit_is_not_made(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    options = {"graph_cache": tmp_path, "kv_memory": 1 << 20, **EXACT}
    if start == "later":
        with opened(path, "decomposed", **options):
            pass
    needed = int8_bytes(Artifact.read(path).load_graph("paged"), "float32")
    read = Artifact.read(path).manifest.files["model.onnx.data"].size
    free = iter([read + (2 << 20)])  # when what is stored is looked at; then it has become less
    monkeypatch.setattr(memory, "available_bytes", lambda: next(free, needed))
    match = rf"MXFP4 become 8 bits here, which take {needed} bytes.*{needed} bytes are free"
    with pytest.raises(CapacityError, match=match), opened(path, "decomposed", **options):
        pass


@pytest.mark.parametrize("attention", ["custom", "decomposed"])
def test_adapters_add_to_attention(path: Path, expected: np.ndarray, attention: Any) -> None:
    with opened(path, attention, max_adapters=1, **EXACT) as model:
        found = run_rows(model, ROWS)
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("gathers", [True, False])
def test_openvino(
    path: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")
    monkeypatch.setattr(CpuPlugin, "gathers_experts", gathers and CpuPlugin.gathers_experts)
    with opened(path, None, provider="openvino", **EXACT) as model:
        found = run_rows(model, ROWS)
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("provider", ["cuda", "webgpu"])
def test_devices(path: Path, expected: np.ndarray, provider: str, dtype: str) -> None:
    """WebGPU's products of experts are joined."""
    options = LoadOptions(
        threads=2,
        kv_cache_tokens=1024,
        dtype=dtype,
        attention="decomposed",
        matmul_accuracy_level=1,
    )
    model = get_provider(provider, emulate=True).load(Artifact.read(path), options)
    try:
        found = run_rows(model, ROWS)
    finally:
        model.close()
    limit = 1e-4 if dtype == "float32" else 0.2
    assert np.abs(found - expected).max() < limit * expected.std()


def test_what_a_device_holds_of_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has its own copy alone; the host has what was made, and what is packed of it."""
    held: list[int] = []

    def note(*_: Any, weight_bytes: int, **rest: Any) -> None:
        held.append(weight_bytes)
        raise CapacityError("that is all")

    monkeypatch.setattr(device, "plan_pool", note)
    artifact, options = Artifact.read(path), LoadOptions(dtype="float16", attention="decomposed")
    recipe = cuda.CudaProvider(emulate=True)._recipe("a GPU", (8, 0))
    for target in (CPU, Target("CUDAExecutionProvider", "cuda")):
        with pytest.raises(CapacityError, match="that is all"):
            device.load_on_device(artifact, options, recipe, target, emulate=False)
    made = int8_bytes(artifact.load_graph("paged"), "float16")
    stored = artifact.manifest.files["model.onnx.data"].size
    assert held[0] - held[1] == made
    assert held[1] == pytest.approx(stored + made // 2, rel=0.05)


@pytest.mark.parametrize(
    ("level", "int8", "layout", "is_whole"),
    [
        (None, True, "tiled", True),
        (4, True, "tiled", True),
        (1, True, "tiled", False),
        (None, False, "tiled", False),
        (None, True, "plain", False),
    ],
)
def test_cpu_has_an_operator_for_them(
    path: Path, level: int | None, int8: bool, layout: Any, is_whole: bool
) -> None:
    artifact = Artifact.read(path)
    options = LoadOptions(matmul_accuracy_level=level)
    cache = ("float32", layout)
    graph = artifact.load_graph("paged")
    groups = LayerGroups.single(artifact.manifest.model.num_layers)
    chosen = (graph, artifact, options, cache, None)
    steps = list(lowering.lower(*chosen, groups=groups, int8=int8, summaries=False))
    kinds = [node.op_type for node in steps[-1].model.graph.node]
    assert "QMoE" not in kinds
    assert kinds.count("GatedExperts") == (3 if is_whole else 0)
    made = sum(value.nbytes for value in lowering.converted(steps).values())
    lowered = lowering.lowered_graph(artifact, steps, is_exact=False, is_native=True)
    if is_whole:
        assert (made, lowered.int8_bytes) == (0, 0)
        assert lowered.stored_bytes < artifact.manifest.files["model.onnx.data"].size
    else:
        assert made == lowered.int8_bytes == int8_bytes(graph, "float32")
        assert lowered.stored_bytes > made
