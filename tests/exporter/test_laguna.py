"""Laguna: how its configurations read, and what of them is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.families.laguna import FAMILY
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.lora import projection_shapes
from onnxport.graphs.spec import ArchSpec
from tests.exporter.configs import read, respelled

FULL, SLIDING = "full_attention", "sliding_attention"
YARN: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    **{"factor": 32.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 64.0, "beta_slow": 1.0, "attention_factor": 1.0},
}
ROPES: dict[str, Any] = {
    FULL: YARN,
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
# Of what is known of XS.2, eight layers.
CONFIG: dict[str, Any] = {
    "architectures": ["LagunaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [2, 24],
    "gating": "per-head",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 2,
    "max_position_embeddings": 131072,
    "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    "model_type": "laguna",
    "moe_apply_router_weight_on_input": False,
    "moe_intermediate_size": 512,
    "moe_routed_scaling_factor": 2.5,
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": [48, 64, 64, 64] * 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPES,
    "shared_expert_intermediate_size": 512,
    "sliding_window": 512,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}


def test_the_published_model() -> None:
    spec = read(CONFIG)
    assert (spec.num_heads, spec.layer_heads) == (64, (48, 64, 64, 64) * 2)
    assert spec.sliding_window == (None, 512, 512, 512) * 2
    assert (spec.rope.type, spec.rope.rotary_dim, spec.rope.attention_factor) == ("yarn", 64, 1.0)
    assert spec.local_rope is not None
    assert (spec.local_rope.theta, spec.local_rope.rotary_dim) == (10000.0, 128)
    assert (spec.attention_gate, spec.head_gates, spec.softplus_gates) == (True, True, True)
    assert (spec.qk_norm, spec.qkv_bias, spec.rotated_layers) == (True, False, None)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size, experts.shared_size) == (
        256,
        8,
        512,
        512,
    )
    assert (experts.sigmoid, experts.corrected, experts.normalized) == (True, True, True)
    assert (experts.scale, experts.layers) == (2.5, (False, *[True] * 7))
    assert ArchSpec.from_json(spec.to_json()) == spec
    assert read(respelled(CONFIG)) == spec


def test_layers_have_heads_of_their_own() -> None:
    spec = read(CONFIG)
    plan = plan_weights(spec, FAMILY.tensors)
    for layer, heads in ((0, 48), (1, 64)):
        role = f"layers.{layer}."
        assert [part.rows for part in plan.matrices[role + "qkv"].parts] == [
            heads * 128,
            1024,
            1024,
        ]
        assert plan.matrices[role + "o"].columns == heads * 128
        (gate,) = plan.matrices[role + "attention_gate"].parts
        assert (gate.tensor, gate.rows) == (f"model.layers.{layer}.self_attn.g_proj.weight", heads)
        shapes = projection_shapes(spec, layer)
        assert (shapes["q_proj"], shapes["o_proj"]) == ((heads * 128, 2048), (2048, heads * 128))
        assert shapes["attention_gate"] == (heads, 2048)


def test_what_a_file_may_leave_out() -> None:
    keys = ("head_dim", "gating", "mlp_layer_types", "num_experts", "num_experts_per_tok")
    more = ("sliding_window", "shared_expert_intermediate_size", "moe_intermediate_size")
    short = {key: one for key, one in CONFIG.items() if key not in (*keys, *more)}
    assert read(short) == read(CONFIG)
    bare = {key: one for key, one in short.items() if key not in ("rope_parameters", "layer_types")}
    spec = read(bare)
    assert (spec.rope.type, spec.rope.theta, spec.rope.rotary_dim) == ("default", 500000.0, 64)
    assert (spec.local_rope, set(spec.sliding_window)) == (None, {None})
    alike = {key: one for key, one in bare.items() if key != "num_attention_heads_per_layer"}
    assert (read(alike).layer_heads, read(alike).num_heads) == (None, 48)


def test_gates_may_have_a_number_a_channel() -> None:
    for changes in ({"gating": "per-element"}, {"gating_types": ["per_element"] * 8}):
        spec = read({**CONFIG, "gating": "per-element"} | changes)
        assert (spec.head_gates, spec.gate_size(0), spec.gate_size(1)) == (None, 6144, 8192)
    assert read({**CONFIG, "gating": True, "gating_types": ["per_head"] * 8}) == read(CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = true"),
        ({"gating": False}, "gating is False .* supported is true or one of per-head, per-element"),
        ({"gating_types": ["per_element"] * 8}, "gating is 'per-head' and gating_types are"),
        ({"layer_types": [FULL] * 7}, "supported are 8 entries"),
        ({"layer_types": ["conv"] * 8}, "supported are 8 entries"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input is True"),
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping is 30.0"),
        ({"num_attention_heads_per_layer": [48] * 7}, "it must be 8 integers above 0"),
        ({"num_attention_heads_per_layer": [49] * 8}, "num_heads 49 is not a multiple of"),
        (
            {"num_attention_heads_per_layer": [48] * 7 + [44]},
            "layer_heads are .* a multiple of num_",
        ),
        ({"partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0, which transformers does"),
        ({"rope_parameters": {FULL: YARN}}, "an object with a rope_theta for each of full_"),
        ({"rope_theta": 1e6}, "rope_theta 1000000.0; supported is"),
        ({"sliding_window": None}, "sliding_attention only with a sliding_window"),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled is True"),
        ({"swa_rope_parameters": {"rope_theta": 1e4}}, "swa_rope_parameters"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(CONFIG | changes)


def test_what_layer_heads_do_not_go_with() -> None:
    spec = read(CONFIG)
    with pytest.raises(ValueError, match="layer_heads does not go with attention_sinks"):
        replace(spec, attention_sinks=True)
    with pytest.raises(ValueError, match="softplus_gates needs attention_gate"):
        replace(spec, attention_gate=None, head_gates=None)
