"""Exports that fail say why and leave nothing; those that succeed appear whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from onnxport.errors import (
    CheckpointError,
    ExportError,
    OnnxportError,
    UnsupportedModelError,
)
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions, Progress
from onnxport.exporter.source import special_tokens
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    checkpoints.make(checkpoints.CASES["llama"], folder)
    return folder


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "checkpoint"))


def fails(checkpoint: Path, **options: Any) -> OnnxportError:
    """Export; the error, after checking that it is one paragraph and that nothing is left."""
    before = set(checkpoint.parent.iterdir())
    with pytest.raises(OnnxportError) as caught:
        export_model(checkpoint, checkpoint.parent / "artifact", ExportOptions(**options))
    assert "\n" not in str(caught.value)
    assert set(checkpoint.parent.iterdir()) == before
    return caught.value


def edit_weights(checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, checkpoint / WEIGHTS)


def test_an_unsupported_architecture(checkpoint: Path) -> None:
    checkpoints.edit_config(checkpoint, architectures=["BloomForCausalLM"])
    error = fails(checkpoint)
    assert isinstance(error, UnsupportedModelError)
    assert "LlamaForCausalLM" in str(error)


def test_what_is_not_supported_goes_before_how_it_is_quantized(checkpoint: Path) -> None:
    """Other weights would not help."""
    odd = {"quant_method": "odd"}
    checkpoints.edit_config(checkpoint, quantization_config=odd)
    assert "'odd'" in str(fails(checkpoint))
    checkpoints.edit_config(checkpoint, architectures=["BloomForCausalLM"])
    assert "names BloomForCausalLM, which is not supported" in str(fails(checkpoint))
    checkpoints.edit_config(checkpoint, draft_vocab_size=8)
    assert "is a draft head" in str(fails(checkpoint))


def test_a_key_that_is_not_understood(checkpoint: Path) -> None:
    checkpoints.edit_config(checkpoint, residual_multiplier=0.3)
    error = fails(checkpoint)
    assert isinstance(error, UnsupportedModelError)
    assert "residual_multiplier = 0.3" in str(error)


def test_missing_tensors(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: (tensors.pop(Q_PROJ), tensors.pop("lm_head.weight")))
    error = fails(checkpoint)
    assert isinstance(error, CheckpointError)
    assert Q_PROJ in str(error)
    assert "lm_head.weight" in str(error)


def test_a_tensor_of_another_shape(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(63, 64)}))
    assert f"{Q_PROJ} is [63, 64], expected [64, 64]" in str(fails(checkpoint))


def test_a_tensor_that_nothing_uses(checkpoint: Path) -> None:
    name = Q_PROJ.replace("weight", "bias")
    edit_weights(checkpoint, lambda tensors: tensors.update({name: torch.zeros(64)}))
    error = fails(checkpoint)
    assert "does not use" in str(error)
    assert name in str(error)


def test_rope_buffers_are_ignored(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(checkpoint, lambda tensors: tensors.update({name: torch.zeros(8)}))
    export_model(checkpoint, checkpoint.parent / "artifact")


def test_a_truncated_shard(checkpoint: Path) -> None:
    path = checkpoint / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    error = fails(checkpoint)
    assert str(path) in str(error)
    assert "model.norm.weight" in str(error)


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16", "fp32"])
@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "model.embed_tokens.weight"])
def test_values_that_are_not_finite(checkpoint: Path, precision: str, name: str) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[5] = torch.nan

    edit_weights(checkpoint, spoil)
    error = fails(checkpoint, precision=precision)
    assert isinstance(error, CheckpointError)
    assert f"the tensor {name} holds values that are not finite" in str(error)


@pytest.mark.parametrize(("precision", "value"), [("fp16", 1e5), ("int4", 1e6), ("int8", 1e7)])
def test_values_beyond_float16(checkpoint: Path, precision: str, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_PROJ][3, 4] = value

    edit_weights(checkpoint, spoil)
    error = fails(checkpoint, precision=precision)
    assert f"the tensor {Q_PROJ} holds {value:.4g}, which is beyond" in str(error)
    export_model(checkpoint, checkpoint.parent / "artifact", ExportOptions(precision="fp32"))


def test_a_tied_head_may_be_stored_twice_but_not_differ(checkpoint: Path) -> None:
    checkpoints.edit_config(checkpoint, tie_word_embeddings=True)
    assert "config.json ties the head to the embedding" in str(fails(checkpoint))

    def duplicate(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_weights(checkpoint, duplicate)
    export_model(checkpoint, checkpoint.parent / "artifact")


def test_a_tied_head_may_be_stored_in_another_type(checkpoint: Path) -> None:
    checkpoints.edit_config(checkpoint, tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"

    def duplicate(tensors: dict[str, torch.Tensor]) -> None:
        tensors[embedding] = tensors[embedding].to(torch.bfloat16)
        tensors["lm_head.weight"] = tensors[embedding].to(torch.float32)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][-1, -1] += 1e-5

    edit_weights(checkpoint, duplicate)
    export_model(checkpoint, checkpoint.parent / "same")
    edit_weights(checkpoint, change)
    error = fails(checkpoint)
    assert "lm_head.weight (F32) does not hold the numbers of" in str(error)
    assert f"{embedding} (BF16)" in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int3"}, "the precision 'int3' is not one of int4, int8, fp16, fp32"),
        ({"group_size": 48}, "the group size 48 is not one of 32, 64, 128"),
        ({"head_precision": "bf16"}, "the head precision 'bf16' is not one of same, int4"),
        ({"precision": "fp32", "head_precision": "int8"}, "fp32 is all or nothing"),
        ({"precision": "int4", "head_precision": "fp32"}, "fp32 is all or nothing"),
        ({"context_length": 1000}, "Choose one from 1 to 128"),
    ],
)
def test_options_that_are_not_allowed(
    checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    assert message in str(fails(checkpoint, **options))


def test_a_full_disk(checkpoint: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
        "from onnxport.exporter.export import export_model;"
        "export_model(sys.argv[1], sys.argv[2])"
    )
    before = set(checkpoint.parent.iterdir())
    arguments = [sys.executable, "-B", "-c", code, str(checkpoint), str(checkpoint.parent / "out")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert "onnxport.errors.ExportError: cannot write the artifact" in result.stderr
    assert set(checkpoint.parent.iterdir()) == before


def test_too_little_space_is_seen_before_any_work(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(checkpoint)
    few = type(usage)(usage.total, usage.total - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: few)
    seen: list[Progress] = []
    with pytest.raises(ExportError, match="the artifact needs"):
        export_model(checkpoint, checkpoint.parent / "artifact", progress=seen.append)
    assert not seen


def test_the_destination_must_be_free(checkpoint: Path) -> None:
    destination = checkpoint.parent / "artifact"
    export_model(checkpoint, destination, ExportOptions(precision="int8"))
    with pytest.raises(ExportError, match="already exists"):
        export_model(checkpoint, destination)
    assert Artifact.read(destination).manifest.precision == "int8"
    export_model(checkpoint, destination, ExportOptions(overwrite=True))
    assert Artifact.read(destination).manifest.precision == "int4"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_export_leaves_nothing(
    checkpoint: Path, failure: type[BaseException]
) -> None:
    before = set(checkpoint.parent.iterdir())

    def interrupt(progress: Progress) -> None:
        if progress.done_bytes > progress.total_bytes / 2:
            raise failure

    with pytest.raises(failure):
        export_model(checkpoint, checkpoint.parent / "artifact", progress=interrupt)
    assert set(checkpoint.parent.iterdir()) == before


def test_progress_reaches_the_end(checkpoint: Path) -> None:
    seen: list[Progress] = []
    export_model(checkpoint, checkpoint.parent / "artifact", progress=seen.append)
    done = [step.done_bytes for step in seen]
    assert done == sorted(done)
    assert (
        done[-1]
        == seen[-1].total_bytes
        == 4 * sum(tensor.numel() for tensor in load_file(checkpoint / WEIGHTS).values())
    )


def test_exports_are_reproducible_whatever_the_threads(checkpoint: Path) -> None:
    files = []
    for threads in (1, 3):
        path = export_model(
            checkpoint, checkpoint.parent / f"artifact{threads}", ExportOptions(threads=threads)
        )
        files.append(Artifact.read(path).manifest.files)
    assert files[0] == files[1]  # checksums


def test_the_manifest_names_its_source_without_a_path(checkpoint: Path) -> None:
    path = export_model(checkpoint, checkpoint.parent / "artifact")
    manifest = Artifact.read(path).manifest
    assert (manifest.source.name, manifest.source.revision) == ("checkpoint", None)
    assert (manifest.precision, manifest.group_size, manifest.head_precision) == (
        "int4",
        128,
        "int8",
    )
    assert str(checkpoint.parent) not in (path / "manifest.json").read_text()


def test_tokenizer_files_come_along(checkpoint: Path) -> None:
    for name in ("chat_template.jinja", "README.md"):
        (checkpoint / name).write_text("{}")
    content = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str()
    (checkpoint / "tokenizer.json").write_text(content)
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    path = export_model(checkpoint, checkpoint.parent / "artifact")
    Artifact.read(path, verify="sha256")
    assert (path / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert (path / "tokenizer.json").read_text() == content
    assert (path / "chat_template.jinja").is_file()
    assert not (path / "README.md").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "[1]"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("special_tokens_map.json", "[]"),
    ],
)
def test_a_broken_tokenizer_is_refused_first(checkpoint: Path, name: str, content: str) -> None:
    (checkpoint / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        export_model(checkpoint, checkpoint.parent / "artifact")
    assert not (checkpoint.parent / "artifact").exists()


def test_special_tokens_come_from_the_generation_config(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(
        '{"eos_token_id": [7, 8], "pad_token_id": -1}'
    )
    path = export_model(checkpoint, checkpoint.parent / "artifact")
    manifest = Artifact.read(path).manifest
    assert (manifest.eos_token_ids, manifest.bos_token_id) == ((7, 8), 1)
    assert manifest.pad_token_id is None
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match="eos_token_id is 'x'"):
        export_model(checkpoint, checkpoint.parent / "other")


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"tokenizer_config.json": {"eos_token": "<e>"}}, (7, 8, 9)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<e>"}}}, (7, 8, 9)),
        ({"special_tokens_map.json": {"eos_token": "<e>"}}, (7, 8, 9)),
        (
            {
                "tokenizer_config.json": {
                    "eos_token": "<x>",
                    "added_tokens_decoder": {"11": {"content": "<x>"}, "12": {"content": "<y>"}},
                }
            },
            (7, 8, 11),
        ),
        ({"tokenizer_config.json": {"eos_token": "h"}}, (7, 8)),  # which is token 7
        ({"tokenizer_config.json": {"eos_token": "<unknown>"}}, (7, 8)),
        ({"tokenizer_config.json": {"eos_token": None}}, (7, 8)),
        ({}, (7, 8)),
    ],
)
def test_the_tokenizers_own_end_is_one_too(
    tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]
) -> None:
    """A chat model that was trained from a base may have changed its tokenizer alone."""
    vocab = {text: number for number, text in enumerate("abcdefghi")}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<e>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "config.json").write_text("{}")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert special_tokens(tmp_path, 12).eos == ends
    assert special_tokens(tmp_path, 9).eos == (7, 8)  # the model has no other tokens


def test_a_shorter_context_shortens_the_tables(checkpoint: Path) -> None:
    path = export_model(
        checkpoint, checkpoint.parent / "artifact", ExportOptions(context_length=20)
    )
    artifact = Artifact.read(path)
    assert artifact.manifest.model.context_length == 20
    graph = artifact.load_graph("paged")
    (cos,) = (t for t in graph.graph.initializer if t.name == "rope.cos")
    assert list(cos.dims) == [20, 8]
    with np.load(path / "golden.npz") as golden:
        assert len(golden["token_ids"]) == 20


def test_says_where_the_gqa_graph_will_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ONNX Runtime's operator rotates in sixteens; ours, which the paged graph has, does not."""
    for head_size in (16, 24):
        case = checkpoints.Case("llama", {"head_dim": head_size, "num_hidden_layers": 1})
        checkpoints.make(case, tmp_path / "checkpoint")
        caplog.clear()
        path = export_model(
            tmp_path / "checkpoint",
            tmp_path / str(head_size),
            ExportOptions(precision="fp32", threads=1),
        )
        graph = Graph(Artifact.read(path), "gqa")
        if head_size == 16:
            assert "GroupQueryAttention" not in caplog.text
            graph.logits(checkpoints.tokens())
        else:
            assert "model_gqa.onnx, and so onnxruntime-genai, will not run" in caplog.text
            with pytest.raises(InvalidArgument, match="multiple of 16"):
                graph.logits(checkpoints.tokens())


def test_needs_neither_torch_nor_transformers(checkpoint: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'onnxruntime']));"
        "from onnxport.exporter.export import export_model;"
        "export_model(sys.argv[1], sys.argv[2])"
    )
    arguments = [sys.executable, "-c", code, str(checkpoint), str(checkpoint.parent / "artifact")]
    subprocess.run(arguments, check=True, env=dict(os.environ), timeout=120)
    Artifact.read(checkpoint.parent / "artifact", verify="sha256")


def test_options_are_plain_values() -> None:
    options = ExportOptions(precision="int8")
    assert replace(options, head_precision="same").head == options.head == "int8"
    assert ExportOptions().head == "int8"
    assert ExportOptions(head_precision="same").head == "int4"
    assert "secret" not in repr(ExportOptions(token="secret"))
