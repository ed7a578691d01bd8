"""Granite with sliding windows: how its configurations read, and what of them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.families import granite_swa
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.spec import ArchSpec
from tests.exporter.configs import read, respelled

DENSE: dict[str, Any] = {
    "architectures": ["GraniteSWAForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0, 0, 10000.0, 10000.0, 10000.0],
    "logits_scaling": 8.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "granite_swa",
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": 128,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
SPARSE: dict[str, Any] = {
    **{key: one for key, one in DENSE.items() if key != "mlp_bias"},
    "architectures": ["GraniteMoeSWAForCausalLM"],
    "intermediate_size": 512,
    "model_type": "granitemoe_swa",
    "num_experts_per_tok": 8,
    "num_local_experts": 40,
    "shared_intermediate_size": 1024,
}


def test_the_dense_model() -> None:
    spec = read(DENSE)
    assert spec.sliding_window == (None, 128, 128, 128) * 2
    assert spec.rotated_layers == (False, True, True, True) * 2
    assert (spec.attention_sinks, spec.local_rope, spec.rope.theta) == (True, None, 10_000.0)
    assert (spec.attention_scale, spec.stream_scale, spec.logits_scale) == (0.015625, 12.0, 1 / 8)
    assert read(respelled(DENSE)) == spec
    short = {key: one for key, one in DENSE.items() if key not in ("layer_types", "sliding_window")}
    assert read(short) == spec
    assert ArchSpec.from_json(spec.to_json()) == spec


def test_what_the_dense_model_is_where_its_file_does_not_say() -> None:
    left = {"num_key_value_heads", "tie_word_embeddings"}
    spec = read({key: one for key, one in DENSE.items() if key not in left})
    assert (spec.num_kv_heads, spec.tie_word_embeddings) == (4, True)
    assert read(DENSE | {"num_key_value_heads": None}).num_kv_heads == 32
    spec = read({key: one for key, one in SPARSE.items() if key not in left})
    assert (spec.num_kv_heads, spec.tie_word_embeddings) == (32, False)


def test_bases_of_layers() -> None:
    plain = read(DENSE | {"layer_rope_theta": None})
    assert (plain.rotated_layers, plain.local_rope) == (None, None)
    two = read(DENSE | {"layer_rope_theta": [5e6, 1e4, 1e4, 1e4] * 2})
    assert two.local_rope is not None
    assert (two.rope.theta, two.local_rope.theta, two.rotated_layers) == (5e6, 1e4, None)
    none = read(DENSE | {"layer_rope_theta": [0] * 8})
    assert none.ropes == ()
    same = read(DENSE | {"no_rope_layers": [0, 1, 1, 1] * 2})
    assert same == read(DENSE)


def test_the_model_with_experts() -> None:
    spec = read(SPARSE)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (40, 8, 512)
    assert (experts.normalized, experts.shared_size) == (True, 1024)
    assert spec.attention_sinks
    assert read(respelled(SPARSE)) == spec
    alone = read(SPARSE | {"shared_intermediate_size": 0}).experts
    assert alone is not None
    assert alone.shared_size is None


def test_experts_have_the_names_of_either_kind_of_file() -> None:
    spec, family = read(SPARSE), granite_swa.WITH_EXPERTS
    for names, stem in zip(family.layouts, ("experts.gate_up_proj", "input_linear"), strict=True):
        tensors = frozenset(plan_weights(spec, names).shapes())
        assert any(stem in name for name in tensors)
        assert family.names_in(tensors) == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_rope_theta": [1e4, 1e4, 2e4, 1e4] * 2}, r"layer_rope_theta is .*\[10000.0, 20000"),
        ({"layer_rope_theta": [1e4]}, "it must be 8 numbers"),
        ({"layer_rope_theta": [-1.0] * 8}, "it must be 8 numbers"),
        ({"layer_rope_theta": [True] * 8}, "it must be 8 numbers"),
        ({"no_rope_layers": [1] * 8}, "no_rope_layers is .* remove the wrong one"),
        ({"sliding_window": None}, "the window None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"residual_multiplier": 0.0}, "residual_multiplier is 0.0"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(DENSE | changes)
