"""AFMoE (Trinity): how its configurations read, and what of them is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.families.afmoe import FAMILY
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.spec import ArchSpec
from tests.exporter.configs import read, respelled

FULL, SLIDING = "full_attention", "sliding_attention"

# What is known of the published file: no hub is at hand.
TRINITY: dict[str, Any] = {
    "architectures": ["AfmoeForCausalLM"],
    "attention_dropout": 0.0,
    "global_attn_every_n_layers": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "layer_types": ([SLIDING] * 3 + [FULL]) * 8,
    "load_balance_coeff": 0.001,
    "max_position_embeddings": 131072,
    "model_type": "afmoe",
    "moe_intermediate_size": 1024,
    "mup_enabled": True,
    "n_group": 1,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_expert_groups": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_limited_groups": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "route_norm": True,
    "route_scale": 2.826,
    "score_func": "sigmoid",
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_mm": True,
    "vocab_size": 200192,
}


def without(*keys: str) -> dict[str, Any]:
    """The published file, some keys left out."""
    return {key: one for key, one in TRINITY.items() if key not in keys}


def test_the_published_file_is_understood_in_both_spellings() -> None:
    spec = read(TRINITY)
    assert (spec.qk_norm, spec.whole_qk_norm, spec.output_norms) == (True, None, True)
    assert (spec.attention_gate, spec.raw_inputs, spec.qkv_bias) == (True, None, False)
    assert spec.sliding_window == (2048, 2048, 2048, None) * 8
    assert spec.rotated_layers == (True, True, True, False) * 8
    assert (spec.head_size, spec.num_kv_heads, spec.rope.theta) == (128, 4, 10_000)
    assert read(respelled(TRINITY)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_scaled_embeddings_are_in_norms() -> None:
    spec, plain = read(TRINITY), read(without("mup_enabled"))
    assert (spec.stream_scale, spec.residual_scale) == (math.sqrt(2048), 1 / math.sqrt(2048))
    assert (spec.rms_norm_eps, spec.inner_eps) == (1e-5 / 2048, 1e-5)
    assert (plain.stream_scale, plain.residual_scale, plain.inner_norm_eps) == (None, None, None)
    assert plain.rms_norm_eps == 1e-5


def test_which_layers_have_experts() -> None:
    experts = read(TRINITY).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (128, 8, 1024)
    assert (experts.shared_size, experts.scale, experts.normalized) == (1024, 2.826, True)
    assert (experts.sigmoid, experts.corrected, experts.groups) == (True, True, None)
    assert experts.layers == (False, False, *[True] * 30)
    assert read({**TRINITY, "num_dense_layers": 32}).experts is None
    every = read({**TRINITY, "num_dense_layers": 0, "num_shared_experts": 0}).experts
    assert every is not None
    assert (every.layers, every.shared_size) == (None, None)


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    assert read(without("layer_types", "head_dim", "rope_theta")) == read(TRINITY)
    assert read(without("layer_types", "global_attn_every_n_layers")) == read(TRINITY)
    assert read(without("sliding_window")).sliding_window[0] == 1024
    assert read(without("num_key_value_heads")).num_kv_heads == 32
    keys = ("num_experts", "num_experts_per_tok", "num_shared_experts", "route_scale")
    experts = read(without(*keys, "moe_intermediate_size", "num_dense_layers")).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size, experts.scale) == (64, 6, 1408, 1.0)
    assert (experts.shared_size, experts.layers) == (2816, (False, *[True] * 31))


def test_gates_have_a_tensor_of_their_own() -> None:
    plan = plan_weights(read(TRINITY), FAMILY.tensors)
    (gate,) = plan.matrices["layers.0.attention_gate"].parts
    assert (gate.tensor, gate.rows) == ("model.layers.0.self_attn.gate_proj.weight", 4096)
    assert [part.rows for part in plan.matrices["layers.0.qkv"].parts] == [4096, 512, 512]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": [FULL] * 31}, "layer_types"),
        ({"n_group": 8}, "n_group is 8"),
        ({"partial_rotary_factor": 0.5}, "64 of 128 channels"),
        ({"route_norm": False}, "route_norm is False"),
        ({"score_func": "softmax"}, "score_func is 'softmax'"),
        ({"sliding_window": None}, "sliding_window"),
        ({"topk_group": 2}, "topk_group is 2"),
        ({"n_routed_experts": 128}, "n_routed_experts = 128"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read({**TRINITY, **changes})
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)


def test_what_makes_no_sense() -> None:
    with pytest.raises(CheckpointError, match="global_attn_every_n_layers is 0"):
        read({**TRINITY, "global_attn_every_n_layers": 0})
    with pytest.raises(CheckpointError, match="given to 129 experts, of 128"):
        read({**TRINITY, "num_experts_per_tok": 129})
    with pytest.raises(CheckpointError, match="scale of the experts must be positive"):
        read({**TRINITY, "route_scale": 0.0})
