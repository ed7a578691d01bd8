"""Multi-head latent attention: what configurations say, what is refused, how weights are stored."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from onnxport.errors import ArtifactError, CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.paged import attention_nodes
from tests.exporter import checkpoints, configs
from tests.exporter.test_fp8 import FP8, in_blocks, quantize

YARN: dict[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
TRAINING: dict[str, Any] = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "seq_aux": True,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        **TRAINING,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": YARN,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "DeepSeek-V2-Lite": {
        **TRAINING,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
}
PUBLISHED["Kimi-K2"] = PUBLISHED["DeepSeek-V3"] | {
    **{"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64},
    **{"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
    **{"rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 32}, "rope_theta": 50000},
    "max_position_embeddings": 131072,
}
PUBLISHED["Moonlight"] = PUBLISHED["DeepSeek-V3"] | {
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
    **{"n_routed_experts": 64, "n_group": 1, "topk_group": 1, "rope_scaling": None},
    **{"num_hidden_layers": 27, "max_position_embeddings": 8192},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood(name: str) -> None:
    """By what is known of them: no hub is at hand."""
    values = PUBLISHED[name]
    spec = configs.read(values)
    assert spec.latent == LatentSpec(
        kv_rank=512,
        nope_size=values["qk_nope_head_dim"],
        rope_size=64,
        value_size=values["v_head_dim"],
        query_rank=values["q_lora_rank"],
    )
    assert (spec.head_size, spec.num_kv_heads, spec.cache_parts) == (576, 1, 1)
    assert spec.rope.interleaved
    assert spec.inner_eps == 1e-6
    experts = spec.experts
    assert experts is not None
    assert experts.layers is not None
    first = values["first_k_dense_replace"]
    assert experts.layers == tuple(i >= first for i in range(spec.num_layers))
    groups = (8, 4, 2) if name == "DeepSeek-V3" else (None, None, None)
    assert (experts.groups, experts.groups_per_token, experts.group_best) == groups


@pytest.mark.parametrize(
    ("name", "scale", "factor"),
    [
        # by hand: (0.1 ln 40 + 1)^2 / sqrt(192), and mscale over mscale_all_dim is 1
        ("DeepSeek-V3", (0.1 * math.log(40) + 1) ** 2 / math.sqrt(192), 1.0),
        ("DeepSeek-V2-Lite", (0.0707 * math.log(40) + 1) ** 2 / math.sqrt(192), 1.0),
        ("Kimi-K2", (0.1 * math.log(32) + 1) ** 2 / math.sqrt(192), 1.0),
        ("GLM-4.7-Flash", 1 / 16, 1.0),
    ],
)
def test_yarn_is_in_the_scale_of_scores(name: str, scale: float, factor: float) -> None:
    spec = configs.read(PUBLISHED[name])
    assert spec.scale == pytest.approx(scale, rel=1e-12)
    assert spec.rope.attention_factor == factor


def test_without_mscale_all_dim_it_is_in_cos_and_sin_alone() -> None:
    rope = {key: one for key, one in YARN.items() if "mscale" not in key}
    spec = configs.read(PUBLISHED["DeepSeek-V3"] | {"rope_scaling": rope})
    assert spec.scale == pytest.approx(192**-0.5)
    assert spec.rope.attention_factor == pytest.approx(0.1 * math.log(40) + 1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DeepSeek-V3", {"head_dim": 128}, "head_dim is 128 and qk_rope_head_dim 64"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ("DeepSeek-V3", {"kv_lora_rank": 0}, "kv_rank of latent attention must be positive"),
        ("DeepSeek-V3", {"attention_bias": True}, "attention_bias = true"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; supported is 1"),
        ("DeepSeek-V3", {"model_type": "deepseek_v2"}, "which is another model's"),
        ("GLM-4.7-Flash", {"partial_rotary_factor": 0.5}, "makes 32 of 64 channels rotate"),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2, and"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, "for each of 47 layers"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["other"] * 47}, "for each of 47 layers"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("DeepSeek-V2-Lite", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("DeepSeek-V2-Lite", {"rope_interleave": True}, "rope_interleave = true"),
        (
            "DeepSeek-V2-Lite",
            {"topk_method": "group_limited_greedy", "n_group": None},
            "lacks the key 'n_group'",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=re.escape(message)):
        configs.read(PUBLISHED[name] | changes)


def test_which_layers_of_glm_have_experts() -> None:
    types = ["sparse", *["dense"] * 46]
    values = PUBLISHED["GLM-4.7-Flash"] | {"mlp_layer_types": types, "first_k_dense_replace": None}
    experts = configs.read(values).experts
    assert experts is not None
    assert experts.layers == (True, *[False] * 46)
    none = values | {"mlp_layer_types": ["dense"] * 47}
    assert configs.read(none).experts is None


def exported(folder: Path, case: str, options: ExportOptions) -> Artifact:
    checkpoints.make(checkpoints.CASES[case], folder / "checkpoint")
    return Artifact.read(export_model(folder / "checkpoint", folder / "artifact", options))


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16", "fp32"])
def test_what_each_head_has_of_its_own_stays_in_floats(tmp_path: Path, precision: str) -> None:
    options = ExportOptions(precision=precision, group_size=32, threads=2)
    artifact = exported(tmp_path, "deepseek-v3", options)
    spec = artifact.manifest.model
    assert spec.latent is not None
    stored = {one.name: one for one in artifact.load_graph("paged").graph.initializer}
    dtype = artifact.manifest.activation_dtype
    tensors = load_file(tmp_path / "checkpoint" / "model.safetensors")
    whole = tensors["model.layers.1.self_attn.kv_b_proj.weight"].float().numpy()
    heads = whole.reshape(spec.num_heads, -1, spec.latent.kv_rank).astype(dtype)
    keys, values = (
        artifact.read_tensor(stored[f"layers.1.{name}.weight"]) for name in ("k_up", "v_up")
    )
    np.testing.assert_array_equal(keys, heads[:, : spec.latent.nope_size].swapaxes(1, 2))
    np.testing.assert_array_equal(values, heads[:, spec.latent.nope_size :])
    is_quantized = precision in ("int4", "int8")
    for name in ("qkv", "q_b", "o"):
        assert (f"layers.1.{name}.scales" in stored) == is_quantized


def test_there_is_one_cache_a_layer_and_no_gqa_graph(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = exported(tmp_path, "deepseek-v2-lite", ExportOptions(precision="fp16"))
    assert "no model_gqa.onnx, and no genai_config.json" in caplog.text
    assert not artifact.has_gqa
    assert not (artifact.path / "genai_config.json").exists()
    with pytest.raises(ArtifactError, match="has no gqa graph"):
        artifact.load_graph("gqa")
    graph = artifact.load_graph("paged")
    names = [info.name for info in graph.graph.input if "past_key" in info.name]
    assert names == [f"past_key_values.{layer}.key" for layer in range(3)]
    for node in attention_nodes(graph):
        assert (node.is_latent, node.kv_num_heads, node.num_heads) == (True, 1, 4)
        assert (node.head_size, node.v_head_size, node.rotary_offset) == (48, 32, 32)
        assert node.rotary_interleaved
        assert node.scale == pytest.approx(32**-0.5)


def test_fp8_in_blocks_that_heads_do_not_fill(tmp_path: Path) -> None:
    """A head's rows of kv_b_proj begin anywhere in a block: 16 and 24 rows, blocks of 24."""
    folder, options = tmp_path / "checkpoint", ExportOptions(precision="fp16", threads=2)
    checkpoints.make(checkpoints.CASES["deepseek-v3"], folder)
    stored, meant = quantize(folder, in_blocks, None)
    save_file(meant, folder / "model.safetensors")
    expected = export_model(folder, tmp_path / "expected", options)
    save_file(stored, folder / "model.safetensors")
    quantization = {**FP8, "weight_block_size": [24, 40]}
    checkpoints.edit_config(folder, quantization_config=quantization)
    found = export_model(folder, tmp_path / "found", options)
    data = "model.onnx.data"
    assert (found / data).read_bytes() == (expected / data).read_bytes()


@pytest.mark.parametrize("case", ["deepseek-v3", "glm4-moe-lite"])
def test_what_guesses_further_tokens_stays_behind(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, options = tmp_path / "checkpoint", ExportOptions(precision="fp32")
    model = checkpoints.make(checkpoints.CASES[case], folder)
    checkpoints.edit_config(folder, num_nextn_predict_layers=1)
    more = {"model.layers.3.eh_proj.weight": torch.ones(2)}
    save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors")
    path = export_model(folder, tmp_path / "artifact", options)
    assert "1 tensors are left out" in caplog.text
    with np.load(path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)


def test_a_mscale_that_is_no_number_is_refused() -> None:
    rope = {**YARN, "mscale_all_dim": "1"}
    with pytest.raises(CheckpointError, match="mscale_all_dim"):
        configs.read(PUBLISHED["DeepSeek-V3"] | {"rope_scaling": rope})
