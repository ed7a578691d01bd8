"""Artifacts of GGUF files are those of the checkpoints that these were made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from tests.exporter import checkpoints, ggufs

FILES = ("model.onnx", "model_gqa.onnx", "model.onnx.data", "golden.npz")
SAME = (
    *("gemma2", "gemma3", "gemma3-linear", "granite", "granitemoe", "granitemoeshared", "llama"),
    *("llama-mha", "llama-mqa-biases", "llama-tied", "llama-one-layer", "llama-linear"),
    *("llama-yarn", "mistral", "mixtral", "olmo2", "olmoe", "phi3", "phi3-longrope"),
    *("phi3-window", "qwen2", "qwen2-moe", "qwen2-ragged", "qwen3", "qwen3-biases", "qwen3-moe"),
    "smollm3",
)
# What GGUF files do not say, and llama.cpp knows of the models that were published.
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
    "gemma3-linear": {
        "query_pre_attn_scalar": 16,
        "attention_bias": False,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
    },
    "mixtral": {"sliding_window": None},
    "qwen3-moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
}


def case(name: str) -> checkpoints.Case:
    """A case of the parity tests, as a GGUF file can have it."""
    found = checkpoints.CASES[name]
    return replace(found, config={**found.config, **KNOWN.get(name, {})})


@pytest.mark.parametrize("name", SAME)
def test_the_artifact_is_that_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoints.make(case(name), tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf")
    options = ExportOptions(precision="fp32", threads=2, context_length=case(name).context_length)
    expected = export_model(tmp_path / "checkpoint", tmp_path / "expected", options)
    found = export_model(path, tmp_path / "found", options)
    for file in FILES:
        assert (found / file).read_bytes() == (expected / file).read_bytes()
