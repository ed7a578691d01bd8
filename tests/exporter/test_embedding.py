"""Checkpoints that are made to embed: what they say of it, and those without a head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from onnxport import LLM
from onnxport.errors import (
    ArtifactError,
    CapacityError,
    CheckpointError,
    OnnxportError,
    OptionError,
    RequestError,
    UnsupportedModelError,
)
from onnxport.exporter.embedding import gguf_pooling
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.serving.config import EngineConfig
from onnxport.serving.loading import choose_embedder
from onnxport.serving.pooling import Embedder
from onnxport.serving.prompts import TokensPrompt
from tests.exporter import checkpoints

WEIGHTS = "model.safetensors"
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    for family in ("llama", "qwen3"):  # the second one's head is tied
        checkpoints.make(checkpoints.CASES[family], folder / family)
    return {family: folder / family for family in ("llama", "qwen3")}


@pytest.fixture
def checkpoint(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["llama"], tmp_path / "checkpoint"))


def behead(folder: Path, architecture: str | None) -> None:
    """Write the weights as a model without its head is saved; None: with its class unchanged."""
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("lm_head.weight", None)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / WEIGHTS)
    if architecture is not None:
        checkpoints.edit_config(folder, architectures=[architecture])


def write_modules(
    folder: Path, pooling: dict[str, Any] | None = None, *kinds: str, place: str = "1_Pooling"
) -> None:
    """Write sentence-transformers' files."""
    kinds = kinds or ("Transformer", "Pooling", "Normalize")
    paths = ["", place, "2_Normalize"]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    if pooling is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def export(checkpoint: Path) -> Path:
    return export_model(checkpoint, checkpoint.parent / "artifact", ExportOptions(precision="fp32"))


def told(artifact: Path) -> EmbeddingSpec | None:
    return Artifact.read(artifact).manifest.embedding


