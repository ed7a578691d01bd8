"""Layers of multi-token prediction: what is exported computes what PyTorch does."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file, save_file

from onnxport.errors import CheckpointError, ExportError, UnsupportedModelError
from onnxport.exporter import export as export_module
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.manifest import DRAFT_TOKENS, MTP_FOLDER
from tests.exporter.checkpoints import CASES, VOCAB, edit_config
from tests.exporter.checkpoints import make as make_plain
from tests.exporter.heads import Head
from tests.exporter.mtp_layers import Made, Mtp, make
from tests.exporter.test_draft_head import run
from tests.exporter.test_fp8 import CASES as CASES_IN_FP8
from tests.exporter.test_fp8 import quantize

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
    "hunyuan 3": Mtp("hy-v3", names={"final_norm": "final_layernorm.weight"}),
}


def export(checkpoint: Path, folder: Path, precision: str = "fp32") -> tuple[Artifact, Artifact]:
    """The model's artifact, and the layer's."""
    quantized = precision in ("int4", "int8")
    options = ExportOptions(precision=precision, group_size=32 if quantized else None, mtp=True)
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


def places(artifact: Artifact, folder: Path) -> Mapping[str, tuple[int, int]]:
    """The inode and offset of each external initializer."""
    found = {}
    for one in artifact.load_graph("paged").graph.initializer:
        if one.data_location == TensorProto.EXTERNAL:
            location, offset, _ = artifact.external(one)
            found[one.name] = ((folder / location).stat().st_ino, offset)
    return found


@pytest.mark.parametrize("precision", ["int4", "fp16"])
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("qwen3.5", "embedding head"),
        ("qwen3.5, tied", "embedding"),
        ("glm 4.5, shared", "embedding head"),
        ("glm 4.5", ""),
    ],
)
def test_what_the_layer_has_of_the_model_is_stored_once(
    name: str, shared: str, precision: str, tmp_path: Path
) -> None:
    make(LAYERS[name], tmp_path / "checkpoint")
    model, layer = export(tmp_path / "checkpoint", tmp_path / "artifact", precision)
    ours, theirs = places(model, model.path), places(layer, layer.path)
    for role in ("embedding", "head"):
        found = ours.keys() & {f"{role}.rows", f"{role}.weight"}
        assert found or (role == "head" and "tied" in LAYERS[name].case)
        for one in found:
            assert (ours[one] in theirs.values()) == (role in shared), one
    assert not {one for one in ours if one.startswith("layers.")} & {
        one for one, place in ours.items() if place in theirs.values()
    }


def test_an_equal_copy_in_the_checkpoint_is_stored_once(tmp_path: Path) -> None:
    """As DeepSeek's and GLM's have one of the model's embedding."""
    made = make(Mtp("glm4-moe", own=("embedding",)), tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors[made.names["embedding"]] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    model, layer = export(tmp_path / "checkpoint", tmp_path / "artifact", "int4")
    place = places(model, model.path)["embedding.rows"]
    assert place in places(layer, layer.path).values()


def test_the_room_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored once is counted once."""
    asked = []
    writer = export_module.ArtifactWriter

    def write(*args: Any, expected_bytes: int, **options: Any) -> Any:
        asked.append(expected_bytes)
        return writer(*args, expected_bytes=expected_bytes, **options)

    monkeypatch.setattr(export_module, "ArtifactWriter", write)
    for name in ("glm 4.5, shared", "glm 4.5"):
        make(LAYERS[name], tmp_path / name)
        model, _ = export(tmp_path / name, tmp_path / f"{name} artifact", "int4")
    numbers = model.manifest.model.vocab_size * model.manifest.model.hidden_size
    matrix = numbers + numbers // 32 * 2  # int8, and a scale in 16 bits of each 32
    assert asked[1] - asked[0] == 2 * matrix  # embedding and head


Sources = Mapping[str, tuple[Path, Made]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Checkpoints of both ways to name tensors."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        name: (folder / name, make(LAYERS[name], folder / name))
        for name in ("qwen3.5", "glm 4.5, shared", "hunyuan 3")
    }


def changed(
    source: tuple[Path, Made],
    folder: Path,
    *,
    without: str | None = None,
    added: tuple[str, ...] = (),
) -> Path:
    """A checkpoint without a tensor, by its name or that of a part, or with more."""
    shutil.copytree(source[0], folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if without is not None:
        del tensors[source[1].names.get(without, without)]
    extra = dict.fromkeys(added, torch.ones(2))
    save_file(tensors | extra, path)
    return folder


@pytest.mark.parametrize("name", ["qwen3.5", "glm 4.5, shared"])
def test_a_checkpoint_without_the_layer_is_refused(
    name: str, sources: Sources, tmp_path: Path
) -> None:
    folder = changed(sources[name], tmp_path / "checkpoint", without="product")
    with pytest.raises(
        CheckpointError, match=r"method mtp\), and the checkpoint holds none: it has"
    ):
        export(folder, tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize("part", ["state_norm", "final_norm"])
def test_a_layer_that_lacks_something_is_refused(
    part: str, sources: Sources, tmp_path: Path
) -> None:
    folder = changed(sources["qwen3.5"], tmp_path / "checkpoint", without=part)
    with pytest.raises(CheckpointError, match=r"norm"):
        export(folder, tmp_path / "artifact")


@pytest.mark.parametrize(
    ("name", "more"),
    [("qwen3.5", "mtp.gate.weight"), ("glm 4.5, shared", "model.layers.3.gate.weight")],
)
def test_what_the_layer_has_besides_is_refused(
    name: str, more: str, sources: Sources, tmp_path: Path
) -> None:
    folder = changed(sources[name], tmp_path / "checkpoint", added=(more,))
    with pytest.raises(CheckpointError, match=rf"layer of multi-token prediction .* {more}"):
        export(folder, tmp_path / "artifact")


def test_a_head_that_hunyuan_does_not_read_is_left_out(sources: Sources, tmp_path: Path) -> None:
    source, made = sources["hunyuan 3"]
    unread = made.names["product"].replace("eh_proj", "shared_head")
    folder = changed((source, made), tmp_path / "checkpoint", added=(unread,))
    _, layer = export(folder, tmp_path / "artifact")
    golden = np.load(layer.path / "golden.npz")
    ids, rows = golden["token_ids"], golden["logits_indices"]
    logits, _ = made.guess(ids, golden["target_hidden_states"], golden["draft_hidden_states"])
    np.testing.assert_allclose(golden["logits"], logits[rows], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "behind", "config"),
    [
        ("qwen3.5", "mtp.layers.1.input_layernorm.weight", {"mtp_num_hidden_layers": 2}),
        ("glm 4.5, shared", "model.layers.4.eh_proj.weight", {"num_nextn_predict_layers": 2}),
    ],
)
def test_layers_behind_the_first_one_are_told_of(
    name: str,
    behind: str,
    config: Mapping[str, int],
    sources: Sources,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = changed(sources[name], tmp_path / "checkpoint", added=(behind,))
    edit_config(folder, **config)
    export(folder, tmp_path / "artifact")
    assert f"1 tensors are left out, such as {behind}, of layers behind the first" in caplog.text
    assert "what guesses tokens behind the next one" not in caplog.text


def test_a_layer_that_is_left_out_is_told_of(
    sources: Sources, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = export_model(sources["qwen3.5"][0], tmp_path / "artifact")
    assert "what guesses tokens behind the next one; --mtp exports it, too" in caplog.text
    assert not (path / MTP_FOLDER).exists()


def test_models_of_which_it_is_not_read_are_refused(tmp_path: Path) -> None:
    make_plain(CASES["llama"], tmp_path / "llama")
    with pytest.raises(UnsupportedModelError, match=r"not read of a LlamaForCausalLM. It is"):
        export(tmp_path / "llama", tmp_path / "artifact")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ExportError, match=r"not read of a GGUF file.* original checkpoint"):
        export(tmp_path / "model.gguf", tmp_path / "artifact")
    options = ExportOptions(mtp=True, expert_precision="mxfp4")
    with pytest.raises(ExportError, match=r"cannot stay in MXFP4"):
        export_model(tmp_path / "llama", tmp_path / "artifact", options)
    head = Head().make(tmp_path / "head")
    with pytest.raises(ExportError, match=r"leave --mtp out"):
        export_head(head, tmp_path / "llama", tmp_path / "artifact", ExportOptions(mtp=True))


def test_a_model_that_generates_no_text_has_no_tokens_to_guess(
    sources: Sources, tmp_path: Path
) -> None:
    source = sources["glm 4.5, shared"]
    folder = changed(source, tmp_path / "checkpoint", without="lm_head.weight")
    edit_config(folder, architectures=["Glm4MoeModel"])
    with pytest.raises(ExportError, match=r"no head that generates text"):
        export(folder, tmp_path / "artifact")


def test_an_older_artifact_is_replaced_with_its_layer(sources: Sources, tmp_path: Path) -> None:
    for mtp in (True, False, True):
        options = ExportOptions(overwrite=True, mtp=mtp)
        path = export_model(sources["qwen3.5"][0], tmp_path / "artifact", options)
        assert (path / MTP_FOLDER).is_dir() == mtp
        assert [one.name for one in tmp_path.iterdir()] == ["artifact"]


def joined(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Tensors with one for all experts of a layer, of layers that begin so."""
    split = [name for name in tensors if name.startswith(prefix) and ".experts." in name]
    found = {name: one for name, one in tensors.items() if name not in split}
    for start in sorted({name.partition("experts.")[0] + "experts." for name in split}):
        count = len([name for name in split if name.startswith(start)]) // 3
        gates, ups, downs = (
            [tensors[f"{start}{number}.{kind}_proj.weight"] for number in range(count)]
            for kind in ("gate", "up", "down")
        )
        pairs = zip(gates, ups, strict=True)
        found[f"{start}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{start}down_proj"] = torch.stack(downs)
    return found


def test_a_layer_may_be_stored_otherwise_than_the_model(tmp_path: Path) -> None:
    """With one tensor of all experts, or one of each, as the model has not; or within the model."""
    folder = tmp_path / "checkpoint"
    make(LAYERS["qwen3.5, experts"], folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    within = {
        f"model.{name}" if name.startswith("mtp.") else name: tensors[name] for name in tensors
    }
    expected = None
    for stored in (tensors, joined(tensors, "model."), joined(tensors, "mtp."), within):
        save_file(dict(stored), path)
        export_model(folder, tmp_path / "plain", ExportOptions(precision="fp32", overwrite=True))
        options = ExportOptions(precision="fp32", mtp=True, overwrite=True)
        layer = export_model(folder, tmp_path / "artifact", options) / MTP_FOLDER
        found = (layer / "model.onnx.data").read_bytes()
        assert found == (expected or found)
        expected = found


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_layer_in_fp8_is_read_as_the_model_is(tmp_path: Path, in_fp8: bool) -> None:
    """As DeepSeek publishes it: with a product of both that is not in FP8, or is, as others do."""
    make(LAYERS["deepseek v3"], tmp_path / "checkpoint")
    scaling, config = CASES_IN_FP8["blocks"]
    product = "model.layers.3.eh_proj.weight"
    plain = load_file(tmp_path / "checkpoint" / "model.safetensors")[product]
    stored, meant = quantize(tmp_path / "checkpoint", scaling, None)
    assert stored[product].dtype == torch.float8_e4m3fn
    if not in_fp8:
        stored[product] = meant[product] = plain
        stored = {name: one for name, one in stored.items() if name != f"{product}_scale_inv"}
    found = list[np.ndarray]()
    for tensors, told in ((stored, config), (meant, None)):
        save_file(tensors, tmp_path / "checkpoint" / "model.safetensors")
        edit_config(tmp_path / "checkpoint", quantization_config=told)
        _, layer = export(tmp_path / "checkpoint", tmp_path / f"artifact-{len(found)}")
        found.append(np.load(layer.path / "golden.npz")["logits"])
    np.testing.assert_array_equal(found[0], found[1])
