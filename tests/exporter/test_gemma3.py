"""Gemma 3: how its configurations read, and what of them is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Gemma3TextConfig

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read

FULL, SLIDING = "full_attention", "sliding_attention"

# What is known of published files: no hub is at hand. Both repeat `COMMON`.
COMMON: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-270m": {
        **COMMON,
        "_sliding_window_pattern": 6,
        "eos_token_id": 1,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 3,
        "num_hidden_layers": 18,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "use_bidirectional_attention": False,
    },
    "gemma-3-1b-it": {
        **COMMON,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
    },
}
SMALL: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "vocab_size": 100,
}


def small(**changes: Any) -> ArchSpec:
    return read(SMALL | changes)


def respelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes it again."""
    told = {key: value for key, value in values.items() if key != "architectures"}
    config = Gemma3TextConfig(**told)
    config.architectures = values["architectures"]
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    assert "rope_theta" not in written
    assert set(written["rope_parameters"]) == {FULL, SLIDING}
    return written


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood_in_both_spellings(name: str) -> None:
    spec = read(PUBLISHED[name])
    hidden = spec.hidden_size
    assert spec.sliding_window[:7] == (512, 512, 512, 512, 512, None, 512)
    assert (spec.head_size, spec.num_kv_heads, spec.scale) == (256, 1, 1 / 16)
    assert (spec.rope.theta, spec.rope_of(0).theta) == (1e6, 1e4)
    assert spec.rope_of(5) == spec.rope
    assert (spec.qk_norm, spec.output_norms, spec.tie_word_embeddings) == (True, True, True)
    assert not any((spec.qkv_bias, spec.o_bias, spec.mlp_bias))
    assert spec.inner_eps == 1e-6
    assert spec.rms_norm_eps == pytest.approx(1e-6 / hidden)
    assert spec.residual_scale == pytest.approx(hidden**-0.5)
    assert read(respelled(PUBLISHED[name])) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_larger_models_stretch_the_positions_of_layers_without_a_window() -> None:
    old = SMALL | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    spec = read(old)
    assert (spec.rope.type, spec.rope.factor, spec.rope.theta) == ("linear", 8.0, 1e6)
    assert (spec.rope_of(0).type, spec.rope_of(0).theta) == ("default", 1e4)
    assert read(respelled(old)) == spec
    both = old | {"rope_parameters": respelled(old)["rope_parameters"]}
    assert read(both) == spec


def test_what_is_absent_is_as_in_transformers() -> None:
    peer = Gemma3TextConfig(num_hidden_layers=7)
    absent = ("head_dim", "query_pre_attn_scalar", "sliding_window", "hidden_activation")
    spec = read({key: value for key, value in SMALL.items() if key not in absent})
    windows = {SLIDING: peer.sliding_window, FULL: None}
    assert spec.sliding_window == tuple(windows[kind] for kind in peer.layer_types)
    assert spec.head_size == peer.head_dim
    assert spec.scale == peer.query_pre_attn_scalar**-0.5
    for layer, kind in enumerate(peer.layer_types):
        assert spec.rope_of(layer).theta == peer.rope_parameters[kind]["rope_theta"]
    assert peer.tie_word_embeddings is spec.tie_word_embeddings is True


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window_pattern": 2}, (512, None, 512, None, 512, None, 512)),
        ({"sliding_window_pattern": 1}, (None,) * 7),
        ({"layer_types": [FULL] * 7, "sliding_window": None}, (None,) * 7),
        ({"layer_types": [FULL] + [SLIDING] * 6, "sliding_window": 3}, (None, *(3,) * 6)),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    spec = small(**changes)
    assert spec.sliding_window == windows
    assert (spec.local_rope is None) == (not any(windows))


def test_one_rotary_embedding_is_stored_once() -> None:
    spec = small(rope_local_base_freq=1_000_000.0)
    assert (spec.local_rope, len(spec.ropes)) == (None, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True},
        {"use_bidirectional_attention": "vision"},
        {"hidden_activation": "gelu"},
        {"hidden_act": "gelu_pytorch_tanh"},  # which transformers ignores
        {"layer_types": [FULL] * 6},
        {"layer_types": [FULL] * 6 + ["chunked_attention"]},
        {"layer_types": [FULL] * 6 + [{}]},
        {"sliding_window": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {FULL: {"rope_type": "default"}, "chunked_attention": {}}},
        {"rope_parameters": {FULL: 1e6}},
        {"rope_parameters": {SLIDING: {"rope_type": "yarn", "factor": 2.0}}},
        {"rope_parameters": {SLIDING: {"rope_type": "proportional"}}},
        {"rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5}}},
        {"rope_parameters": {FULL: {"partial_rotary_factor": 0.5}}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {FULL: {"rope_type": "linear", "factor": 2.0}}},
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}},
        },
        {"model_type": "gemma3"},  # the one with images
        {"mm_tokens_per_image": 256},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        small(**changes)
    assert "config.json" in str(caught.value)
    named = (next(iter(changes)), "RoPE", "partial_rotary_factor")
    assert any(name in str(caught.value) for name in named)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"query_pre_attn_scalar": math.inf}, "query_pre_attn_scalar is inf"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"_sliding_window_pattern": 4}, "_sliding_window_pattern 4"),
        ({"sliding_window": 0}, "positive or None"),
        ({"rope_local_base_freq": 0.0}, "out of range"),
        ({"final_logit_softcapping": "30"}, "expected a value of type float"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ],
)
def test_a_configuration_that_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="config") as caught:
        small(**changes)
    assert message in str(caught.value)


def test_the_root_of_the_width_goes_into_the_norms_of_outputs(tmp_path: Path) -> None:
    """And the embedding, which is the head too, stays as it is."""
    model = checkpoints.make(checkpoints.CASES["gemma3"], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    tensors = {
        one.name: artifact.read_tensor(one)
        for one in artifact.load_graph("paged").graph.initializer
    }
    given = {name: one.detach().numpy() for name, one in model.named_parameters()}
    np.testing.assert_array_equal(tensors["embedding.weight"], given["model.embed_tokens.weight"])
    for role, name, scale in (
        ("o_norm", "post_attention_layernorm", 1 / 8),
        ("down_norm", "post_feedforward_layernorm", 1 / 8),
        ("input_norm", "input_layernorm", 1),
        ("post_norm", "pre_feedforward_layernorm", 1),
        ("q_norm", "self_attn.q_norm", 1),
    ):
        expected = (1 + given[f"model.layers.1.{name}.weight"]) * scale
        np.testing.assert_allclose(tensors[f"layers.1.{role}.weight"], expected, rtol=1e-6)


def test_several_end_tokens_and_a_template_come_along(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["gemma3"], source)
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 106], "do_sample": True, "top_k": 64, "top_p": 0.95})
    )
    (source / "chat_template.jinja").write_text("{{ bos_token }}<start_of_turn>user\n")
    artifact = Artifact.read(export_model(source, tmp_path / "artifact"))
    assert artifact.manifest.eos_token_ids == (1, 106)
    assert (artifact.path / "chat_template.jinja").is_file()
    genai = json.loads((artifact.path / "genai_config.json").read_text())
    assert genai["model"]["type"] == "gemma3_text"
    assert genai["model"]["eos_token_id"] == [1, 106]
    assert (genai["search"]["top_k"], genai["search"]["top_p"]) == (64, 0.95)
