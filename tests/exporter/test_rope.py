"""RoPE tables equal transformers', type by type; partial rotation equals Phi-3's code."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from onnxport.errors import CheckpointError, OnnxportError, UnsupportedModelError
from onnxport.exporter import config, rope
from onnxport.exporter.config import Config
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.ropeconfig import read_rope
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.rope_spec import RopeSpec
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph, Kind

HEAD_SIZE = 64
CONTEXT = 4096
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 20.0,
        "beta_slow": 3.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.5,
        "partial_rotary_factor": 0.5,
    },
    {"rope_type": "linear", "factor": 1.0, "partial_rotary_factor": 0.25},
]


def config_of(parameters: dict[str, Any], theta: float = 10_000.0) -> Config:
    values = {"max_position_embeddings": CONTEXT, "rope_theta": theta, "rope_scaling": parameters}
    return Config(values, Path("config.json"))


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: p["rope_type"])
def test_tables_equal_transformers(parameters: dict[str, Any], theta: float) -> None:
    spec, context_length = read_rope(config_of(parameters, theta), HEAD_SIZE, None)
    assert context_length == CONTEXT
    peer = LlamaConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](peer, torch.device("cpu"))
    angles = torch.arange(CONTEXT).float()[:, None] * frequencies
    cos, sin = rope.tables(spec, CONTEXT)
    np.testing.assert_allclose(cos, (angles.cos() * factor).numpy(), atol=1e-3)  # at 4,096 radians
    np.testing.assert_allclose(sin, (angles.sin() * factor).numpy(), atol=1e-3)
    np.testing.assert_allclose(cos[:64], (angles.cos() * factor).numpy()[:64], atol=2e-5)
    found = rope.inverse_frequencies(spec, CONTEXT)
    np.testing.assert_allclose(found, frequencies.numpy(), rtol=2e-6)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
def test_frequencies_have_transformers_bits(theta: float) -> None:
    """But for few: at 100,000 positions a last bit more or less is a hundredth of a cosine."""
    spec, _ = read_rope(config_of({}, theta), 128, None)
    exponents = torch.arange(0, 128, 2, dtype=torch.int64).float() / 128
    wanted = (1.0 / theta**exponents).numpy()
    found = rope.inverse_frequencies(spec, CONTEXT).astype(np.float32)
    assert (found == wanted).mean() >= 0.95
    np.testing.assert_array_max_ulp(found, wanted, 1)


def test_default_rotates_by_powers_of_theta() -> None:
    spec, _ = read_rope(config_of({}), HEAD_SIZE, None)
    assert (spec.type, spec.rotary_dim, spec.attention_factor) == ("default", HEAD_SIZE, 1.0)
    cos, sin = rope.tables(spec, 3)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (3, HEAD_SIZE // 2)
    np.testing.assert_allclose(sin[2, :2], np.sin([2, 2 * 10_000 ** (-2 / HEAD_SIZE)]), rtol=1e-6)


@pytest.mark.parametrize("length", [CONTEXT // 2, CONTEXT])
def test_dynamic_is_default_up_to_the_original_length(length: int) -> None:
    dynamic, context_length = read_rope(config_of(PARAMETERS[1]), HEAD_SIZE, length)
    default, _ = read_rope(config_of({}), HEAD_SIZE, None)
    assert context_length == length
    np.testing.assert_array_equal(
        rope.inverse_frequencies(dynamic, length), rope.inverse_frequencies(default, length)
    )


def test_dynamic_beyond_is_transformers_at_that_length() -> None:
    parameters = PARAMETERS[1]
    spec, context_length = read_rope(config_of(parameters), HEAD_SIZE, 3 * CONTEXT)
    peer = LlamaConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 10_000.0, **parameters},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](peer, None, seq_len=3 * CONTEXT)
    found = rope.inverse_frequencies(spec, context_length)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6)


def test_yarn_may_be_given_a_factor_of_its_magnitude(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has the one that leaves cos and sin as they are."""
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    given = config_of({**parameters, "attn_factor": 0.8782488562869419})
    with caplog.at_level(logging.WARNING):
        spec, _ = read_rope(given, HEAD_SIZE, None)
    assert spec.attention_factor == pytest.approx(1.0)
    assert "transformers leaves it out" in caplog.text
    both = config_of({**parameters, "attn_factor": 0.9, "attention_factor": 1.0})
    with pytest.raises(CheckpointError, match="are both there"):
        read_rope(both, HEAD_SIZE, None)


