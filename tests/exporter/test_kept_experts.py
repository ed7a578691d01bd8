"""Experts that stay in MXFP4: which bytes are stored, what they mean, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from onnxport.errors import ArtifactError, CheckpointError, ExportError
from onnxport.exporter import weights
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions, Progress
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.contract import IR_VERSION, IR_VERSION_POWERS
from onnxport.providers.cpu.library import matmul_isa
from tests.conformance.reference import Reference
from tests.exporter import checkpoints
from tests.providers.models import Row, opened, run_rows

CASE = "gpt-oss"
KEPT = ExportOptions(precision="fp16", expert_precision="mxfp4", threads=2)
EXPERTS = "model.layers.{}.mlp.experts.{}_proj"

Made = tuple[PreTrainedModel, Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("checkpoint")
    return checkpoints.make(checkpoints.CASES[CASE], folder), folder


@pytest.fixture(scope="module")
def kept(model: Made, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    destination = tmp_path_factory.mktemp("kept") / "artifact"
    return Artifact.read(export_model(model[1], destination, KEPT), verify="sha256")


def tensors(artifact: Artifact) -> dict[str, NDArray[Any]]:
    """The weights of the paged graph."""
    initializers = artifact.load_graph("paged").graph.initializer
    return {one.name: artifact.read_tensor(one) for one in initializers}


def test_bytes_are_those_of_the_checkpoint(model: Made, kept: Artifact) -> None:
    stored, found = load_file(model[1] / "model.safetensors"), tensors(kept)
    for layer in range(kept.manifest.model.num_layers):
        for name in ("gate_up", "down"):
            source = EXPERTS.format(layer, name)
            for part, kind in (("weight", "blocks"), ("scales", "scales")):
                one = found[f"layers.{layer}.experts.{name}.{part}"]
                expected = stored[f"{source}_{kind}"]
                np.testing.assert_array_equal(one.view(np.uint8).ravel(), expected.ravel())
            assert one.dtype.name == "float8_e8m0fnu"


@pytest.mark.parametrize("kind", ["paged", "gqa"])
def test_the_node(kept: Artifact, kind: Any) -> None:
    graph = kept.load_graph(kind)
    assert graph.ir_version == IR_VERSION_POWERS
    (node, *_) = (one for one in graph.graph.node if one.op_type == "QMoE")
    values = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    assert values["quant_type"] == b"fp4"
    assert (values["expert_weight_bits"], values["block_size"]) == (4, 32)
    prefix = "layers.0.experts."
    parts = [
        prefix + name + of for name in ("gate_up", "down") for of in (".weight", ".scales", ".bias")
    ]
    assert list(node.input[2:]) == [*parts, *[""] * 7, *["layers.0.global_scale"] * 2]
    declared = {one.name: one for one in graph.graph.initializer}
    assert declared[prefix + "down.scales"].data_type == TensorProto.FLOAT8E8M0
    count = kept.manifest.model.experts.count
    ones = kept.read_tensor(declared["layers.0.global_scale"])
    np.testing.assert_array_equal(ones, np.ones(count, np.float32))


def test_without_asking_nothing_changes(model: Made, tmp_path: Path) -> None:
    artifact = Artifact.read(export_model(model[1], tmp_path / "a", ExportOptions(group_size=32)))
    assert "expert_precision" not in (artifact.path / "manifest.json").read_text()
    for kind in ("paged", "gqa"):
        graph = artifact.load_graph(kind)  # type: ignore[arg-type]
        assert graph.ir_version == IR_VERSION
        for node in graph.graph.node:
            if node.op_type == "QMoE":
                assert not {"quant_type"} & {one.name for one in node.attribute}
                assert len(node.input) == 8


@pytest.mark.parametrize(("precision", "says"), [("int4", True), ("int8", True), ("fp16", False)])
def test_it_says_so_where_experts_are_quantized_again(
    model: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture, precision: str, says: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        export_model(model[1], tmp_path / "a", ExportOptions(precision=precision, group_size=32))
    assert ("expert precision mxfp4 keeps them as they are" in caplog.text) == says


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_transformers_computes_the_same(model: Made, tmp_path: Path, precision: str) -> None:
    options = replace(KEPT, precision=precision)
    artifact = Artifact.read(export_model(model[1], tmp_path / "artifact", options))
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(model[0], token_ids)
    np.testing.assert_allclose(Reference(artifact.path).logits(token_ids), expected, atol=1e-4)
    with np.load(artifact.path / "golden.npz") as golden:
        found = checkpoints.logits(model[0], golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], found, atol=1e-4)


WAYS: list[Any] = [
    pytest.param("cpu", {"attention": "custom"}, 0.2, id="cpu-int8-activations"),
    pytest.param("cpu", {"attention": "custom", "matmul_accuracy_level": 1}, 1e-4, id="cpu"),
    pytest.param("cpu", {"attention": "decomposed", "matmul_accuracy_level": 1}, 1e-4, id="plain"),
    pytest.param("openvino", {"matmul_accuracy_level": 1}, 1e-4, id="openvino"),
]


@pytest.mark.parametrize(("provider", "options", "limit"), WAYS)
def test_providers_compute_what_transformers_does(
    model: Made, tmp_path: Path, provider: str, options: dict[str, Any], limit: float
) -> None:
    """Weights are exact, so only activations in int8 make a difference."""
    if provider == "openvino":
        pytest.importorskip("openvino", reason="it is not installed: pip install '.[openvino]'")
    if limit > 1e-4 and matmul_isa() is None:
        pytest.skip("the kernels are not there, or not this processor's")
    options = {"attention": None, "kv_cache_dtype": "float32", **options}
    path = export_model(model[1], tmp_path / "artifact", replace(KEPT, precision="fp32"))
    prompts = [checkpoints.tokens(seed, 20) for seed in range(4)]
    expected = np.stack([checkpoints.logits(model[0], prompt)[-1] for prompt in prompts])
    rows: list[Row] = [(one.tolist(), 0, [2 * i, 2 * i + 1]) for i, one in enumerate(prompts)]
    with opened(path, provider=provider, **options) as loaded:
        found = run_rows(loaded, rows)
        alone = np.concatenate([run_rows(loaded, [row]) for row in rows])
    off = np.abs(found - expected).max() / expected.std()
    assert off < limit
    if limit > 1e-4:
        assert off > 1e-4  # our operator, then
        assert found.tobytes() == alone.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_panels_and_threads_change_nothing(
    monkeypatch: pytest.MonkeyPatch, model: Made, kept: Artifact, tmp_path: Path, threads: int
) -> None:
    monkeypatch.setattr(weights, "_PANEL_ELEMENTS", 7 * 64)
    options = replace(KEPT, threads=threads)
    other = Artifact.read(export_model(model[1], tmp_path / "artifact", options))
    assert other.manifest.fingerprint == kept.manifest.fingerprint


def test_the_rest_follows_the_other_options(model: Made, tmp_path: Path) -> None:
    options = replace(KEPT, precision="int8", head_precision="int4", group_size=64)
    artifact = Artifact.read(export_model(model[1], tmp_path / "artifact", options))
    manifest = artifact.manifest
    assert (manifest.precision, manifest.head_precision, manifest.expert_precision) == (
        *("int8", "int4"),
        "mxfp4",
    )
    graph = artifact.load_graph("paged").graph
    bits = {
        next(a.i for a in one.attribute if a.name == "bits")
        for one in graph.node
        if one.op_type == "MatMulNBits"
    }
    assert bits == {4, 8}


def test_progress_ends_at_the_end(model: Made, tmp_path: Path) -> None:
    steps: list[Progress] = []
    export_model(model[1], tmp_path / "artifact", KEPT, steps.append)
    assert steps[-1].done_bytes == steps[-1].total_bytes


def test_what_is_written_was_expected(
    monkeypatch: pytest.MonkeyPatch, model: Made, tmp_path: Path
) -> None:
    from onnxport.exporter import export

    expected: list[int] = []
    writer = export.ArtifactWriter

    def make(*args: Any, expected_bytes: int, **options: Any) -> Any:
        expected.append(expected_bytes)
        return writer(*args, expected_bytes=expected_bytes, **options)

    monkeypatch.setattr(export, "ArtifactWriter", make)
    folder = export_model(model[1], tmp_path / "artifact", KEPT)
    size = (folder / "model.onnx.data").stat().st_size
    assert 0.7 * size < expected[0] < size  # small tensors begin on lines and pages


def test_onnxruntime_has_no_kernel_for_it(
    model: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import onnxruntime as ort

    with caplog.at_level(logging.WARNING):
        folder = export_model(model[1], tmp_path / "artifact", KEPT)
    assert "no kernel for experts in MXFP4" in caplog.text
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # 1.31 finds no kernel, 1.32 one that wants other scales.
    with pytest.raises(Exception, match=r"kernel for com\.microsoft\.QMoE.*float8e8m0|Float8E8M0"):
        ort.InferenceSession(folder / "model_gqa.onnx", options, ["CPUExecutionProvider"])


@pytest.mark.parametrize("case", ["gpt-oss-16bit", "qwen3-moe"])
def test_experts_that_are_stored_otherwise_are_refused(tmp_path: Path, case: str) -> None:
    checkpoints.make(checkpoints.CASES[case], tmp_path / "checkpoint")
    kind = {"gpt-oss-16bit": "BF16", "qwen3-moe": "F32"}[case]
    with pytest.raises(ExportError, match=f"mxfp4 was asked for.*is {kind}.*Leave it out"):
        export_model(tmp_path / "checkpoint", tmp_path / "artifact", KEPT)
    assert not (tmp_path / "artifact").exists()


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["llama"], tmp_path / "checkpoint")
    with pytest.raises(ExportError, match="this model has no experts; leave it out"):
        export_model(tmp_path / "checkpoint", tmp_path / "artifact", KEPT)


def test_another_precision_is_refused() -> None:
    with pytest.raises(ExportError, match="expert precision 'int4' is not one of same, mxfp4"):
        ExportOptions(expert_precision="int4")


@pytest.mark.parametrize("scale", [255, 254], ids=["no number", "too large for a float32"])
def test_what_is_not_finite_is_refused(model: Made, tmp_path: Path, scale: int) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for path in model[1].iterdir():
        (checkpoint / path.name).write_bytes(path.read_bytes())
    stored = load_file(checkpoint / "model.safetensors")
    name = EXPERTS.format(1, "down")
    stored[f"{name}_scales"][3, 5, 1] = scale
    stored[f"{name}_blocks"][3, 5, 1] = 0x77
    save_file(stored, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}_blocks holds values that are not finite"):
        export_model(checkpoint, tmp_path / "artifact", KEPT)


def change(kept: Artifact, folder: Path, values: Mapping[str, Any]) -> None:
    """Write the manifest of an artifact with other values."""
    import json

    found = json.loads((kept.path / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**found, **values}))


@pytest.mark.parametrize("value", ["int3", 4])
def test_a_manifest_says_what_there_is(kept: Artifact, tmp_path: Path, value: Any) -> None:
    change(kept, tmp_path, {"expert_precision": value})
    with pytest.raises(ArtifactError, match="expert_precision"):
        Artifact.read(tmp_path)