def states(checkpoint: Path, ids: list[int]) -> Any:
    """What transformers' final norm makes of tokens."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy().astype(np.float64)


def embed(artifact: Path, ids: list[int], **options: Any) -> Any:
    with LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=256, **options) as llm:
        [output] = llm.embed(TokensPrompt(prompt_token_ids=ids))
    assert output.outputs.error is None
    return np.array(output.outputs.embedding)


@pytest.mark.parametrize(
    ("family", "architecture", "only"),
    [
        ("llama", "LlamaModel", True),
        ("qwen3", "Qwen3Model", False),
        ("qwen3", None, False),  # as Qwen3-Embedding is: Qwen3ForCausalLM, without the prefix
    ],
)
def test_a_model_that_was_saved_without_its_head(
    family: str, architecture: str | None, only: bool, made: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = Path(shutil.copytree(made[family], tmp_path / "checkpoint"))
    behead(checkpoint, architecture)
    artifact = export(checkpoint)
    expected = None if architecture is None else EmbeddingSpec(only=only)
    assert told(artifact) == expected
    ids = checkpoints.tokens(count=20).tolist()
    want = states(made[family], ids)[-1]
    found = embed(artifact, ids, embeddings=None if architecture else True)
    np.testing.assert_allclose(found, want / np.linalg.norm(want), rtol=1e-3, atol=1e-4)
    with LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=256, embeddings=True) as llm:
        prompt = TokensPrompt(prompt_token_ids=ids)
        if only:
            with pytest.raises(RequestError, match="embeds texts and generates none"):
                llm.generate(prompt)
        else:
            assert llm.generate(prompt)[0].outputs[0].token_ids
    if only:
        with pytest.raises(OptionError, match="use onnxport embed"):
            LLM(artifact, provider="cpu", embeddings=False)


def test_a_model_that_should_have_a_head_is_refused_without_it(checkpoint: Path) -> None:
    behead(checkpoint, None)
    with pytest.raises(CheckpointError, match=r"lacks 1 of .* lm_head.weight"):
        export(checkpoint)
    write_modules(checkpoint, LAST)
    assert told(export(checkpoint)) == EmbeddingSpec(pooling="last", normalized=True, only=True)


@pytest.mark.parametrize(
    ("pooling", "kinds", "expected"),
    [
        ({**LAST, "include_prompt": True, "word_embedding_dimension": 64}, (), ("last", True)),
        (LAST, ("Transformer", "Pooling"), ("last", False)),
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling"), ("mean", False)),
        ({"pooling_mode": "mean", "embedding_dimension": 64}, (), ("mean", True)),
        ({"pooling_mode": ["lasttoken"]}, (), ("last", True)),
    ],
)
def test_what_sentence_transformers_files_say(
    pooling: dict[str, Any], kinds: tuple[str, ...], expected: tuple[Any, bool], checkpoint: Path
) -> None:
    write_modules(checkpoint, pooling, *kinds)
    artifact = export(checkpoint)
    spec = EmbeddingSpec(pooling=expected[0], normalized=expected[1])
    assert told(artifact) == spec
    ids = checkpoints.tokens(count=20).tolist()
    want = states(checkpoint, ids)
    want = want[-1] if expected[0] == "last" else want.mean(axis=0)
    want = want / np.linalg.norm(want) if expected[1] else want
    scale = np.abs(want).max()
    np.testing.assert_allclose(embed(artifact, ids), want, rtol=1e-3, atol=2e-4 * scale)


@pytest.mark.parametrize(
    ("edit", "kind", "words"),
    [
        (lambda f: write_modules(f, {"pooling_mode_cls_token": True}), 0, "pooling is cls_token"),
        (
            lambda f: write_modules(f, {**LAST, "pooling_mode_max_tokens": True}),
            0,
            "lasttoken and max_tokens; supported is one of",
        ),
        (lambda f: write_modules(f, {"pooling_mode_lasttoken": False}), 0, "the pooling is none"),
        (lambda f: write_modules(f, {**LAST, "odd": 1}), 0, "the key 'odd'"),
        (
            lambda f: write_modules(f, LAST, "Transformer", "Pooling", "Dense"),
            0,
            "made by Transformer, Pooling, Dense",
        ),
        (lambda f: write_modules(f), 1, "is missing or empty"),
        (lambda f: write_modules(f, LAST, place="../1_Pooling"), 1, "which is none"),
        (lambda f: write_modules(f, {**LAST, "word_embedding_dimension": 5}), 1, "states 64"),
        (lambda f: (f / "modules.json").write_text("[1]"), 1, "not readable"),
        (lambda f: checkpoints.edit_config(f, matryoshka_dimensions=[]), 1, "whole numbers"),
        (
            lambda f: checkpoints.edit_config(f, matryoshka_dimensions=[32, 65]),
            1,
            r"is \[32, 65\], and vectors have 64 numbers",
        ),
        (lambda f: checkpoints.edit_config(f, is_causal=False), 0, "is_causal is False"),
        (
            lambda f: checkpoints.edit_config(f, use_bidirectional_attention="all"),
            0,
            "is 'all', so that tokens see those behind them",
        ),
        (
            lambda f: checkpoints.edit_config(f, architectures=["XLMRobertaModel"]),
            0,
            "names XLMRobertaModel, in which tokens see those behind them",
        ),
        (
            lambda f: checkpoints.edit_config(f, architectures=["LlamaBidirectionalModel"]),
            0,
            "causal attention",
        ),
        (
            lambda f: checkpoints.edit_config(f, architectures=["Qwen2Model"]),
            0,
            "names the architecture Qwen2Model and the model_type llama",
        ),
    ],
)
def test_what_is_not_supported_is_refused(
    edit: Edit, kind: int, words: str, checkpoint: Path
) -> None:
    edit(checkpoint)
    kinds: list[type[OnnxportError]] = [UnsupportedModelError, CheckpointError]
    with pytest.raises(kinds[kind], match=words):
        export(checkpoint)


def test_what_the_configuration_says_of_cuts(checkpoint: Path) -> None:
    checkpoints.edit_config(checkpoint, is_matryoshka=True, is_causal=True)
    assert told(export(checkpoint)) == EmbeddingSpec(matryoshka=True)
    shutil.rmtree(checkpoint.parent / "artifact")
    checkpoints.edit_config(checkpoint, is_matryoshka=None, matryoshka_dimensions=[16, 32])
    artifact = export(checkpoint)
    assert told(artifact) == EmbeddingSpec(matryoshka=True, dimensions=(16, 32))
    embedder = choose_embedder(Artifact.read(artifact), EngineConfig())
    assert embedder == Embedder(dimensions=(16, 32))


def test_a_model_that_generates_says_nothing(checkpoint: Path) -> None:
    artifact = Artifact.read(export(checkpoint))
    assert artifact.manifest.embedding is None
    assert '"embedding"' not in artifact.manifest.dumps()
    assert choose_embedder(artifact, EngineConfig()) is None
    assert choose_embedder(artifact, EngineConfig(embeddings=True)) == Embedder()
    assert choose_embedder(artifact, EngineConfig(pooling="mean")) == Embedder("mean")
    cut = EngineConfig(matryoshka_dimensions=(8,))
    assert choose_embedder(artifact, cut) == Embedder(dimensions=(8,))


def test_what_a_gguf_file_says() -> None:
    assert gguf_pooling(0, "key") is None
    assert gguf_pooling(1, "key") == EmbeddingSpec(pooling="mean")
    assert gguf_pooling(3, "key") == EmbeddingSpec(pooling="last")
    with pytest.raises(UnsupportedModelError, match="key is 2; supported are"):
        gguf_pooling(2, "key")


def write_prompts(folder: Path, length: dict[str, Any] | None = None, **values: Any) -> None:
    """Write sentence-transformers' files of prompts, and of how long texts may be."""
    (folder / "config_sentence_transformers.json").write_text(json.dumps(values))
    if length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(length))


