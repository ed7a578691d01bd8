"""Experts of GGUF files in Q4_1 and Q4_K keep their blocks, and each matrix its bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gguf import GGMLQuantizationType as Kind

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import attribute_int
from onnxport.providers.cpu.library import matmul_isa
from tests.exporter.run_graphs import check_golden
from tests.exporter.test_gguf import made, meant, stored
from tests.providers.models import Row, opened, run_rows

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 16,
    "norm_topk_prob": True,
}
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}  # of blocks of Q4_K
PROJECTIONS = {"gate_up": ("gate", "up"), "down": ("down",)}


def nodes(artifact: Artifact) -> list[onnx.NodeProto]:
    """The layers of experts."""
    return [one for one in artifact.load_graph("paged").graph.node if one.op_type == "QMoE"]


def bits(artifact: Artifact) -> list[dict[str, int]]:
    """What each layer says of its bits."""
    return [
        {one.name: one.i for one in node.attribute if one.name.endswith("_weight_bits")}
        for node in nodes(artifact)
    ]


def expected(path: Path, layer: int, role: str) -> Any:
    """What a file means by experts' matrices; gate's rows and up's take turns."""
    parts = [meant(path, f"blk.{layer}.ffn_{one}_exps.weight") for one in PROJECTIONS[role]]
    return np.stack(parts, axis=1).reshape(-1, parts[0].shape[1])


@pytest.mark.parametrize(("kind", "config"), [(Kind.Q4_1, {}), (Kind.Q4_K, WIDE), (Kind.Q4_0, {})])
@pytest.mark.parametrize("precision", [None, "int4"])
def test_the_artifact_is_the_file(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: Kind,
    config: dict[str, int],
    precision: str | None,
) -> None:
    """To float16 of steps and offsets, which Q4_0's blocks have and need none of."""
    path = made(tmp_path, kind, "qwen3_moe", **{**EXPERTS, **config})
    options = ExportOptions(precision=precision, threads=2)
    with caplog.at_level(logging.INFO):
        artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
    manifest, has_offsets = artifact.manifest, kind != Kind.Q4_0
    assert (manifest.precision, manifest.group_size, manifest.int8_matrices) == ("int4", 32, None)
    assert manifest.offsets == (True if has_offsets else None)
    assert bits(artifact) == [{"expert_weight_bits": 4}] * 2
    for layer, role in ((0, "gate_up"), (1, "down")):
        wanted = expected(path, layer, role)
        found = stored(artifact, f"layers.{layer}.experts.{role}")
        step = np.ptp(wanted.reshape(-1, 32), axis=-1).max() / 15
        assert np.abs(found - wanted).max() < (0.01 * step if has_offsets else 1e-7)
    check_golden(artifact)
    assert artifact.has_gqa != has_offsets
    assert ("experts keep the minima of their blocks" in caplog.text) == has_offsets
    files = {"model_gqa.onnx", "genai_config.json"}
    assert files & set(manifest.files) == (set() if has_offsets else files)


def test_the_node(tmp_path: Path) -> None:
    """Offsets lie where zero points would, which ONNX Runtime refuses by their type."""
    path = made(tmp_path, Kind.Q4_1, "qwen3_moe", **EXPERTS)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", ExportOptions(threads=2)))
    first, _ = nodes(artifact)
    names = ["gate_up", "down"]
    offsets = [f"layers.0.experts.{one}.offsets" for one in names]
    assert list(first.input[4:]) == ["", *first.input[5:7], *[""] * 4, *offsets]
    tensors = {one.name: one for one in artifact.load_graph("paged").graph.initializer}
    for name in names:
        scales, own = (tensors[f"layers.0.experts.{name}.{one}"] for one in ("scales", "offsets"))
        assert (scales.dims, scales.data_type) == (own.dims, own.data_type)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match=r"'tensor\(float16\)' of input parameter \(layers"):
        ort.InferenceSession(artifact.path / "model.onnx", options, ["CPUExecutionProvider"])


