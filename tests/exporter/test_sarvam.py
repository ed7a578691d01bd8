"""Sarvam's two: how configurations read, what of them is refused, and names of tensors."""

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

# Of what is known of the published files, four layers of each.
MOE: dict[str, Any] = {
    "architectures": ["SarvamMoEForCausalLM"],
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "max_window_layers": 19,
    "model_type": "sarvam_moe",
    "moe_intermediate_size": 1024,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 1024,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 8000000.0,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 262144,
}
_OF_MOE = ("max_window_layers", "use_qk_norm", "use_qkv_bias")
MLA: dict[str, Any] = {
    **{key: one for key, one in MOE.items() if key not in _OF_MOE},
    "architectures": ["SarvamMLAForCausalLM"],
    "head_dim": 576,
    "intermediate_size": 16384,
    "kv_lora_rank": 512,
    "model_type": "sarvam_mla",
    "moe_intermediate_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 64,
    "q_head_dim": 192,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        **{"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "rope_theta": 10000.0,
    "v_head_dim": 128,
}


def test_the_published_models() -> None:
    spec = read(MOE)
    assert (spec.num_kv_heads, spec.head_size, spec.qk_norm, spec.qkv_bias) == (4, 64, True, False)
    assert (spec.rope.theta, spec.rope.rotary_dim) == (8e6, 64)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size, experts.shared_size) == (
        128,
        6,
        1024,
        1024,
    )
    assert (experts.sigmoid, experts.corrected, experts.scale) == (True, True, 2.5)
    assert (experts.layers, experts.groups) == ((False, True, True, True), None)
    latent = read(MLA)
    assert latent.latent is not None
    assert (latent.latent.query_rank, latent.latent.kv_rank, latent.head_size) == (None, 512, 576)
    assert (latent.rope.type, latent.rope.factor, latent.rope.interleaved) == ("yarn", 40, True)
    assert latent.scale == pytest.approx((0.1 * np.log(40) + 1) ** 2 / 192**0.5)
    assert latent.experts is not None
    assert (latent.experts.per_token, latent.experts.size) == (8, 2048)
    for one in (spec, latent):
        assert ArchSpec.from_json(one.to_json()) == one


def test_what_files_may_leave_out_or_spell_otherwise() -> None:
    keys = ("head_dim", "num_key_value_heads", "use_qk_norm", "use_qkv_bias", "rope_theta")
    of_experts = ("num_experts", "num_shared_experts", "routed_scaling_factor", "n_group")
    more = ("num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "topk_group")
    short = {key: one for key, one in MOE.items() if key not in (*keys, *of_experts, *more)}
    assert read(short) == read(MOE)
    newer = {"n_routed_experts": 128, "n_shared_experts": 1, "attention_bias": False}
    assert read(short | newer) == read(MOE)
    assert read({**MOE, "architectures": ["Glm4MoeForCausalLM"]}) == read(MOE)
    scaling = {key: one for key, one in MLA["rope_scaling"].items() if key != "type"}
    again = {"head_dim": 64, "rope_scaling": {**scaling, "rope_type": "yarn"}}
    assert read(MLA | again | {"architectures": ["DeepseekV3ForCausalLM"]}) == read(MLA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is False"),
        (
            {"moe_shared_expert_intermediate_size": 512},
            "expert_intermediate_size is 512; supported",
        ),
        ({"n_routed_experts": 64}, "names of one number"),
        ({"n_shared_experts": 2}, "names of one number"),
        ({"norm_head": True}, "norm_head is True"),
        ({"partial_rotary_factor": 0.5}, "32 of 64 channels"),
        ({"score_function": "softmax"}, "score_function is 'softmax'"),
        ({"use_bias": True}, "use_bias is True"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(MOE | changes)


def test_heads_of_latents_have_one_size() -> None:
    with pytest.raises(CheckpointError, match="head_dim is 192; it may be qk_rope_head_dim, 64"):
        read(MLA | {"head_dim": 192})


def test_published_names_of_tensors(tmp_path: Path) -> None:
    """A GLM 4.5 all of whose heads rotate, as Sarvam is published: transformers has one class."""
    source = tmp_path / "checkpoint"
    ropes = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
    case = checkpoints.CASES["glm4-moe"]
    case = checkpoints.Case(
        "glm4_moe", {**case.config, "rope_parameters": ropes, "use_qk_norm": True}
    )
    model = checkpoints.make(case, source)
    bailing.publish(source, model_type="sarvam_moe", architectures=["SarvamMoEForCausalLM"])
    path = export_model(source, tmp_path / "artifact", ExportOptions(precision="fp32", threads=1))
    with np.load(path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)
