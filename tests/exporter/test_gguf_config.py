"""What metadata of GGUF files would be in a `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families import find_family
from onnxport.exporter.gguf.architectures import ARCHITECTURES, read_config
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.metadata import Metadata
from onnxport.graphs.spec import ArchSpec

BASE: Mapping[str, Any] = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LAYER_NORM: Mapping[str, Any] = {
    "attention.layer_norm_rms_epsilon": None,
    "attention.layer_norm_epsilon": 1e-5,
}
DELTA_NETS: Mapping[str, Any] = {
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
}
SPACES: Mapping[str, Any] = {
    "attention.head_count_kv": [0, 4],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
}
BLOCKS: Mapping[str, Any] = {  # a state space, attention, and what is behind it
    **SPACES,
    "block_count": 3,
    "attention.head_count_kv": [0, 4, 0],
    "feed_forward_length": [0, 0, 96],
}
SHARED_EXPERT: Mapping[str, Any] = {
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}
LATENTS: Mapping[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 24,
    "rope.dimension_count": 16,
    "expert_feed_forward_length": 32,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
}
# What each needs besides.
OWN: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("gptneox", "jais2", "nemotron", "phi2", "stablelm", "starcoder2"), LAYER_NORM),
    **dict.fromkeys(("falcon", "gpt2", "olmo", "orion"), LAYER_NORM),
    "starcoder": {**LAYER_NORM, "attention.head_count_kv": 1},
    "afmoe": {
        "attention.sliding_window": 8,
        "expert_feed_forward_length": 32,
        "expert_weights_norm": True,
    },
    "command-r": {**LAYER_NORM, "logit_scale": 0.5},
    "cohere2": {**LAYER_NORM, "logit_scale": 0.5, "attention.sliding_window": 8},
    "cohere2moe": {
        **LAYER_NORM,
        "logit_scale": 0.5,
        "attention.sliding_window": 8,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 64,
        "expert_weights_norm": True,
        "leading_dense_block_count": 1,
    },
    "hy_v3": {
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 64,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    },
    "bailingmoe2": {"expert_feed_forward_length": 32, "expert_weights_norm": True},
    "laguna": {"attention.sliding_window": 8, "expert_feed_forward_length": 32},
    "mimo2": {
        "attention.head_count_kv": 4,
        "attention.sliding_window": 8,
        "expert_feed_forward_length": 32,
    },
    "llama4": {
        "expert_count": 16,
        "expert_used_count": 1,
        "expert_feed_forward_length": 32,
        "interleave_moe_layer_step": 1,
    },
    "mellum": {"attention.sliding_window": 8, "expert_feed_forward_length": 32},
    "mistral4": {
        **LATENTS,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
    "deepseek2": LATENTS,
    "exaone-moe": {
        "attention.sliding_window": 8,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 64,
        "expert_weights_norm": True,
        "leading_dense_block_count": 1,
    },
    "ernie4_5-moe": {"expert_feed_forward_length": 32, "leading_dense_block_count": 1},
    "hunyuan-moe": {"expert_shared_count": 1},
    "lfm2": {"attention.head_count_kv": [0, 4], "shortconv.l_cache": 3},
    "lfm2moe": {
        "attention.head_count_kv": [0, 4],
        "shortconv.l_cache": 3,
        "expert_gating_func": 2,
        "expert_feed_forward_length": 32,
        "leading_dense_block_count": 1,
    },
    "minicpm": {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 9.0},
    "minimax-m2": {"expert_gating_func": 2},
    "qwen35": {**DELTA_NETS, "rope.dimension_sections": [2, 3, 3, 0]},
    "qwen35moe": {**DELTA_NETS, **SHARED_EXPERT, "feed_forward_length": None},
    "qwen2vl": {"rope.dimension_sections": [2, 3, 3, 0]},
    "qwen3vl": {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 1},
    "qwen3next": {**DELTA_NETS, **SHARED_EXPERT},
    "dots1": {"expert_gating_func": 2, "expert_feed_forward_length": 32},
    "gemma2": {"attention.sliding_window": 8},
    "gemma3": {"attention.sliding_window": 8},
    "falcon-h1": {**SPACES, "attention.head_count_kv": 4},
    "gemma3n": {
        "activation_sparsity_scale": [1.5, float("-inf")],
        "altup.active_idx": 0,
        "altup.num_inputs": 4,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False],
        "embedding_length_per_layer_input": 16,
    },
    "gemma4": {
        "attention.head_count_kv": 4,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False],
        **{f"attention.{name}_length": 16 for name in ("key", "value")},
        **{f"attention.{name}_length_swa": 16 for name in ("key", "value")},
    },
    "granite_swa": {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [False, True],
    },
    "granitehybrid": {**SPACES, "rope.scaling.finetuned": False},
    "nemotron_h": {**LAYER_NORM, **BLOCKS},
    "nemotron_h_moe": {
        **LAYER_NORM,
        **BLOCKS,
        **SHARED_EXPERT,
        "attention.layer_norm_rms_epsilon": 1e-5,  # which the converter writes besides
    },
    "glm4moe": {
        "expert_gating_func": 2,
        "expert_feed_forward_length": 32,
        "leading_dense_block_count": 1,
    },
    "gpt-oss": {"attention.sliding_window": 8},
    "kimi-linear": {
        **LATENTS,
        "attention.head_count_kv": [0, 1],
        "attention.value_length": 16,  # which is of nothing there
        "expert_gating_func": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "kda.head_dim": 16,
        "leading_dense_block_count": 1,
        "ssm.conv_kernel": 4,
    },
    "qwen2moe": {"expert_feed_forward_length": 32},
    "qwen3moe": {"expert_feed_forward_length": 32},
}
WITH_EXPERTS = (
    *("dots1", "glm4moe", "gpt-oss", "granitemoe", "olmoe", "qwen2moe", "qwen3moe"),
    *("afmoe", "deepseek2", "exaone-moe", "hunyuan-moe", "lfm2moe", "minimax-m2", "qwen35moe"),
    *("ernie4_5-moe", "nemotron_h_moe", "qwen3next"),
    *("bailingmoe2", "cohere2moe", "hy_v3", "kimi-linear", "laguna", "mellum", "mimo2", "mistral4"),
)
# Tensors whose sizes are read.
SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "gemma3n": {"per_layer_token_embd.weight": (90, 32), "blk.0.laurel_l.weight": (24, 64)}
}
# Small tensors.
NUMBERS: Mapping[str, Mapping[str, list[float]]] = {
    "gemma4": {"rope_freqs.weight": [1.0] * 2 + [float(np.float32(1e30))] * 6}
}


def facts(
    architecture: str, *tensors: str, numbers: Mapping[str, list[float]] | None = None, **keys: Any
) -> Facts:
    """A file without weights; None takes a key out."""
    own = {**BASE, **OWN.get(architecture, {})}
    if architecture in WITH_EXPERTS:
        own |= {"expert_count": 4, "expert_used_count": 2}
    own |= {key.replace("__", "."): value for key, value in keys.items()}
    values = {f"{architecture}.{key}": one for key, one in own.items()}
    kept = {key: value for key, value in values.items() if value is not None}
    metadata = Metadata({"general.architecture": architecture, **kept}, Path("model.gguf"))
    found = numbers or NUMBERS.get(architecture, {})
    layers = [f"blk.{layer}.attn_norm.weight" for layer in range(own["block_count"])]
    shapes = {"token_embd.weight": (100, 64)}
    shapes |= dict.fromkeys((*layers, *tensors, *found), (1,))
    shapes |= SHAPES.get(architecture, {})
    if "expert_count" in own:
        shapes["blk.1.ffn_gate_inp.weight"] = (own["expert_count"], 64)
    return Facts(metadata, shapes, found.get)


def spec(found: Facts, context_length: int | None = None) -> ArchSpec:
    """What the family makes of it."""
    _, values = read_config(found)
    config = Config(values, Path("model.gguf"))
    family = find_family(config)
    read = family.spec(config, context_length)
    family.count_further_layers(config)
    config.check_all_used(family.name)
    return read


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_has_a_family(architecture: str) -> None:
    read = spec(facts(architecture, *(["output.weight"] if architecture == "phi2" else [])))
    heads = (48, 1) if read.latent else (16, 1 if architecture == "starcoder" else 4)
    assert (read.num_layers, read.hidden_size, read.head_size) == (2, 64, heads[0])
    assert (read.num_heads, read.num_kv_heads, read.vocab_size) == (4, heads[1], 100)
    assert read.tie_word_embeddings == (architecture != "phi2")
    assert not spec(facts(architecture, "output.weight")).tie_word_embeddings
    assert (read.experts is not None) == (architecture in (*WITH_EXPERTS, "llama4"))
    with pytest.raises(UnsupportedModelError, match=rf"{architecture}\.surprise = 1\. Export"):
        read_config(facts(architecture, surprise=1))


def test_the_head_of_phi_is_never_the_embedding() -> None:
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings is True"):
        spec(facts("phi2"))


def test_what_is_side_by_side() -> None:
    """GPT-NeoX's file says so; StableLM's lacks the second norm, and may say anything."""
    assert spec(facts("gptneox")).parallel_layers
    assert not spec(facts("gptneox", use_parallel_residual=False)).parallel_layers
    assert spec(facts("stablelm", use_parallel_residual=False)).parallel_layers
    turns = facts("stablelm", "blk.0.ffn_norm.weight", use_parallel_residual=True)
    assert not spec(turns).parallel_layers


@pytest.mark.parametrize("architecture", ["gptneox", "nemotron", "phi2", "stablelm"])
def test_all_of_a_head_may_rotate_where_less_does_otherwise(architecture: str) -> None:
    read = spec(facts(architecture, "output.weight"))
    assert (read.rope.rotary_dim, read.head_size) == (16, 16)
    part = facts(architecture, "output.weight", rope__dimension_count=4)
    assert spec(part).rope.rotary_dim == 4


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_scale_of_gemmas_queries(architecture: str, layers: int) -> None:
    """Of the models of 27B it is not that of a head."""
    own = {"attention__key_length": 32, "attention__value_length": 32}
    assert spec(facts(architecture, **own)).attention_scale == 1 / math.sqrt(32)
    largest = spec(facts(architecture, block_count=layers, **own))
    assert largest.attention_scale == 1 / math.sqrt(16)


def test_gemmas_windows_and_caps() -> None:
    two = spec(facts("gemma2", block_count=3))
    assert two.sliding_window == (8, None, 8)
    assert (two.attention_softcap, two.logits_softcap) == (50.0, 30.0)
    assert spec(facts("gemma2", attn_logit_softcapping=2.0)).attention_softcap == 2.0
    three = spec(facts("gemma3", block_count=7, rope__freq_base=1e6))
    assert three.sliding_window == (8, 8, 8, 8, 8, None, 8)
    assert three.rope.theta == 1e6
    assert three.local_rope is not None
    assert three.local_rope.theta == 10_000
    local = spec(facts("gemma3", rope__freq_base=1e6, rope__freq_base_swa=500.0)).local_rope
    assert local is not None
    assert local.theta == 500
    with pytest.raises(UnsupportedModelError, match="final_logit_softcapping is 30"):
        spec(facts("gemma3", final_logit_softcapping=30.0))
    with pytest.raises(CheckpointError, match=r"lacks the key gemma3\.attention\.sliding_window"):
        spec(facts("gemma3", attention__sliding_window=None))


def test_granite_without_multipliers() -> None:
    plain = spec(facts("granite"))
    assert plain.attention_scale == 0.25
    assert (plain.residual_scale, plain.stream_scale, plain.logits_scale) == (1, 1, 1)
    own = {"attention__scale": 0.5, "logit_scale": 8.0, "embedding_scale": 12.0}
    told = spec(facts("granitemoe", residual_scale=0.25, **own))
    assert (told.attention_scale, told.stream_scale, told.logits_scale) == (0.5, 12, 1 / 8)


def test_phis_windows_and_rotation() -> None:
    assert spec(facts("phi3", attention__sliding_window=0)).sliding_window == (None, None)
    assert spec(facts("phi3", attention__sliding_window=7)).sliding_window == (7, 7)
    assert spec(facts("phi3", rope__dimension_count=12)).rope.rotary_dim == 12
    factors = {"rope_factors_short.weight": [1.0] * 8, "rope_factors_long.weight": [2.0] * 8}
    own = {"rope__scaling__attn_factor": 1.25, "rope__scaling__original_context_length": 64}
    found = facts("phi3", numbers=factors, rope__scaling__type="longrope", **own)
    assert spec(found).rope.factors == (2.0,) * 8
    assert spec(found).rope.attention_factor == 1.25
    assert spec(found, 64).rope.factors == (1.0,) * 8
    with pytest.raises(UnsupportedModelError, match=r"holds rope_factors_short\.weight, with"):
        read_config(facts("phi3", numbers={"rope_factors_short.weight": [1.0] * 8}))


def test_yarn() -> None:
    own = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64,
    }
    plain = spec(facts("qwen3", **own)).rope
    assert (plain.type, plain.factor, plain.original_context_length) == ("yarn", 4.0, 64)
    assert (plain.beta_fast, plain.beta_slow, plain.truncate) == (32.0, 1.0, True)
    assert plain.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    more = {
        "rope__scaling__yarn_beta_fast": 16.0,
        "rope__scaling__yarn_beta_slow": 2.0,
        "rope__scaling__attn_factor": 0.5,
    }
    told = spec(facts("qwen3", **own, **more)).rope
    assert (told.beta_fast, told.beta_slow) == (16.0, 2.0)
    assert told.attention_factor == pytest.approx(plain.attention_factor / 2)
    assert spec(facts("gpt-oss", **own)).rope.truncate is False


def test_experts_that_add_up() -> None:
    for architecture, normalized in (
        *(("llama", True), ("granitemoe", True), ("qwen3moe", True), ("gpt-oss", True)),
        *(("qwen2moe", False), ("olmoe", False)),
    ):
        own = {"expert_count": 4, "expert_used_count": 2}
        experts = spec(facts(architecture, **own)).experts
        assert experts is not None
        assert experts.normalized == normalized
        if architecture != "gpt-oss":
            assert spec(facts(architecture, **own, expert_weights_norm=normalized)).experts
            with pytest.raises(UnsupportedModelError, match=f"it is {normalized}, as llama.cpp"):
                read_config(facts(architecture, **own, expert_weights_norm=not normalized))
        with pytest.raises(UnsupportedModelError, match="expert_gating_func is 2; of the arch"):
            read_config(facts(architecture, **own, expert_gating_func=2))


@pytest.mark.parametrize("architecture", ["dots1", "glm4moe"])
def test_experts_by_sigmoids(architecture: str) -> None:
    own = {
        "expert_shared_count": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "block_count": 4,
        "nextn_predict_layers": 1,
        "leading_dense_block_count": 2,
    }
    if architecture == "dots1":
        own["nextn_predict_layers"] = 0
        own["block_count"] = 3
    read = spec(facts(architecture, **own))
    assert read.experts is not None
    assert read.num_layers == 3
    assert read.experts.layers == (False, False, True)
    assert (read.experts.sigmoid, read.experts.corrected) == (True, True)
    assert (read.experts.normalized, read.experts.scale) == (True, 2.5)
    assert read.experts.shared_size == 64
    grouped = {"expert_group_count": 2, "expert_group_used_count": 1}
    groups = spec(facts(architecture, **own | grouped)).experts
    assert groups is not None
    assert (groups.groups, groups.groups_per_token) == (2, 1)
    with pytest.raises(UnsupportedModelError, match="expert_gating_func is 1; of the architecture"):
        read_config(facts(architecture, **own | {"expert_gating_func": 1}))


def test_solar_open_has_no_dense_layers() -> None:
    """So its files lack their size, which others must have."""
    keys = {"feed_forward_length": None, "leading_dense_block_count": 0}
    read = spec(facts("glm4moe", **keys))
    assert read.experts is not None
    assert read.experts.layers is None  # all of them
    with pytest.raises(CheckpointError, match=r"lacks the key glm4moe\.feed_forward_length"):
        spec(facts("glm4moe", **keys | {"leading_dense_block_count": 1}))


def test_shared_experts() -> None:
    own = {"expert_shared_feed_forward_length": 48}
    for architecture, gated in (("qwen2moe", True), ("granitemoe", None)):
        experts = spec(facts(architecture, **own)).experts
        assert experts is not None
        assert (experts.shared_size, experts.shared_gated) == (48, gated)
    without = spec(facts("qwen2moe")).experts
    assert without is not None
    assert without.shared_size == 96
    assert spec(facts("granitemoe")).family == "granitemoe"


def test_sizes_of_mixtrals_experts() -> None:
    own = {"expert_count": 4, "expert_used_count": 2}
    assert spec(facts("llama", **own, expert_feed_forward_length=96)).experts
    with pytest.raises(
        UnsupportedModelError, match=r"expert_feed_forward_length is 32; .* it is 96"
    ):
        read_config(facts("llama", **own, expert_feed_forward_length=32))
    oss = spec(facts("gpt-oss", expert_feed_forward_length=32)).experts
    assert oss is not None
    assert oss.size == 32


def test_biases_are_what_tensors_say() -> None:
    assert not spec(facts("llama")).qkv_bias
    biased = spec(facts("llama", "blk.0.attn_q.bias"))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, False)
    assert spec(facts("llama", "blk.0.ffn_down.bias")).mlp_bias
    assert spec(facts("qwen3", "blk.0.attn_q.bias")).qkv_bias
    assert spec(facts("ernie4_5", "blk.0.attn_q.bias")).mlp_bias
    seed = spec(facts("seed_oss", "blk.0.attn_output.bias"))
    assert (seed.qkv_bias, seed.o_bias) == (False, True)
    assert spec(facts("glm4moe", "blk.0.attn_q_norm.weight")).qk_norm
    assert not spec(facts("glm4moe")).qk_norm


def test_where_smollm3_rotates() -> None:
    rotated = spec(facts("smollm3", block_count=5)).rotated_layers
    assert rotated == (True, True, True, False, True)


def test_a_whole_number_is_a_number() -> None:
    assert spec(facts("llama", rope__freq_base=500)).rope.theta == 500.0


def test_no_embedding() -> None:
    found = facts("llama")
    with pytest.raises(CheckpointError, match=r"no embedding token_embd\.weight"):
        read_config(Facts(found.metadata, {}, found.numbers))


@pytest.mark.parametrize("architecture", ["glm4moe", "qwen3moe"])
def test_more_experts_than_there_are(architecture: str) -> None:
    """A damaged count makes no plan for thousands of millions of them."""
    found = facts(architecture)
    damaged = {**found.metadata.all, f"{architecture}.expert_count": 2**32 - 1}
    metadata = Metadata(damaged, Path("model.gguf"))
    with pytest.raises(CheckpointError, match=r"expert_count is 4294967295, and .* \[4\] rows"):
        read_config(Facts(metadata, found.shapes, found.numbers))


@pytest.mark.parametrize("architecture", ["llama", "phi3", "glm4moe"])
@pytest.mark.parametrize("channels", [0, -4])
def test_heads_of_no_channels(architecture: str, channels: int) -> None:
    own = {"attention.key_length": channels, "rope.dimension_count": 8}
    with pytest.raises(CheckpointError, match=rf"attention\.key_length is {channels}, expected"):
        read_config(facts(architecture, **own))


def test_more_heads_than_channels() -> None:
    own = {"attention.head_count": 1000, "attention.key_length": None}
    with pytest.raises(CheckpointError, match=r"attention\.key_length is 0, expected at least 1"):
        read_config(facts("phi3", **own))


@pytest.mark.parametrize("gating", [None, 1])
def test_deepseek_v2(gating: int | None) -> None:
    read = spec(facts("deepseek2", expert_gating_func=gating, attention__q_lora_rank=24))
    assert read.family == "deepseek_v2"
    assert read.latent is not None
    sizes = (read.latent.kv_rank, read.latent.nope_size, read.latent.rope_size)
    assert (*sizes, read.latent.value_size, read.latent.query_rank) == (32, 24, 16, 24, 24)
    assert read.rope.interleaved
    assert read.experts is not None
    assert (read.experts.sigmoid, read.experts.groups, read.experts.scale) == (None, None, 1.0)
    grouped = {"expert_group_count": 2, "expert_group_used_count": 1, "expert_weights_scale": 16.0}
    experts = spec(facts("deepseek2", expert_gating_func=gating, **grouped)).experts
    assert experts is not None
    assert (experts.groups, experts.groups_per_token, experts.group_best) == (2, 1, 1)
    assert experts.scale == 16.0


def test_deepseek_v3() -> None:
    keys = {"expert_gating_func": 2, "expert_weights_norm": True, "leading_dense_block_count": 1}
    keys |= {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    keys |= {"rope__scaling__original_context_length": 64}
    read = spec(facts("deepseek2", rope__scaling__yarn_log_multiplier=0.0707, **keys))
    assert read.family == "deepseek_v3"
    assert read.latent is not None
    assert read.latent.query_rank is None
    assert read.rope.attention_factor == 1.0
    magnitude = 0.1 * 0.707 * math.log(4) + 1
    assert read.attention_scale == pytest.approx(magnitude**2 / math.sqrt(40))
    assert read.experts is not None
    assert (read.experts.sigmoid, read.experts.normalized) == (True, True)
    assert read.experts.layers == (False, True)
    with pytest.raises(UnsupportedModelError, match="yarn_log_multiplier, without which"):
        spec(facts("deepseek2", **keys))


def test_glm_4_7_flash_is_known_by_its_correction() -> None:
    """Of scores: its files do not say by which function they are."""
    keys = {"block_count": 3, "leading_dense_block_count": 1, "nextn_predict_layers": 1}
    read = spec(facts("deepseek2", "blk.1.exp_probs_b.bias", **keys))
    assert (read.family, read.num_layers) == ("deepseek_v3", 2)
    assert spec(facts("deepseek2")).family == "deepseek_v2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_group_count": None}, "expert_group_count, so it was made"),
        ({"attention__key_length_mla": None}, "before llama.cpp cached lat"),
        ({"attention__head_count_kv": 4}, "head_count_kv is 4; of the arch"),
        ({"attention__key_length": 40}, "key_length is 40"),
        ({"expert_gating_func": 4}, "expert_gating_func is 4"),
    ],
)
def test_what_older_files_of_deepseek_lack(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec(facts("deepseek2", **changes))


def test_youtu_has_latents_and_no_experts() -> None:
    none = {"expert_count": 0, "expert_used_count": None, "leading_dense_block_count": 2}
    read = spec(facts("deepseek2", **none, expert_group_count=None, expert_group_used_count=None))
    assert (read.family, read.experts, read.rope.interleaved) == ("youtu", None, True)


def test_queries_of_mistral_4_grow() -> None:
    for told, strength in ({}, 0.1), ({"attention__temperature_scale": 0.25}, 0.25):
        read = spec(facts("mistral4", expert_weights_norm=True, **told))
        growth = read.query_growth
        assert growth is not None
        assert (growth.strength, growth.interval, growth.offset) == (strength, 64, 0)
        assert (read.family, read.context_length) == ("mistral4", 256)
    experts = read.experts
    assert experts is not None
    assert (experts.sigmoid, experts.corrected, experts.normalized) == (None, None, True)


def test_what_llama_cpp_knows_of_llama_4() -> None:
    scout, maverick = (
        spec(facts("llama4", block_count=5, expert_count=count, interleave_moe_layer_step=step))
        for count, step in ((16, 1), (128, 2))
    )
    for read in (scout, maverick):
        assert read.rotated_layers == (True, True, True, False, True)
        growth = read.query_growth
        assert growth is not None
        assert (growth.strength, growth.interval, growth.offset) == (0.1, 8192, 1)
        assert read.rope.interleaved
        assert read.experts is not None
        assert (read.experts.scaled_inputs, read.experts.shared_size) == (True, 32)
    assert (scout.qk_norm, scout.unweighted_qk_norm) == (True, True)
    assert (maverick.qk_norm, maverick.unweighted_qk_norm) == (False, None)
    assert scout.experts is not None
    assert scout.experts.layers is None
    assert maverick.experts is not None
    assert maverick.experts.layers == (False, True, False, True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__sliding_window": 0}, "sliding_window is 0; .* it is 8192"),
        ({"expert_used_count": 2}, "expert_used_count is 2; .* it is 1"),
    ],
)
def test_what_is_refused_of_llama_4(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec(facts("llama4", expert_count=16, **changes))


def test_shared_experts_of_hunyuan_3() -> None:
    read = spec(facts("hy_v3"))
    assert read.experts is not None
    assert read.experts.layers == (False, True)
    assert (read.experts.shared_size, read.experts.scale) == (64, 2.5)
    with pytest.raises(UnsupportedModelError, match=r"is 48; supported is a multiple of .* 32"):
        spec(facts("hy_v3", expert_shared_feed_forward_length=48))


def test_cohere_2_with_experts() -> None:
    read = spec(facts("cohere2moe", attention__sliding_window_pattern=[False, True]))
    assert (read.layer_norms, read.rotated_layers, read.sliding_window) == (True, None, (None, 8))
    assert read.experts is not None
    assert (read.experts.sigmoid, read.experts.scale, read.experts.shared_scale) == (True, 0.5, 0.5)
    softmax = {"expert_gating_func": 1, "expert_weights_norm": False}
    with pytest.raises(UnsupportedModelError, match="expert_weights_norm is False"):
        spec(facts("cohere2moe", **softmax))
    rms = spec(facts("cohere2moe", attention__layer_norm_rms_epsilon=1e-6))
    assert (rms.layer_norms, rms.rms_norm_eps) == (None, 1e-6)


def test_a_mellum_without_a_base_for_windows_has_one() -> None:
    assert spec(facts("mellum")).local_rope is None
    local = spec(facts("mellum", rope__freq_base_swa=5e5)).local_rope
    assert local is not None
    assert local.theta == 5e5


def test_layers_of_lfm2() -> None:
    read = spec(facts("lfm2"))
    assert read.linear_layers == (0,)
    assert read.intermediate_size == 96
    assert spec(facts("lfm2", attention__head_count_kv=4)).linear is None
    experts = spec(facts("lfm2moe", "blk.1.exp_probs_b.bias")).experts
    assert experts is not None
    assert (experts.corrected, experts.normalized, experts.layers) == (True, True, (False, True))
    uncorrected = spec(facts("lfm2moe")).experts
    assert uncorrected is not None
    assert uncorrected.corrected is None
    for heads, message in (
        ([2, 4], r"head_count_kv is \[2, 4\]; supported is one number"),
        ([0, -1], r"is \[0, -1\]; supported"),
        ([0, 0], r"is \[0, 0\]; supported"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            spec(facts("lfm2", attention__head_count_kv=heads))
    with pytest.raises(CheckpointError, match="has 3 entries for 2 layers"):
        spec(facts("lfm2", attention__head_count_kv=[0, 4, 4]))
    with pytest.raises(UnsupportedModelError, match=r"lfm2\.attention\.causal = False"):
        spec(facts("lfm2", attention__causal=False))


def test_which_layers_slide() -> None:
    """As a list says, or all but every fourth."""
    for architecture in ("afmoe", "cohere2", "exaone-moe"):
        read = spec(facts(architecture, block_count=5))
        assert read.sliding_window == (8, 8, 8, None, 8)
        assert read.rotated_layers == (True, True, True, False, True)
        two = spec(facts(architecture, block_count=5, attention__sliding_window_pattern=2))
        assert two.sliding_window == (8, None, 8, None, 8)
        told = [False, True, True, False, True]
        listed = spec(facts(architecture, block_count=5, attention__sliding_window_pattern=told))
        assert listed.sliding_window == (None, 8, 8, None, 8)


def test_windows_of_exaone4() -> None:
    assert spec(facts("exaone4")).rotated_layers is None
    with pytest.raises(UnsupportedModelError, match=r"rope\.freq_base_swa is 5\.0"):
        spec(facts("exaone4", attention__sliding_window=8, rope__freq_base_swa=5.0))
    windowed = spec(facts("exaone4", block_count=4, attention__sliding_window=8))
    assert windowed.sliding_window == (8, 8, 8, None)
    largest = spec(facts("exaone4", block_count=64))
    assert largest.sliding_window == (4096, 4096, 4096, None) * 16


def test_layers_that_guess_further_tokens_of_k_exaone() -> None:
    read = spec(facts("exaone-moe", block_count=5, nextn_predict_layers=1))
    assert read.num_layers == 4
    assert read.sliding_window == (8, 8, 8, None)
    told = [True, False, True, False]
    keys = {"nextn_predict_layers": 1, "attention__sliding_window_pattern": told}
    listed = spec(facts("exaone-moe", block_count=5, **keys))
    assert listed.sliding_window == (8, None, 8, None)


def test_sizes_of_qwen3_next() -> None:
    read = spec(facts("qwen3next", rope__dimension_count=4))
    assert read.rope.rotary_dim == 4
    assert read.linear is not None
    assert (read.linear.conv_state, read.linear.recurrent_state) == ((96, 3), (4, 8, 16))
    assert read.linear_layers == (0,)
    assert spec(facts("qwen3next")).rope.rotary_dim == 16
    with pytest.raises(CheckpointError, match=r"ssm\.inner_size is 30, of 4 heads"):
        spec(facts("qwen3next", ssm__inner_size=30))


@pytest.mark.parametrize("further", [2, 5, -1])
def test_more_layers_behind_the_last_than_there_are(further: int) -> None:
    with pytest.raises(CheckpointError, match=f"nextn_predict_layers is {further}, and there are"):
        spec(facts("qwen35", nextn_predict_layers=further))


def test_layers_behind_the_last_of_qwen3_5() -> None:
    read = spec(facts("qwen35", block_count=3, nextn_predict_layers=1))
    assert (read.num_layers, read.linear_layers) == (2, (0,))


def test_olmo_3_is_known_by_its_windows() -> None:
    assert spec(facts("olmo2")).family == "olmo2"
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    keys |= {"rope__scaling__original_context_length": 64, "rope__freq_base": 500.0}
    read = spec(facts("olmo2", block_count=4, attention__sliding_window=8, **keys))
    assert read.family == "olmo3"
    assert read.sliding_window == (8, 8, 8, None)
    assert read.local_rope is not None
    assert (read.rope.type, read.local_rope.type, read.local_rope.theta) == ("yarn", "default", 500)


def test_experts_of_ernie() -> None:
    read = spec(facts("ernie4_5-moe", block_count=4, interleave_moe_layer_step=2))
    assert read.experts is not None
    assert read.experts.layers == (False, True, False, True)
    assert (read.experts.normalized, read.experts.corrected) == (True, True)
    assert read.experts.shared_size is None
    shared = {"expert_shared_count": 2, "expert_shared_feed_forward_length": 5}
    beside = spec(facts("ernie4_5-moe", **shared)).experts
    assert beside is not None
    assert beside.shared_size == 64
