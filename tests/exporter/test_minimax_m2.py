"""MiniMax M2: how its configurations read, and what of them is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.graphs.spec import ArchSpec
from tests.exporter.configs import read, respelled

# What is known of the published file: no hub is at hand.
M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
HALF: dict[str, Any] = {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}


def without(*keys: str) -> dict[str, Any]:
    """The published file, some keys left out."""
    return {key: one for key, one in M2.items() if key not in keys}


def test_the_published_file_is_understood_in_both_spellings() -> None:
    spec, experts = read(M2), read(M2).experts
    assert (spec.qk_norm, spec.whole_qk_norm, spec.head_size) == (True, True, 128)
    assert (spec.rope.rotary_dim, spec.rope.theta, spec.num_kv_heads) == (64, 5e6, 8)
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (256, 8, 1536)
    assert (experts.sigmoid, experts.corrected, experts.normalized) == (True, True, True)
    assert (experts.layers, experts.shared_size, experts.groups) == (None, None, None)
    assert read(respelled(M2)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    absent = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "num_local_experts")
    assert read(without(*absent, "rope_theta")) == read(M2)
    assert read(without("rotary_dim")).rope.rotary_dim == 128
    assert read({**without("rotary_dim"), "rope_parameters": HALF}) == read(M2)
    assert read({**M2, "rope_parameters": HALF}) == read(M2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_type_list": [1] * 61 + [0]}, "attn_type_list is"),
        ({"attn_type_list": [1] * 61}, "a 1 for each layer"),
        ({"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta is 3.5"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"shared_intermediate_size": 1536}, "shared_intermediate_size is 1536"),
        ({"use_qk_norm": False}, "use_qk_norm is False"),
        ({"use_routing_bias": False}, "use_routing_bias is False"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read({**M2, **changes})
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)


def test_what_contradicts_itself() -> None:
    with pytest.raises(CheckpointError, match=r"rotary_dim is 32, .* 64 of 128 channels"):
        read({**M2, "rotary_dim": 32, "rope_parameters": HALF})
    with pytest.raises(CheckpointError, match="rotary_dim 5 must be positive and even"):
        read({**M2, "rotary_dim": 5})
    with pytest.raises(CheckpointError, match="rotary_dim 0 must be positive"):
        read({**M2, "rotary_dim": 0})
    with pytest.raises(CheckpointError, match="rotary_dim 0 must be positive"):
        read({**M2, "head_dim": 0})
