"""Ministral 3: what its configuration says, and the context within which it is what it was."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints
from tests.exporter.configs import read
from tests.exporter.run_graphs import Graph

# What is known of published files, such as that of the 8B: no hub is at hand.
ROPE: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
TEXT: dict[str, Any] = {
    "model_type": "ministral3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": ROPE,
    "sliding_window": None,
    "vocab_size": 131072,
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": TEXT,
    "vision_config": {"model_type": "pixtral"},
    "vision_feature_layer": -1,
}


def test_a_published_file(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec = read(PUBLISHED)
    assert (spec.family, spec.num_layers, spec.head_size) == ("ministral3", 34, 128)
    assert (spec.rope.type, spec.rope.theta, spec.rope.factor) == ("yarn", 1e6, 16.0)
    assert spec.rope.attention_factor == 1.0
    assert spec.context_length == 16384
    assert "the context is 16384 tokens, not 262144" in caplog.text


def with_rope(**values: Any) -> dict[str, Any]:
    rope = {key: value for key, value in {**ROPE, **values}.items() if value is not None}
    return {**PUBLISHED, "text_config": {**TEXT, "rope_parameters": rope}}


def test_without_growing_queries_the_context_is_whole() -> None:
    assert read(with_rope(llama_4_scaling_beta=0)).context_length == 262144


@pytest.mark.parametrize("name", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_a_number_that_is_missing(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}' is None; this model needs a number"):
        read(with_rope(**{name: None}))


def test_the_context_ends_where_queries_grow(tmp_path: Path) -> None:
    case = checkpoints.CASES["ministral3-text"]
    model = checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1, context_length=65)
    with pytest.raises(UnsupportedModelError, match="Choose one from 1 to 64"):
        export_model(tmp_path / "checkpoint", tmp_path / "longer", options)
    options = ExportOptions(precision="fp32", threads=1)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    assert artifact.manifest.model.context_length == 64
    token_ids = checkpoints.tokens(count=64)
    found = Graph(artifact, "decomposed").logits(token_ids)
    np.testing.assert_allclose(found, checkpoints.logits(model, token_ids), atol=1e-4)