def test_prompts_lengths_and_similarities_are_read(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen3-Embedding has them."""
    write_modules(checkpoint, LAST)
    length = {"max_seq_length": 60, "do_lower_case": False}
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    write_prompts(
        *(checkpoint, length),
        **{"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "dot"},
    )
    artifact = export(checkpoint)
    spec = EmbeddingSpec(
        pooling="last", normalized=True, similarity="dot", max_tokens=60, prompts=prompts
    )
    assert told(artifact) == spec
    embedder = choose_embedder(Artifact.read(artifact), EngineConfig())
    assert embedder is not None
    assert (embedder.similarity, embedder.max_tokens) == ("dot", 60)
    assert embedder.prompt("query") == "Instruct: find\nQuery:"
    assert embedder.prompt(None) == ""
    assert embedder.prompt_of("passage", "query") == "Instruct: find\nQuery:"
    ids = checkpoints.tokens(count=61).tolist()
    with (
        LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=256) as llm,
        pytest.raises(CapacityError, match="embeds 60 at most"),
    ):
        llm.embed(TokensPrompt(prompt_token_ids=ids))
    shutil.rmtree(artifact)
    # A length above the context's says nothing; a mean without the prompt is not supported.
    mean = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    write_modules(checkpoint, mean, "Transformer", "Pooling")
    write_prompts(checkpoint, {"max_seq_length": 4096}, prompts={"query": "q:"})
    assert told(export(checkpoint)) == EmbeddingSpec(pooling="mean", normalized=False)
    assert "the artifact has no prompts" in caplog.text
    shutil.rmtree(artifact)
    write_modules(checkpoint, {**mean, "include_prompt": True}, "Transformer", "Pooling")
    write_prompts(
        *(checkpoint, {"max_seq_length": None}),
        **{"prompts": {"query": "q:"}, "default_prompt_name": "query"},
    )
    assert told(export(checkpoint)) == EmbeddingSpec(
        pooling="mean", normalized=False, prompts={"query": "q:"}, default_prompt="query"
    )


@pytest.mark.parametrize(
    ("length", "values", "kind", "words"),
    [
        (None, {"prompts": {"a": 1}}, CheckpointError, "expected texts by name"),
        (None, {"prompts": ["a"]}, CheckpointError, "expected texts by name"),
        (
            *(None, {"prompts": {"a": "b"}, "default_prompt_name": "c"}),
            *(CheckpointError, "one of the names"),
        ),
        (None, {"similarity_fn_name": "jaccard"}, UnsupportedModelError, "'jaccard'; supported"),
        ({"max_seq_length": 0}, {}, CheckpointError, "max_seq_length is 0"),
        ({"max_seq_length": True}, {}, CheckpointError, "max_seq_length is True"),
        ({"do_lower_case": True}, {}, UnsupportedModelError, "do_lower_case is set"),
    ],
)
def test_prompts_that_cannot_be_are_refused(
    length: dict[str, Any] | None,
    values: dict[str, Any],
    kind: type[OnnxportError],
    words: str,
    checkpoint: Path,
) -> None:
    write_modules(checkpoint, LAST)
    write_prompts(checkpoint, length, **values)
    with pytest.raises(kind, match=words):
        export(checkpoint)


def test_a_manifest_tells_it_again() -> None:
    for spec in (
        EmbeddingSpec(prompts={"a": "b"}, default_prompt="a", similarity="dot", max_tokens=3),
        EmbeddingSpec(),
        EmbeddingSpec(pooling="mean", normalized=False, only=True),
        EmbeddingSpec(matryoshka=True, dimensions=(8, 16)),
    ):
        assert EmbeddingSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    good = EmbeddingSpec().to_json()
    for name, value in (
        ("pooling", "cls"),
        ("dimensions", [8]),
        ("dimensions", [True]),
        ("only", None),
        ("similarity", "jaccard"),
        ("max_tokens", 0),
        ("prompts", {"a": 1}),
        ("default_prompt", "a"),
    ):
        with pytest.raises(ArtifactError):
            EmbeddingSpec.from_json({**good, name: value})
    with pytest.raises(ArtifactError):
        EmbeddingSpec.from_json({**good, "matryoshka": True, "dimensions": []})
