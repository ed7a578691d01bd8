"""Layers of multi-token prediction: what is exported computes what PyTorch does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.manifest import DRAFT_TOKENS, MTP_FOLDER
from tests.exporter.checkpoints import VOCAB
from tests.exporter.mtp_layers import Mtp, make
from tests.exporter.test_draft_head import run

LAYERS: Mapping[str, Mtp] = {
    "qwen3.5": Mtp("qwen3.5"),
    "qwen3.5, tied": Mtp("qwen3.5-tied"),
    "qwen3.5, own embedding": Mtp("qwen3.5-tied", own=("embedding",)),
    "qwen3.5, images": Mtp("qwen3.5-images"),
    "qwen3.5, experts": Mtp("qwen3.5-moe"),
    "qwen3.5, experts and images": Mtp("qwen3.5-moe-images"),
    "qwen3-next": Mtp("qwen3-next"),
    "glm 4.5": Mtp("glm4-moe", own=("embedding", "head")),
    "glm 4.5, shared": Mtp("glm4-moe"),
    "glm 4.7 flash": Mtp("glm4-moe-lite", own=("embedding", "head")),
    "deepseek v3": Mtp("deepseek-v3", own=("embedding", "head")),
    "deepseek v3, halves": Mtp("deepseek-v3-halves"),
}


def export(checkpoint: Path, folder: Path, precision: str = "fp32") -> tuple[Artifact, Artifact]:
    """The model's artifact, and the layer's."""
    options = ExportOptions(precision=precision, group_size=32, mtp=True)
    path = export_model(checkpoint, folder, options)
    return Artifact.read(path, verify="sha256"), Artifact.read(path / MTP_FOLDER, verify="sha256")


@pytest.mark.parametrize("name", LAYERS)
def test_the_exported_layer_is_the_one_of_pytorch(name: str, tmp_path: Path) -> None:
    made = make(LAYERS[name], tmp_path / "checkpoint")
    model, artifact = export(tmp_path / "checkpoint", tmp_path / "artifact")
    spec, ours = artifact.manifest.model, model.manifest.model
    assert spec.draft is not None
    assert spec.draft.is_mtp
    assert (spec.num_layers, spec.linear, spec.num_logits) == (1, None, VOCAB)
    assert spec.draft.target_num_layers == ours.num_layers
    assert spec.draft.target_hidden_size == ours.hidden_size
    np.testing.assert_array_equal(np.load(artifact.path / DRAFT_TOKENS), np.arange(VOCAB))
    golden = np.load(artifact.path / "golden.npz")
    ids, rows = golden["token_ids"], golden["logits_indices"]
    given, own = golden["target_hidden_states"], golden["draft_hidden_states"]
    assert (given.any(1) ^ own.any(1)).all()
    logits, last = made.guess(ids, given, own)
    assert np.ptp(logits) > 2  # that say something
    np.testing.assert_allclose(golden["logits"], logits[rows], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(golden["last_hidden_states"], last[rows], rtol=1e-3, atol=1e-3)
    for attention in ("custom", "decomposed"):
        found, told = run(artifact, ids, given, own, attention=attention)
        np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(told, last, rtol=1e-3, atol=1e-3)
