"""Ministral 3: what its configuration says, and queries that grow with their positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CheckpointError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.rope import growth_factors
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.spec import ArchSpec
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


def test_a_published_file() -> None:
    spec = read(PUBLISHED)
    assert (spec.family, spec.num_layers, spec.head_size) == ("ministral3", 34, 128)
    assert (spec.rope.type, spec.rope.theta, spec.rope.factor) == ("yarn", 1e6, 16.0)
    assert spec.rope.attention_factor == 1.0
    assert spec.context_length == 262144
    assert spec.query_growth == GrowthSpec(
        strength=0.1, interval=16384, offset=0, without_rope=False
    )
    assert all(map(spec.grows, range(34)))
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def with_rope(**values: Any) -> dict[str, Any]:
    rope = {key: value for key, value in {**ROPE, **values}.items() if value is not None}
    return {**PUBLISHED, "text_config": {**TEXT, "rope_parameters": rope}}


def test_without_growing_queries() -> None:
    spec = read(with_rope(llama_4_scaling_beta=0))
    assert (spec.context_length, spec.query_growth) == (262144, None)
    assert not spec.counts_positions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama_4_scaling_beta": -0.1}, "strength of growing queries must be above 0, is -0.1"),
        ({"original_max_position_embeddings": 0}, "interval of growing queries must be positive"),
    ],
)
def test_a_number_that_is_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(with_rope(**changes))


@pytest.mark.parametrize(("offset", "first"), [(0, 16), (1, 15)])
def test_where_factors_change(offset: int, first: int) -> None:
    growth = GrowthSpec(strength=0.5, interval=16, offset=offset, without_rope=False)
    found = growth_factors(growth, np.arange(64))
    changes = np.flatnonzero(np.diff(found)) + 1
    assert changes.tolist() == list(range(first, 64, 16))
    own = 1 + 0.5 * np.log1p(np.arange(1, 4))
    np.testing.assert_allclose(found[changes[:3]], own, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_a_number_that_is_missing(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}' is None; this model needs a number"):
        read(with_rope(**{name: None}))


def test_queries_grow_in_steps_of_any_size(tmp_path: Path) -> None:
    """Sequences of other lengths beside each other, across several changes of the factor."""
    case = checkpoints.CASES["ministral3-text"]
    model = checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    assert artifact.manifest.model.context_length == 128
    token_ids = checkpoints.tokens(count=128)
    expected = checkpoints.logits(model, token_ids)
    sequence = Graph(artifact, "decomposed").sequence()
    parts = np.split(token_ids, [9, 10, 11, 40, 99])
    found = np.concatenate([sequence.step(part) for part in parts])
    np.testing.assert_allclose(found, expected, atol=1e-4)
