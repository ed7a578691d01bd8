"""Gemma 4 in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.exporter.checkpoints import VOCAB
from tests.published import converting
from tests.published.converted import Model, check
from tests.published.places import needs_llama_cpp
from tests.tiers import every

pytestmark = needs_llama_cpp

MODELS: Mapping[str, Model] = {
    "gemma3n": Model("gemma3n", {"vocab_size_per_layer_input": VOCAB}),
    "gemma4": Model("gemma4"),
    "gemma4-shared": Model("gemma4-shared"),
    "gemma4-windows": Model("gemma4-windows"),
    "gemma4-moe": Model("gemma4-moe"),
    "gemma4-moe-all": Model("gemma4-moe-all"),
    "gemma4-images": Model("gemma4-images", {"global_head_dim": 32}),
}


@pytest.mark.parametrize("name", every(3, MODELS))
def test_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # The converter counts the tokens of a file of which nothing else is needed.
    tokenizers = converting._tokenizers
    monkeypatch.setattr(converting, "_tokenizers", lambda *, kept: tokenizers(kept=False))
    (tmp_path / "checkpoint").mkdir()
    words = {f"word{number}": number for number in range(VOCAB)}
    counted = {"model": {"vocab": words}, "added_tokens": []}
    (tmp_path / "checkpoint" / "tokenizer.json").write_text(json.dumps(counted))
    check(MODELS[name], tmp_path)
