"""EAGLE-3 heads: what is exported computes what PyTorch does, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from onnxport.errors import CheckpointError, ExportError, OnnxportError, UnsupportedModelError
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.manifest import DRAFT_TOKENS
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import get_provider
from tests.conformance.models import step
from tests.exporter import checkpoints
from tests.exporter.checkpoints import VOCAB
from tests.exporter.heads import HIDDEN, TARGET, Head, torch_head

HEADS: Mapping[str, Head] = {
    "plain": Head(),
    "told layers": Head(target_layers=(0, 7)),
    "model stem": Head(stem="model."),
    "all tokens": Head(draft_vocab=None),
    "own embedding": Head(own_embedding=True),
    "another width": Head(hidden=96, flags={"norm_output": True}),
    "norm before residual": Head(flags={"norm_before_residual": True}),
    "norm before fc": Head(flags={"norm_before_fc": True}),
    "norms of each": Head(flags={"fc_norm": True}, target_layers=(1, 3, 4, 6)),
    "two layers": Head(layers=2),
    "library": Head(library=True, target_layers=(1, 2, 6), flags={"norm_before_residual": True}),
    "library, qwen3": Head(library=True, qwen3=True, layers=2, own_embedding=True),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "checkpoint"
    checkpoints.make(TARGET, folder)
    return folder


def export(head: Path, target: Path, folder: Path, precision: str = "fp32") -> Artifact:
    options = ExportOptions(precision=precision, group_size=32)
    return Artifact.read(export_head(head, target, folder, options))


@pytest.mark.parametrize("layers", [None, (0, 3), (1, 3, 4), (2, 4, 5)])
def test_layers_that_may_be_counted_otherwise_are_warned_about(
    layers: tuple[int, ...] | None, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two programs publish heads whose lists begin with 1, and mean two things."""
    head = Head(target_layers=layers)
    spec = export(head.make(tmp_path / "head"), target, tmp_path / "artifact").manifest.model
    assert spec.draft is not None
    assert spec.draft.target_layers == (layers or (2, 4, 5))
    warned = "add one to each number" in caplog.text
    assert warned == (layers == (1, 3, 4))


