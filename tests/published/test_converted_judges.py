"""Models that judge pairs of texts, or embed them, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from jinja2 import Environment
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from onnxport import LLM
from onnxport.exporter.export import export_model
from onnxport.exporter.gguf.reranker import pair_template
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.embedding_spec import EmbeddingSpec, Pooling
from onnxport.serving.prompts import TokensPrompt
from tests.exporter import checkpoints
from tests.exporter.test_embedding import behead, embed, states, write_modules
from tests.published.converting import convert
from tests.published.places import needs_llama_cpp
from tests.published.tokenizers import write_tokenizer

pytestmark = needs_llama_cpp

FP32 = ExportOptions(precision="fp32")
VOCAB = 264  # some more than there are tokens


def make(folder: Path, *, tied: bool) -> PreTrainedModel:
    config = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "max_position_embeddings": 1024}
    write_tokenizer(folder)
    return checkpoints.make(checkpoints.Case("qwen3", config), folder)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_reranker(tmp_path: Path, tied: bool) -> None:
    """Which the converter knows by its folder's name."""
    checkpoint = tmp_path / "Qwen3-Reranker-tiny"
    model = make(checkpoint, tied=tied)
    path = convert(checkpoint, tmp_path / "model.gguf")
    artifact = export_model(path, tmp_path / "artifact", FP32)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    no, yes = tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")
    with LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=1024) as llm:
        [given] = llm.classify(TokensPrompt(prompt_token_ids=checkpoints.tokens().tolist()))
        [scored] = llm.score("What is {query}?", 'A "set" of\tbytes: é 😀\\n')
    logits = checkpoints.logits(model, checkpoints.tokens())[-1]
    assert given.outputs.label == "yes"
    assert given.outputs.probs == pytest.approx([judged(logits, no, yes)], abs=1e-4)
    fields = gguf.GGUFReader(path).fields
    text = fields["tokenizer.chat_template.rerank"].contents()
    text = text.replace("{document}", 'A "set" of\tbytes: é 😀\\n').replace(
        "{query}", "What is {query}?"
    )
    ids = tokenizer.encode(text).ids
    assert list(scored.prompt_token_ids) == ids
    logits = checkpoints.logits(model, np.array(ids))[-1]
    assert scored.outputs.score == pytest.approx(judged(logits, no, yes), abs=1e-4)


def judged(logits: NDArray[np.float32], no: int | None, yes: int | None) -> float:
    assert no is not None
    assert yes is not None
    return float(1 / (1 + np.exp(logits[no] - logits[yes])))


def test_texts_of_pairs_are_literal() -> None:
    """What stands in them is no Jinja."""
    text = "{{ a }} \"b\"\n'c' {% d %} {query}{query} \\ {other} \u00e9\U0001f600 {document}"
    messages = [{"role": "query", "content": "{q}"}, {"role": "document", "content": "{query}"}]
    found = Environment().from_string(pair_template(text)).render(messages=messages)
    assert found == text.replace("{query}", "{q}").replace("{document}", "{query}")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("lasttoken", "last"), pytest.param("mean_tokens", "mean", marks=pytest.mark.slow)],
)
def test_an_embedding_model(tmp_path: Path, pooling: str, expected: Pooling) -> None:
    """As Qwen3-Embedding is published: without the prefix of names, and the class unchanged."""
    make(tmp_path / "checkpoint", tied=True)
    behead(tmp_path / "checkpoint", None)
    write_modules(tmp_path / "checkpoint", {f"pooling_mode_{pooling}": True})
    path = convert(tmp_path / "checkpoint", tmp_path / "model.gguf")
    artifact = export_model(path, tmp_path / "artifact", FP32)
    assert Artifact.read(artifact).manifest.embedding == EmbeddingSpec(pooling=expected)
    ids = checkpoints.tokens().tolist()
    rows = states(tmp_path / "checkpoint", ids)
    want = rows[-1] if expected == "last" else rows.mean(axis=0)
    np.testing.assert_allclose(embed(artifact, ids), want / np.linalg.norm(want), atol=1e-5)
