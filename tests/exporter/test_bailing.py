"""Ling and Ring 2.0 (Bailing MoE V2): configurations, and logits of GLM 4.5, which it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.spec import ArchSpec
from tests.exporter import bailing, checkpoints
from tests.exporter.configs import read

# Of what is known of Ling mini, four layers.
CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 600000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "vocab_size": 157184,
}


def test_the_published_model() -> None:
    spec = read(CONFIG)
    assert (spec.num_kv_heads, spec.head_size, spec.qk_norm, spec.qkv_bias) == (4, 128, True, False)
    assert (spec.rope.theta, spec.rope.rotary_dim) == (600000, 64)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size, experts.shared_size) == (
        256,
        8,
        512,
        512,
    )
    assert (experts.groups, experts.groups_per_token, experts.group_best) == (8, 4, 2)
    assert (experts.sigmoid, experts.corrected, experts.scale) == (True, True, 2.5)
    assert experts.layers == (False, True, True, True)
    assert ArchSpec.from_json(spec.to_json()) == spec


def test_either_key_says_how_much_of_a_head_rotates() -> None:
    for key in ("rotary_dim", "partial_rotary_factor"):
        assert read({name: one for name, one in CONFIG.items() if name != key}) == read(CONFIG)
    neither = {**CONFIG, "rotary_dim": None, "partial_rotary_factor": None}
    assert read(neither).rope.rotary_dim == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is False"),
        ({"norm_head": True}, "norm_head is True"),
        ({"norm_topk_prob": None}, "norm_topk_prob"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"rotary_dim": 128}, "rotary_dim is 128, and partial_rotary_factor makes 64 of 128"),
        (
            {"rotary_dim": 256, "partial_rotary_factor": None},
            "rotary_dim 256 exceeds head_size 128",
        ),
        ({"score_function": "softmax"}, "score_function is 'softmax'"),
        ({"use_bias": True}, "use_bias is True"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(CONFIG | changes)


def test_logits_are_those_of_glm(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    model = checkpoints.make(bailing.CASE, source)
    bailing.publish(source, **bailing.CONFIG)
    path = export_model(source, tmp_path / "artifact", ExportOptions(precision="fp32", threads=1))
    with np.load(path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)