@pytest.mark.parametrize("name", HEADS)
def test_the_exported_head_is_the_one_of_pytorch(name: str, target: Path, tmp_path: Path) -> None:
    head = HEADS[name]
    artifact = export(head.make(tmp_path / "head"), target, tmp_path / "artifact")
    spec = artifact.manifest.model
    assert spec.draft is not None
    assert spec.draft.target_layers == (head.target_layers or (2, 4, 5))
    assert (spec.draft.target_num_layers, spec.draft.target_hidden_size) == (8, HIDDEN)
    assert (spec.vocab_size, spec.num_logits) == (VOCAB, head.draft_vocab or VOCAB)
    tokens = np.load(artifact.path / DRAFT_TOKENS)
    weights = head.tensors()
    expected = np.arange(spec.num_logits)
    if "d2t" in weights:
        expected = np.flatnonzero(weights["t2d"].numpy())
    np.testing.assert_array_equal(tokens, expected)
    stored = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    embedding = weights.get(f"{head.stem}embed_tokens.weight", stored)
    golden = np.load(artifact.path / "golden.npz")
    ids, rows = golden["token_ids"], golden["logits_indices"]
    given, own = golden["target_hidden_states"], golden["draft_hidden_states"]
    assert (given.any(1) ^ own.any(1)).all()
    logits, last = torch_head(head, embedding, ids, given, own)
    np.testing.assert_allclose(golden["logits"], logits[rows], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(golden["last_hidden_states"], last[rows], rtol=1e-3, atol=1e-3)
    for attention in ("custom", "decomposed"):
        found, told = run(artifact, ids, given, own, attention=attention)
        np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(told, last, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_quantized_heads_compute_what_their_weights_mean(
    precision: str, target: Path, tmp_path: Path
) -> None:
    artifact = export(HEADS["plain"].make(tmp_path / "head"), target, tmp_path / "a", precision)
    golden = np.load(artifact.path / "golden.npz")
    states = golden["target_hidden_states"], golden["draft_hidden_states"]
    level = {"matmul_accuracy_level": 1}
    for attention in ("custom", "decomposed"):
        logits, last = run(artifact, golden["token_ids"], *states, attention=attention, **level)
        rows = golden["logits_indices"]
        np.testing.assert_allclose(logits[rows], golden["logits"], rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(last[rows], golden["last_hidden_states"], rtol=2e-3, atol=2e-3)
    served, _ = run(artifact, golden["token_ids"], *states)
    assert np.isfinite(served).all()  # a row of zeros has a scale, too
    assert np.abs(served[golden["logits_indices"]] - golden["logits"]).max() < 1.0


def run(
    artifact: Artifact,
    ids: np.ndarray[Any, Any],
    given: np.ndarray[Any, Any],
    own: np.ndarray[Any, Any],
    **options: Any,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All tokens in two steps, on the cpu provider."""
    from dataclasses import replace

    chosen = LoadOptions(**{"threads": 2, "kv_cache_tokens": 256, **options})
    if options.get("attention") == "custom" and not _has_kernel():
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    model = get_provider("cpu").load(artifact, chosen)
    logits, told = [], []
    try:
        for first, end in ((0, 13), (13, len(ids))):
            blocks = list(range(1, 1 + -(-len(ids) // model.capabilities.block_size)))
            inputs = step([(ids[first:end].tolist(), first, blocks)], model.capabilities)
            last = np.empty((end - first, own.shape[1]), np.float32)
            rows = np.arange(end - first, dtype=np.int32)
            inputs = replace(
                inputs,
                logits_indices=rows,
                target_hidden_states=given[first:end].copy(),
                draft_hidden_states=own[first:end].copy(),
                last_hidden_states=last,
            )
            logits.append(model.run(inputs).copy())
            told.append(last)
    finally:
        model.close()
    return np.concatenate(logits), np.concatenate(told)


def _has_kernel() -> bool:
    from onnxport.providers.cpu.library import find_library

    return find_library() is not None


def test_the_first_heads_name_the_class_of_their_models(target: Path, tmp_path: Path) -> None:
    folder = changed(Head(), tmp_path / "head", architectures=["LlamaForCausalLM"])
    assert export(folder, target, tmp_path / "artifact").manifest.model.draft is not None
    with pytest.raises(ExportError, match="is a draft head, which needs the model"):
        export_model(folder, tmp_path / "other")


def changed(head: Head, folder: Path, **config: Any) -> Path:
    """A head whose config.json differs; None leaves a key out."""
    made = head.make(folder)
    values = {**head.config, **config}
    kept = {key: value for key, value in values.items() if value is not None}
    (made / "config.json").write_text(json.dumps(kept))
    return made


LIBRARY = Head(library=True)
ALIKE = torch.zeros(96, dtype=torch.int64)


@pytest.mark.parametrize(
    ("head", "config", "kind", "words"),
    [
        (Head(), {"draft_vocab_size": 97}, CheckpointError, "lm_head.weight"),
        (Head(), {"vocab_size": 99}, CheckpointError, "99 tokens, and the target has 160"),
        (
            Head(),
            {"eagle_config": {"use_aux_hidden_state": False}},
            UnsupportedModelError,
            "EAGLE-3",
        ),
        (Head(), {"eagle_config": {"other": 1}}, UnsupportedModelError, "other = 1"),
        (Head(), {"mask_token_id": 3}, UnsupportedModelError, "mask_token_id"),
        (Head(), {"model_type": "phi3"}, UnsupportedModelError, "'llama' and 'qwen3'"),
        (Head(), {"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        (Head(), {"target_hidden_size": 32}, CheckpointError, "target_hidden_size is 32"),
        (Head(), {"num_aux_hidden_states": 2}, CheckpointError, "num_aux_hidden_states is 2"),
        (Head(target_layers=(1, 8)), {}, CheckpointError, "distinct layers of the target's 8"),
        (Head(target_layers=(1, 1)), {}, CheckpointError, "distinct layers of the target's 8"),
        (
            Head(),
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1.5]}},
            CheckpointError,
            "must be whole numbers",
        ),
        (Head(target_layers=(5, 1)), {}, CheckpointError, "that ascend"),
        (Head(target_layers=()), {}, CheckpointError, "must be whole numbers that ascend"),
        (
            Head(target_layers=(1, 5)),
            {"eagle_aux_hidden_state_layer_ids": [1, 6]},
            CheckpointError,
            "two lists",
        ),
        (Head(), {"use_sliding_window": True}, UnsupportedModelError, "use_sliding_window"),
        (Head(), {"norm_before_fc": True, "fc_norm": True}, CheckpointError, "exclude"),
        (LIBRARY, {"norm_before_residual": None}, CheckpointError, "lacks the key 'norm_before_r"),
        (LIBRARY, {"speculators_model_type": "mlp"}, UnsupportedModelError, "'mlp'"),
        (LIBRARY, {"mask_token_id": 3}, UnsupportedModelError, "mask_token_id"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    head: Head,
    config: Mapping[str, Any],
    kind: type[OnnxportError],
    words: str,
    target: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(kind) as info:
        export(changed(head, tmp_path / "head", **config), target, tmp_path / "artifact")
    assert words in str(info.value)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": None}, "lacks d2t"),
        ({"d2t": ALIKE - 1}, "a token of its own"),
        ({"d2t": ALIKE[:9]}, "d2t is [9]"),
        ({"d2t": ALIKE.int()}, "the tensor d2t is I32, expected I64"),
        ({"d2t": ALIKE}, "name other tokens"),
        ({"t2d": torch.ones(9, dtype=torch.bool)}, "name other tokens"),
        ({"fc.bias": torch.zeros(HIDDEN)}, "fc.bias"),
        ({"lm_head.weight": None}, "lm_head.weight"),
        ({"embed_tokens.weight": torch.zeros(9, HIDDEN)}, "embed_tokens.weight is [9, 64]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    changes: Mapping[str, torch.Tensor | None], words: str, target: Path, tmp_path: Path
) -> None:
    head = Head().make(tmp_path / "head", changes)
    with pytest.raises(CheckpointError) as info:
        export(head, target, tmp_path / "artifact")
    assert words in str(info.value)


def test_a_precision_of_experts_is_refused(target: Path, tmp_path: Path) -> None:
    head = Head().make(tmp_path / "head")
    options = ExportOptions(expert_precision="mxfp4")
    with pytest.raises(ExportError, match="this head has no experts"):
        export_head(head, target, tmp_path / "artifact", options)


@pytest.mark.parametrize("precision", ["int4", "fp32"])
def test_too_little_space_for_a_head_is_seen_before_any_work(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    head = Head().make(tmp_path / "head")
    made = export(head, target, tmp_path / "artifact", precision)
    size = made.manifest.files["model.onnx.data"].size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(size * 0.9)))
    seen: list[object] = []
    options = ExportOptions(precision=precision, overwrite=True)
    with pytest.raises(ExportError, match="the artifact needs"):
        export_head(head, target, tmp_path / "artifact", options, seen.append)
    assert not seen


def test_a_short_model_needs_its_layers_named(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["llama"], tmp_path / "target")
    head = Head().make(tmp_path / "head")
    with pytest.raises(CheckpointError, match="layer 2, that of half their number"):
        export(head, tmp_path / "target", tmp_path / "artifact")


def test_who_needs_a_target_and_who_does_not(target: Path, tmp_path: Path) -> None:
    head = Head().make(tmp_path / "head")
    with pytest.raises(ExportError, match="is a draft head, which needs the model"):
        export_model(head, tmp_path / "artifact")
    with pytest.raises(ExportError, match="is no draft head, which alone needs a target"):
        export_head(target, target, tmp_path / "artifact")
    with pytest.raises(ExportError, match="give the model that heads guess for"):
        export_head(head, head, tmp_path / "artifact")