def test_each_matrix_has_its_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Q4_K_M, where down of some layers needs more; gate and up are one matrix."""
    others = {"blk.0.ffn_down_exps.weight": Kind.Q6_K, "blk.1.ffn_up_exps.weight": Kind.Q8_0}

    def pick(name: str, _: object) -> Kind:
        return others.get(name, Kind.Q4_K)

    path = made(tmp_path, pick, "qwen3_moe", **{**EXPERTS, **WIDE})
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", ExportOptions(threads=2)))
    both, down = "expert_weight_bits", "fc2_expert_weight_bits"
    assert bits(artifact) == [{both: 4, down: 8}, {both: 8, down: 4}]
    assert (artifact.manifest.precision, artifact.manifest.int8_matrices) == ("int4", 2)
    tensors = {one.name for one in artifact.load_graph("paged").graph.initializer}
    kept = {f"layers.{one}.offsets" for one in ("0.experts.gate_up", "1.experts.down")}
    assert {one for one in tensors if "experts" in one and "offsets" in one} == kept
    for layer, role in ((0, "gate_up"), (1, "down")):
        wanted = expected(path, layer, role)
        found = stored(artifact, f"layers.{layer}.experts.{role}")
        assert np.abs(found - wanted).max() < 0.001 * np.ptp(wanted)
    check_golden(artifact)
    assert not artifact.has_gqa
    assert "or the bits of each matrix" in caplog.text


def test_without_minima_bits_of_each_matrix_are_no_onnx_runtime_s(tmp_path: Path) -> None:
    def pick(name: str, _: object) -> Kind:
        return Kind.Q8_0 if name == "blk.1.ffn_down_exps.weight" else Kind.Q4_0

    path = made(tmp_path, pick, "qwen3_moe", **EXPERTS)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", ExportOptions(threads=2)))
    both = {"expert_weight_bits": 4}
    assert bits(artifact) == [both, both | {"fc2_expert_weight_bits": 8}]
    assert artifact.manifest.offsets is None
    assert not artifact.has_gqa


@pytest.mark.parametrize(
    ("others", "bits"), [("down_exps", (8, 8)), ("blk.1.", (8, 4)), ("attn_k.weight", (4, 4))]
)
def test_mxfp4_beside_experts_in_others_is_in_eight_bits(
    tmp_path: Path, others: str, bits: tuple[int, int]
) -> None:
    """Which have all its numbers; where all experts have it, there is the choice to keep it."""

    def pick(name: str, _: object) -> Kind:
        return Kind.Q4_0 if others in name or "token_embd" in name else Kind.MXFP4

    path = made(tmp_path, pick, "qwen3_moe", **EXPERTS)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", ExportOptions(threads=2)))
    of_gate_up = [attribute_int(node, "expert_weight_bits", 0) for node in nodes(artifact)]
    assert tuple(of_gate_up) == bits
    for role in PROJECTIONS if bits[0] == 8 else ():
        found = stored(artifact, f"layers.0.experts.{role}")
        np.testing.assert_array_equal(found, expected(path, 0, role))
    found = stored(artifact, "layers.0.o")
    np.testing.assert_array_equal(found, meant(path, "blk.0.attn_output.weight"))


def test_experts_in_eight_bits_have_no_offsets(tmp_path: Path) -> None:
    path = made(tmp_path, Kind.Q4_1, "qwen3_moe", **EXPERTS)
    options = ExportOptions(precision="int8", threads=2)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
    assert artifact.manifest.offsets is None
    assert artifact.has_gqa
    wanted = expected(path, 0, "down")
    off = np.linalg.norm(stored(artifact, "layers.0.experts.down") - wanted)
    assert off < 0.008 * np.linalg.norm(wanted)


WAYS: list[Any] = [
    pytest.param("cpu", {"attention": "custom"}, 0.3, id="cpu-int8-activations"),
    pytest.param("cpu", {"attention": "custom", "matmul_accuracy_level": 1}, 1e-3, id="cpu"),
    pytest.param("cpu", {"attention": "decomposed", "matmul_accuracy_level": 1}, 1e-3, id="plain"),
    pytest.param("openvino", {"matmul_accuracy_level": 1}, 1e-3, id="openvino"),
]


@pytest.mark.parametrize(("provider", "options", "limit"), WAYS)
def test_providers_compute_what_the_file_means(
    tmp_path: Path, provider: str, options: dict[str, Any], limit: float
) -> None:
    """Of experts in four bits with offsets ahead of eight without, and the other way round."""
    if provider == "openvino":
        pytest.importorskip("openvino", reason="it is not installed: pip install '.[openvino]'")
    if limit > 1e-3 and matmul_isa() is None:
        pytest.skip("the kernels are not there, or not this processor's")

    def pick(name: str, _: object) -> Kind:
        eight = ("blk.0.ffn_down_exps.weight", "blk.1.ffn_up_exps.weight")
        return Kind.Q8_0 if name in eight else Kind.Q4_1

    path = made(tmp_path, pick, "qwen3_moe", **EXPERTS)
    folder = export_model(path, tmp_path / "artifact", ExportOptions(threads=2))
    with np.load(folder / "golden.npz") as golden:
        tokens, ends, wanted = (golden[one] for one in ("token_ids", "logits_indices", "logits"))
    chosen = {"attention": None, "kv_cache_dtype": "float32", **options}
    rows: list[Row] = [
        (tokens[: end + 1].tolist(), 0, [*range(8 * i, 8 * i + 8)]) for i, end in enumerate(ends)
    ]
    with opened(folder, provider=provider, **chosen) as loaded:
        found = run_rows(loaded, rows)
        alone = np.concatenate([run_rows(loaded, [row]) for row in rows])
    off = np.abs(found - wanted).max() / wanted.std()
    assert off < limit
    if limit > 1e-3:
        assert off > 1e-4  # our operator, then
        assert found.tobytes() == alone.tobytes()
