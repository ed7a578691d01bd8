"""EXAONE 4 and K-EXAONE: how their configurations read, and what of them is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.graphs.spec import ArchSpec
from tests.exporter.configs import read, respelled

FULL, SLIDING = "full_attention", "sliding_attention"

# What is known of published files: no hub is at hand.
COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_theta": 1000000,
    "use_cache": True,
}
LLAMA3: dict[str, Any] = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LARGE: dict[str, Any] = {
    **COMMON,
    "architectures": ["Exaone4ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": ([SLIDING] * 3 + [FULL]) * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
SMALL: dict[str, Any] = {
    **LARGE,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "layer_types": [FULL] * 30,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    **COMMON,
    "architectures": ["ExaoneMoeForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "layer_types": ([SLIDING] * 3 + [FULL]) * 12,
    "max_position_embeddings": 262144,
    "model_type": "exaone_moe",
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "vocab_size": 153600,
}


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A file, some keys left out."""
    return {key: one for key, one in values.items() if key not in keys}


@pytest.mark.parametrize("values", [LARGE, SMALL, EXPERTS], ids=["32b", "1.2b", "236b"])
def test_published_files_are_understood_in_both_spellings(values: dict[str, Any]) -> None:
    spec = read(values)
    assert (spec.qk_norm, spec.whole_qk_norm, spec.head_size) == (True, None, values["head_dim"])
    assert not any((spec.qkv_bias, spec.o_bias, spec.mlp_bias))
    assert (spec.rope.theta, spec.num_kv_heads, spec.inner_eps) == (1e6, 8, 1e-5)
    assert read(respelled(values)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_where_norms_are() -> None:
    dense, sparse = read(LARGE), read(EXPERTS)
    assert (dense.raw_inputs, dense.output_norms) == (True, True)
    assert (sparse.raw_inputs, sparse.output_norms) == (None, None)


def test_layers_that_see_all_rotate_nothing_beside_a_window() -> None:
    spec = read(LARGE)
    assert spec.sliding_window[:5] == (4096, 4096, 4096, None, 4096)
    assert [spec.rotates(layer) for layer in range(5)] == [True, True, True, False, True]
    assert read(EXPERTS).rotated_layers == (True, True, True, False) * 12
    assert (read(SMALL).rotated_layers, set(read(SMALL).sliding_window)) == (None, {None})
    # The window is named, and no layer has it.
    assert read({**SMALL, "sliding_window": 4096}).rotated_layers == (False,) * 30


def test_every_so_many_layers_see_all() -> None:
    absent = without(LARGE, "layer_types", "sliding_window_pattern", "sliding_window")
    assert read(absent) == read(LARGE)
    assert read({**absent, "sliding_window_pattern": 2}).sliding_window[:3] == (4096, None, 4096)
    no_window = {"sliding_window": None, "sliding_window_pattern": 4}
    assert read({**without(SMALL, "layer_types"), **no_window}) == read(SMALL)


def test_which_layers_have_experts() -> None:
    spec, experts = read(EXPERTS), read(EXPERTS).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (128, 8, 2048)
    assert (experts.shared_size, experts.scale, experts.groups) == (2048, 2.5, None)
    assert (experts.sigmoid, experts.corrected, experts.normalized) == (True, True, True)
    assert experts.layers == (False, *[True] * 47)
    sparse = {"mlp_layer_types": ["dense", *["sparse"] * 47]}
    assert read({**EXPERTS, **sparse, "first_k_dense_replace": 7}) == spec  # these come first
    assert read({**EXPERTS, "mlp_layer_types": ["dense"] * 48}).experts is None
    two = read({**EXPERTS, "num_shared_experts": 2, "n_group": 8, "topk_group": 4}).experts
    assert two is not None
    assert (two.shared_size, two.groups, two.groups_per_token, two.group_best) == (4096, 8, 4, 2)
    absent = without(EXPERTS, "routed_scaling_factor", "first_k_dense_replace", "norm_topk_prob")
    assert read(without(absent, "num_experts_per_tok", "num_shared_experts")) == spec


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**LARGE, "attention_bias": True}, "attention_bias"),
        ({**LARGE, "hidden_act": "gelu"}, "hidden_act"),
        ({**LARGE, "layer_types": [FULL] * 63}, "layer_types"),
        ({**LARGE, "layer_types": [FULL] * 63 + ["chunked_attention"]}, "layer_types"),
        ({**LARGE, "partial_rotary_factor": 0.5}, "64 of 128 channels"),
        ({**LARGE, "sliding_window": None}, "sliding_window"),
        (without(LARGE, "layer_types"), "sliding_window_pattern is 'LLLG'"),
        ({**without(LARGE, "layer_types"), "sliding_window_pattern": 0}, "supported is a number"),
        ({**EXPERTS, "mlp_layer_types": ["sparse"] * 47}, "for each of 48 layers"),
        ({**EXPERTS, "mlp_layer_types": ["sparse"] * 47 + ["none"]}, "dense and sparse"),
        ({**EXPERTS, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({**EXPERTS, "n_routed_experts": 128}, "n_routed_experts = 128"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_would_change_the_result_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(values)
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)


def test_a_configuration_that_makes_no_sense() -> None:
    with pytest.raises(CheckpointError, match="positive or None"):
        read({**LARGE, "sliding_window": 0})
