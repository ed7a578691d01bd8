"""Command R and R7B: how their configurations read, and what of them is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.graphs.spec import ArchSpec
from tests.exporter.configs import read, respelled

FULL, SLIDING = "full_attention", "sliding_attention"

# What is known of published files: no hub is at hand.
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "use_cache": True,
    "vocab_size": 256000,
}
COMMAND_R: dict[str, Any] = {
    **COMMON,
    "architectures": ["CohereForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "model_type": "cohere",
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "rope_theta": 8000000.0,
    "use_qk_norm": False,
}
R7B: dict[str, Any] = {
    **COMMON,
    "architectures": ["Cohere2ForCausalLM"],
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A file, some keys left out."""
    return {key: one for key, one in values.items() if key not in keys}


@pytest.mark.parametrize("values", [COMMAND_R, R7B], ids=["command-r", "r7b"])
def test_published_files_are_understood_in_both_spellings(values: dict[str, Any]) -> None:
    spec = read(values)
    assert (spec.layer_norms, spec.parallel_layers, spec.tie_word_embeddings) == (True, True, True)
    assert (spec.rms_norm_eps, spec.logits_scale) == (1e-5, values["logit_scale"])
    assert (spec.rope.interleaved, spec.rope.theta) == (True, values["rope_theta"])
    assert (spec.rope.rotary_dim, spec.head_size) == (128, 128)
    assert not any((spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm))
    assert read(respelled(values)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_layers_that_see_all_rotate_nothing() -> None:
    spec = read(R7B)
    assert spec.sliding_window == (4096, 4096, 4096, None) * 8
    assert spec.rotated_layers == (True, True, True, False) * 8
    assert read(without(R7B, "sliding_window", "sliding_window_pattern", "layer_switch")) == spec
    listed = {"layer_types": [FULL] * 31 + [SLIDING]}
    assert read({**R7B, **listed}).rotated_layers == (*[False] * 31, True)
    assert read({**R7B, "layer_types": [SLIDING] * 32}).rotated_layers is None
    assert read(COMMAND_R).rotated_layers is None
    assert set(read(COMMAND_R).sliding_window) == {None}


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    absent = without(COMMAND_R, "logit_scale", "num_key_value_heads", "rope_theta")
    assert read({**absent, "rope_theta": 8e6}) == read(COMMAND_R)
    assert read(absent).rope.theta == 500_000
    assert read(without(R7B, "rope_theta")).rope.theta == 10_000
    biased = read({**R7B, "attention_bias": True, "tie_word_embeddings": False})
    assert (biased.qkv_bias, biased.o_bias, biased.tie_word_embeddings) == (True, True, False)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**R7B, "use_qk_norm": True}, "use_qk_norm is True"),
        ({**COMMAND_R, "sliding_window": 4096}, "sliding_window"),
        ({**COMMAND_R, "partial_rotary_factor": 0.5}, "64 of 128 channels"),
        ({**R7B, "head_dim": 64}, "head_dim is 64"),
        ({**R7B, "hidden_act": "gelu"}, "hidden_act"),
        ({**R7B, "layer_types": [SLIDING] * 31}, "layer_types"),
        ({**R7B, "order_of_interleaved_layers": "global_attn_first"}, "global_attn_first"),
        ({**R7B, "position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({**R7B, "rotary_pct": 0.5}, "rotary_pct is 0.5"),
        ({**R7B, "sliding_window": None}, "sliding_window"),
        ({**R7B, "use_embedding_sharing": False}, "use_embedding_sharing is False"),
        ({**R7B, "use_gated_activation": False}, "use_gated_activation is False"),
        ({**R7B, "use_parallel_block": False}, "use_parallel_block is False"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_would_change_the_result_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(values)
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (without(R7B, "layer_norm_eps"), "lacks the key 'layer_norm_eps'"),
        ({**R7B, "layer_norm_eps": 0.0}, "layer_norm_eps is 0.0; it must be above 0"),
        ({**R7B, "logit_scale": 0.0}, "logit_scale is 0.0"),
        ({**R7B, "logit_scale": float("inf")}, "logit_scale is inf"),
        ({**R7B, "layer_switch": 2}, "sliding_window_pattern is 4"),
        ({**R7B, "sliding_window_pattern": 0, "layer_switch": 0}, "it must be above 0"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_makes_no_sense(values: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(values)


@pytest.mark.parametrize("field", ["layer_norms", "parallel_layers"])
@pytest.mark.parametrize("other", ["raw_inputs", "output_norms"])
def test_what_does_not_go_with_them(field: str, other: str) -> None:
    spec = replace(read(R7B), layer_norms=None, parallel_layers=None)
    with pytest.raises(ValueError, match=f"{field} does not go with {other}"):
        replace(spec, **{field: True, other: True})


def test_command_r_plus_has_a_norm_for_each_head() -> None:
    spec = read({**COMMAND_R, "use_qk_norm": True})
    assert (spec.qk_norm, spec.apart_qk_norm) == (True, True)
    assert replace(spec, qk_norm=False, apart_qk_norm=None) == read(COMMAND_R)


def test_heads_with_a_layer_norm_have_each_its_own() -> None:
    spec = read(R7B)
    with pytest.raises(ValueError, match="layer_norms does not go with qk_norm"):
        replace(spec, qk_norm=True)
    with pytest.raises(ValueError, match="qk_norm is False"):
        replace(spec, apart_qk_norm=True)
    with pytest.raises(ValueError, match="whole_qk_norm is True"):
        replace(spec, layer_norms=None, qk_norm=True, whole_qk_norm=True, apart_qk_norm=True)