@pytest.mark.parametrize("context", [1024, CONTEXT])
@pytest.mark.parametrize("given", [{}, {"factor": 2.0}, {"attention_factor": 1.25}])
@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_is_that_of_the_context(context: int, given: dict[str, Any], name: str) -> None:
    """Up to the original length with the short factors, beyond it with the long ones."""
    rng = np.random.default_rng(0)
    parameters = {
        "short_factor": (1 + rng.random(HEAD_SIZE // 4)).tolist(),
        "long_factor": (1 + 40 * rng.random(HEAD_SIZE // 4)).tolist(),
        "partial_rotary_factor": 0.5,
        **given,
    }
    values = {
        "max_position_embeddings": CONTEXT,
        "original_max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "rope_scaling": {"type": name, **parameters},
    }
    spec, found = read_rope(Config(values, Path("config.json")), HEAD_SIZE, context)
    assert found == context
    peer = Phi3Config(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        original_max_position_embeddings=1024,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](peer, None, seq_len=context)
    frequencies_found = rope.inverse_frequencies(spec, context).astype(np.float32)
    np.testing.assert_array_max_ulp(frequencies_found, frequencies.numpy(), 2)
    assert spec.attention_factor == pytest.approx(factor)
    assert RopeSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"short_factor": None}, "short_factor"),
        ({"short_factor": [1.0]}, "one for each"),
        ({"short_factor": [0.0] * (HEAD_SIZE // 2)}, "out of range"),
        ({"short_factor": ["1"] * (HEAD_SIZE // 2)}, "not a number"),
        ({"original_max_position_embeddings": None}, "lacks original"),
        ({"short_mscale": 1.2}, "not understood"),
    ],
)
def test_longrope_that_is_not_whole(changes: dict[str, Any], reason: str) -> None:
    parameters = {
        "type": "longrope",
        "short_factor": [1.0] * (HEAD_SIZE // 2),
        "long_factor": [2.0] * (HEAD_SIZE // 2),
        "original_max_position_embeddings": 1024,
        **changes,
    }
    with pytest.raises(OnnxportError, match=reason):
        read_rope(config_of(parameters), HEAD_SIZE, 1024)


def test_yarn_may_be_as_long_as_its_factor_says() -> None:
    config = config_of({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT})
    assert read_rope(config, HEAD_SIZE, 4 * CONTEXT)[1] == 4 * CONTEXT
    with pytest.raises(UnsupportedModelError, match=f"made for {4 * CONTEXT}"):
        read_rope(config, HEAD_SIZE, 4 * CONTEXT + 1)


@pytest.mark.parametrize("length", [0, -1, CONTEXT + 1])
def test_other_types_refuse_a_longer_context(length: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"Choose one from 1 to {CONTEXT}"):
        read_rope(config_of({}), HEAD_SIZE, length)


@pytest.mark.parametrize("kind", ["gqa", "decomposed"])
@pytest.mark.parametrize("factor", [0.25, 0.5])
def test_partial_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, kind: Kind
) -> None:
    # transformers' Llama cannot rotate in part, Phi-3's rotation can
    monkeypatch.setattr(config, "PARTIAL_ROTARY", frozenset({"llama"}))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_phi3.apply_rotary_pos_emb)
    parameters = {
        "rope_type": "linear",
        "factor": 1.0,
        "rope_theta": 100.0,
        "partial_rotary_factor": factor,
    }
    case = checkpoints.Case("llama", {"head_dim": 64, "rope_parameters": parameters})
    model = checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    artifact = Artifact.read(path)
    assert artifact.manifest.model.rope.rotary_dim == 64 * factor
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(model, token_ids)
    np.testing.assert_allclose(Graph(artifact, kind).logits(token_ids), expected, atol=1e-4)
    with np.load(path / "golden.npz") as golden:
        rows = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], rows, atol=1e-4)
