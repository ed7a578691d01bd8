"""Tiny random checkpoints of every family, made with transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB = 160
TOKENS = 32
EXPERT_WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")
# Families whose norms' weights are stored minus one, but for those of delta nets.
OFFSET_NORMS = (
    *("gemma", "gemma2", "gemma3_text", "nemotron", "vaultgemma"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
CENTRES: Mapping[str, float] = {"linear_attn.norm.weight": 1.0, "A_log": -2.0}  # of long memories

_QWEN_VISION: Mapping[str, int] = {
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
VISION: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"model_type": "siglip_vision_model"},
    "gemma4": {"num_key_value_heads": 2, "head_dim": 8},
    "llama4": {
        **{"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
        **{"image_size": 28, "patch_size": 14},
    },
    "mistral3": {"model_type": "pixtral", "head_dim": 8},
    "qwen2_5_vl": {**_QWEN_VISION, "hidden_size": 32, "window_size": 28},
    "qwen3_vl": {**_QWEN_VISION, "hidden_size": 32, "deepstack_visual_indexes": [0]},
    "qwen3_5": _QWEN_VISION,
    "qwen3_5_moe": _QWEN_VISION,
}
BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GEMMA4: Mapping[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 8.0,
    "rms_norm_eps": 0.05,  # so that each norm's tells
    "tie_word_embeddings": True,
}
GEMMA3N: Mapping[str, Any] = {
    "head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 32,
    "final_logit_softcapping": 8.0,
    "rms_norm_eps": 0.05,  # so that each norm's tells
    "tie_word_embeddings": True,
}
# Large enough that coefficients of streams differ, and for scores, which are not scaled.
OF_GEMMA3N: Mapping[str, float] = {
    "router_norm.weight": 4.0,
    "correct_output_scale": 1.0,
    "q_norm.weight": 0.25,
}
GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
MINISTRAL_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 2.0,
    "original_max_position_embeddings": 24,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


_LLAMA4: Mapping[str, Any] = {
    "head_dim": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "attn_scale": 0.1,
    "floor_scale": 10,
    "attention_chunk_size": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


@dataclass(frozen=True)
class Case:
    """One checkpoint to make."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)  # what differs from the base
    dtype: torch.dtype = torch.float32
    shards: bool = False
    context_length: int | None = None  # of the export
    inside: str | None = None  # a model that reads images, too
    mxfp4: bool = False  # experts of one tensor are stored in it
    centres: Mapping[str, float] = field(default_factory=dict)  # as CENTRES


def _rope(kind: str, **values: Any) -> Case:
    parameters = {"rope_type": kind, "rope_theta": 500.0, **values}
    return Case("llama", {"rope_parameters": parameters})


def _yarn(**values: Any) -> Case:
    return _rope("yarn", factor=4.0, original_max_position_embeddings=16, **values)


def _longrope() -> Case:
    """As Phi-4 mini has it; exported for the original context, within which no key changes."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
    }
    config = {"rope_parameters": parameters, "original_max_position_embeddings": 64}
    sizes = {"hidden_size": 128, "tie_word_embeddings": True, "pad_token_id": 0}
    return Case("phi3", {**config, **sizes}, context_length=64)


LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LATENT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
# Of attention alone.
LATENT_SIZES = (
    *("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "rope_parameters"),
)
_GROWS: Mapping[str, Any] = {"original_max_position_embeddings": 10, "llama_4_scaling_beta": 0.1}
_GROWING: Mapping[str, Any] = {**LATENT_ROPE, **_GROWS, "factor": 2.0}


_MINICPM3: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "scale_emb": 6,
    "dim_model_base": 48,
}
_GRANITE_SWA: Mapping[str, Any] = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
    "rms_norm_eps": 0.05,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"],
}
_OPT: Mapping[str, Any] = {
    "ffn_dim": 96,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
}
_GPT2: Mapping[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "layer_norm_epsilon": 0.05,
    "tie_word_embeddings": True,
}
_FALCON: Mapping[str, Any] = {"layer_norm_epsilon": 0.05, "tie_word_embeddings": True}
_GPT_NORMS: Mapping[str, float] = dict.fromkeys(
    (*("ln_1.weight", "ln_2.weight", "ln_f.weight"), "ln_attn.weight", "ln_mlp.weight"), 1.0
)
# Families whose keys have names of their own for those of BASE, and what others they do not read.
_OWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "falcon": ("intermediate_size", "num_key_value_heads"),
    "opt": ("intermediate_size", "num_key_value_heads"),
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode", "gptj"),
        (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "max_position_embeddings"),
        ),
    ),
}
CASES: Mapping[str, Case] = {
    "deepseek-v2": Case(  # as V2 has it: groups, of which the best expert counts
        "deepseek_v2",
        {
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": LATENT_ROPE,
        },
        torch.bfloat16,
    ),
    "deepseek-v2-lite": Case(
        "deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 1, "v_head_dim": 16}
    ),
    "deepseek-v3": Case(
        "deepseek_v3",
        {
            **LATENT,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": LATENT_ROPE,
        },
        torch.bfloat16,
    ),
    "deepseek-v3-halves": Case(  # as Moonlight, but for what rotates with what
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
        },
        shards=True,
    ),
    "minicpm3": Case(
        "minicpm3",
        {
            **_MINICPM3,
            "q_lora_rank": 24,
            "scale_depth": 1.4,
            "rms_norm_eps": 0.05,
            "rope_parameters": LATENT_ROPE,
        },
        torch.bfloat16,
    ),
    "minicpm3-plain": Case(
        "minicpm3", {**_MINICPM3, "q_lora_rank": None, "v_head_dim": 8, "tie_word_embeddings": True}
    ),
    "mistral4": Case(  # groups, of which the two best experts count; queries grow behind 10 tokens
        "mistral4",
        {
            **LATENT,
            "first_k_dense_replace": 0,
            "qk_nope_head_dim": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**LATENT_ROPE, **_GROWS, "partial_rotary_factor": 1 / 3},
            "pad_token_id": 0,
        },
        torch.bfloat16,
        inside="mistral3",
    ),
    "mistral4-halves": Case(
        "mistral4",
        {
            **LATENT,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "rope_interleave": False,
            "rope_parameters": _GROWING,
            "tie_word_embeddings": True,
        },
        inside="mistral3",
    ),
    "youtu": Case(
        "youtu",
        {
            **{key: one for key, one in LATENT.items() if key in LATENT_SIZES},
            "rms_norm_eps": 0.05,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "youtu-halves": Case(
        "youtu",
        {
            **{key: one for key, one in LATENT.items() if key in LATENT_SIZES},
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": LATENT_ROPE,
        },
    ),
    "hy-v3": Case(
        "hy_v3",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "router_scaling_factor": 2.5,
            "rms_norm_eps": 0.05,
        },
        torch.bfloat16,
    ),
    "hy-v3-biases": Case(
        "hy_v3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "sparse"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe": Case(  # a logit in three is near enough to another one that both are mixed
        "phimoe",
        {
            "num_local_experts": 8,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "rms_norm_eps": 0.05,
            "sliding_window": 6,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [1.0 + i for i in range(8)],
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 64,
            },
        },
        torch.bfloat16,
        context_length=64,
    ),
    "phimoe-plain": Case(
        "phimoe", {"num_local_experts": 4, "num_key_value_heads": 4, "router_jitter_noise": 0.01}
    ),
    "mellum": Case(  # layers with a window have a RoPE of their own
        "mellum",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "rms_norm_eps": 0.05,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        torch.bfloat16,
    ),
    "mellum-full": Case(
        "mellum",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "cohere2-moe": Case(  # the first layer is dense, sees all, and rotates all the same
        "cohere2_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "layer_norm_eps": 0.05,
            "logit_scale": 2.0,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 80,
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
        torch.bfloat16,
    ),
    "cohere2-moe-softmax": Case(  # RMSNorms; what is shared is added whole
        "cohere2_moe",
        {
            "head_dim": 16,
            "rms_norm_eps": 0.05,
            "logit_scale": 2.0,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "prefix_dense_sliding_window_pattern": 4,
            "intermediate_size": 32,
            "num_experts": 4,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "attention_bias": True,
            "pad_token_id": 0,
        },
    ),
    "cohere2-moe-alone": Case(  # nothing is shared, and scores are as sigmoids have them
        "cohere2_moe",
        {
            "head_dim": 16,
            "logit_scale": 2.0,
            "intermediate_size": 32,
            "num_experts": 4,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "pad_token_id": 0,
        },
    ),
    "glm4-moe-lite": Case(
        "glm4_moe_lite",
        {name: one for name, one in LATENT.items() if name != "first_k_dense_replace"},
        torch.bfloat16,
    ),
    "glm": Case("glm", {"head_dim": 32, "pad_token_id": 0}, torch.bfloat16),
    "helium": Case("helium", {"head_dim": 16, "pad_token_id": 0}),
    "gemma": Case(
        "gemma",
        {"head_dim": 32, "rms_norm_eps": 0.05, "hidden_act": "gelu", "tie_word_embeddings": True},
        torch.bfloat16,
    ),
    "gemma-biases": Case(
        "gemma", {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True}
    ),
    "gemma2": Case(  # caps that scores and logits reach
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "rms_norm_eps": 0.05,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "gemma2-uncapped": Case(
        "gemma2",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rms_norm_eps": 0.05,  # so that each norm's tells
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "gemma3-linear": Case(
        "gemma3_text",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": True,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 500.0,
            "rope_local_base_freq": 40.0,
        },
    ),
    "gemma3-images": Case(
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
        inside="gemma3",
    ),
    "gemma3n": Case(  # layers read the K/V of others, gates are cut off, tokens lack inputs
        "gemma3n_text",
        {
            **GEMMA3N,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.6, 0.8, 0.0, 0.7],
            "vocab_size_per_layer_input": VOCAB - 30,
        },
        torch.bfloat16,
        centres=OF_GEMMA3N,
    ),
    "gemma3n-plain": Case(  # another stream is the active one, and nothing is shared or cut off
        "gemma3n_text",
        {
            **GEMMA3N,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
        centres=OF_GEMMA3N,
    ),
    "gemma4": Case(  # as 31B: heads of two sizes, keys that are values, windows
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        torch.bfloat16,
    ),
    "gemma4-shared": Case(  # as E2B: layers are told of tokens, and read the K/V of others
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
        },
        centres={"q_norm.weight": 0.4},  # as scores are not scaled
    ),
    "gemma4-windows": Case(  # layers with a window take most of the memory, and give it up
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 8,
            "layer_types": ["sliding_attention"] * 5
            + ["full_attention", "sliding_attention", "full_attention"],
            "num_key_value_heads": 4,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        centres={"q_norm.weight": 0.4},
    ),
    "gemma4-moe": Case(  # as 26B-A4B: experts beside a feed-forward layer
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
        torch.bfloat16,
        centres={"router.scale": 1.0, "per_expert_scale": 1.0},
    ),
    "gemma4-moe-all": Case(  # every token is given to all experts, so that rounding chooses none
        "gemma4_text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 16,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4-images": Case(
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": None,
            "global_head_dim": 16,
        },
        torch.bfloat16,
        inside="gemma4",
    ),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite-biases": Case(
        "granite",
        {
            "embedding_multiplier": 3,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "attention_bias": True,
            "mlp_bias": True,
        },
        torch.bfloat16,
    ),
    "granite-swa": Case(  # another base in layers with a window, and one layer rotates nothing
        "granite_swa",
        {
            **_GRANITE_SWA,
            "num_hidden_layers": 4,
            "layer_types": None,
            "layer_rope_theta": [500.0, 100.0, 0, 100.0],
            "attention_bias": True,
            "mlp_bias": True,
        },
        torch.bfloat16,
    ),
    "granitemoe-swa": Case(  # layers that see all rotate nothing
        "granitemoe_swa",
        {
            **_GRANITE_SWA,
            "layer_rope_theta": [0, 100.0],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe-swa-plain": Case(
        "granitemoe_swa",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 6},
        torch.bfloat16,
    ),
    "hyperclovax": Case(
        "hyperclovax",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 1.5,
            "rms_norm_eps": 0.05,
            "head_dim": 32,
            "attention_bias": True,
        },
        torch.bfloat16,
    ),
    "hyperclovax-plain": Case(  # no norms on what layers add
        "hyperclovax",
        {"use_post_norm": False, "embedding_multiplier": 2.0, "tie_word_embeddings": True},
    ),
    "iquestcoder": Case("iquestcoder", {"head_dim": 32, "attention_bias": True}, torch.bfloat16),
    "cwm": Case(
        "cwm",
        {
            "head_dim": 32,
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        torch.bfloat16,
    ),
    "jais2": Case("jais2", {"layer_norm_eps": 0.05, "head_dim": 32}, torch.bfloat16),
    "jais2-plain": Case(
        "jais2",
        {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
    "vaultgemma": Case(
        "vaultgemma",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "rms_norm_eps": 0.05,
            "tie_word_embeddings": True,
        },
    ),
    "internlm3": Case("internlm3", {"head_dim": 32}, torch.bfloat16),
    "internlm3-biases": Case(
        "internlm3",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama": Case("llama"),
    "llama-mha": Case("llama", {"num_key_value_heads": 4}, torch.bfloat16),
    "llama-mqa-biases": Case(
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "llama-tied": Case("llama", {"tie_word_embeddings": True}, torch.bfloat16, shards=True),
    "llama-one-layer": Case("llama", {"num_hidden_layers": 1}, torch.float16),
    "llama-linear": _rope("linear", factor=3.0),
    "llama-dynamic": _rope("dynamic", factor=2.0),
    "llama-llama3": _rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "llama-yarn": _yarn(),
    "llama-yarn-mscale": _yarn(mscale=0.7, mscale_all_dim=1.3, truncate=False),
    "llama-yarn-given": _yarn(attention_factor=0.9, beta_fast=16.0, beta_slow=2.0),
    "mistral": Case("mistral", {"sliding_window": None}, torch.float16, shards=True),
    "ministral": Case(
        "ministral",
        {
            **{"sliding_window": 6, "head_dim": 32, "rms_norm_eps": 0.05},
            "layer_types": ["full_attention", "sliding_attention"],
        },
        torch.bfloat16,
    ),
    "mistral-window": Case("mistral", {"sliding_window": 7, "head_dim": 32}),
    "mistral3": Case(
        "mistral",
        {"sliding_window": None, "head_dim": 32, "rms_norm_eps": 1e-5},
        torch.bfloat16,
        shards=True,
        inside="mistral3",
    ),
    "gpt-oss": Case(  # experts in MXFP4
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_limit": 0.7,
            "pad_token_id": 0,
            "rope_parameters": GPT_OSS_ROPE,
        },
        torch.bfloat16,
        mxfp4=True,
    ),
    "gpt-oss-16bit": Case(
        "gpt_oss",
        {
            "head_dim": 16,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "pad_token_id": 0,
            "rope_parameters": GPT_OSS_ROPE,
        },
        torch.bfloat16,
    ),
    "ministral3": Case(
        "ministral3",
        {"rope_parameters": MINISTRAL_ROPE, "head_dim": 32, "tie_word_embeddings": True},
        torch.bfloat16,
        inside="mistral3",
    ),
    "ministral3-text": Case("ministral3", {"rope_parameters": MINISTRAL_ROPE, "head_dim": 16}),
    "llama4": Case(  # every second layer has experts
        "llama4_text",
        {
            **_LLAMA4,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 16.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 1.0},
                "original_max_position_embeddings": 32,
            },
        },
        inside="llama4",
    ),
    "llama4-plain": Case(  # as Maverick, without norms of heads
        "llama4_text",
        {
            **_LLAMA4,
            "use_qk_norm": False,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "rms_norm_eps": 0.05,
        },
        torch.bfloat16,
    ),
    "llama4-chunks": Case(
        "llama4_text",
        {**_LLAMA4, "num_hidden_layers": 4, "attention_chunk_size": 11},
        context_length=128,
    ),
    "llama4-dense": Case(  # as MobileLLM-R1
        "llama4_text",
        {
            **_LLAMA4,
            "no_rope_layers": [1, 1],
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "attn_temperature_tuning": False,
            "rms_norm_eps": 0.05,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe": Case(  # experts of one tensor
        "granitemoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "granitemoeshared": Case(
        "granitemoeshared",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-moe": Case(
        "qwen2_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        torch.bfloat16,
    ),
    "ernie-moe": Case(  # the first layer has none
        "ernie4_5_moe",
        {
            "head_dim": 16,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "glm4": Case("glm4", {"head_dim": 32, "pad_token_id": 0, "rms_norm_eps": 0.05}, torch.bfloat16),
    "flex-olmo": Case(
        "flex_olmo", {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0}, torch.bfloat16
    ),
    "flex-olmo-biases": Case(
        "flex_olmo",
        {
            "num_key_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "glm4-moe": Case(
        "glm4_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        torch.bfloat16,
    ),
    "dots1": Case(
        "dots1",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    "solar-open-groups": Case(
        "solar_open",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "intermediate_size": None,
        },
    ),
    "solar-open": Case(
        "solar_open",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "intermediate_size": None,  # which transformers does not write: no layer is dense
        },
    ),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "olmoe": Case("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}, torch.bfloat16),
    "qwen3-moe": Case(  # the first layer has none; more experts than WebGPU binds outputs at once
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3-moe-window": Case(
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "apertus": Case(
        "apertus",
        {"head_dim": 32, "attention_bias": True, "rms_norm_eps": 0.05},
        torch.bfloat16,
    ),
    "apertus-relu": Case(
        "apertus",
        {
            "hidden_act": "relu2",
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "arcee": Case("arcee", {"head_dim": 32, "tie_word_embeddings": True}, torch.bfloat16),
    "arcee-biases": Case(
        "arcee",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "silu", "head_dim": 16},
        shards=True,
    ),
    "nanochat": Case(  # as published: a cap of logits, which in a model as small tells nothing
        "nanochat", {"final_logit_softcapping": 4.0, "rms_norm_eps": 0.05}, torch.bfloat16
    ),
    "nanochat-biases": Case(
        "nanochat",
        {
            **{"attention_bias": True, "hidden_act": "gelu", "final_logit_softcapping": None},
            "tie_word_embeddings": True,
        },
    ),
    "nemotron": Case(
        "nemotron", {"head_dim": 32, "norm_eps": 0.05, "mlp_bias": True}, torch.bfloat16
    ),
    "nemotron-biases": Case(
        "nemotron",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "partial_rotary_factor": 1.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi": Case(  # a part of each head rotates that ONNX Runtime's own attention takes
        "phi", {"hidden_size": 128, "layer_norm_eps": 0.05}, torch.bfloat16
    ),
    "phi-mha": Case(
        "phi",
        {"num_key_value_heads": 4, "partial_rotary_factor": 1.0, "hidden_act": "gelu"},
        shards=True,
    ),
    "starcoder2": Case("starcoder2", {"sliding_window": 6, "norm_epsilon": 0.05}, torch.bfloat16),
    "starcoder2-plain": Case(
        "starcoder2",
        {"use_bias": False, "head_dim": 32, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "opt": Case("opt", _OPT, torch.bfloat16, shards=True),
    "opt-350m": Case(  # norms of the stream, and products around a narrower embedding
        "opt", {**_OPT, "word_embed_proj_dim": 48, "do_layer_norm_before": False}
    ),
    "opt-plain": Case(
        "opt",
        {
            **_OPT,
            "activation_function": "gelu",
            "enable_bias": False,
            "_remove_final_layer_norm": True,
        },
    ),
    "gpt2": Case("gpt2", _GPT2, torch.bfloat16, centres=_GPT_NORMS),
    "gpt2-plain": Case("gpt2", {**_GPT2, "tie_word_embeddings": False}, centres=_GPT_NORMS),
    "gpt2-scales": Case(
        "gpt2",
        {
            **_GPT2,
            "n_inner": 96,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
        shards=True,
        centres=_GPT_NORMS,
    ),
    "gpt-bigcode": Case("gpt_bigcode", _GPT2, torch.bfloat16, centres=_GPT_NORMS),
    "gpt-bigcode-heads": Case(
        "gpt_bigcode",
        {**_GPT2, "multi_query": False, "scale_attn_weights": False},
        centres=_GPT_NORMS,
    ),
    "gptj": Case(
        "gptj",
        {**_GPT2, "n_embd": 128, "rotary_dim": 16, "tie_word_embeddings": False},
        centres=_GPT_NORMS,
    ),
    "falcon": Case("falcon", _FALCON, torch.bfloat16, centres=_GPT_NORMS),
    "falcon-new": Case(
        "falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        centres=_GPT_NORMS,
    ),
    "falcon-new-norm": Case(
        "falcon",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "tie_word_embeddings": False,
        },
        centres=_GPT_NORMS,
    ),
    "falcon-turns": Case(
        "falcon",
        {**_FALCON, "parallel_attn": False, "multi_query": False, "bias": True},
        centres=_GPT_NORMS,
    ),
    "gpt-neox": Case(
        "gpt_neox",
        {
            "hidden_size": 128,
            "num_key_value_heads": 4,
            "rotary_pct": 0.5,
            "layer_norm_eps": 0.05,
        },
        torch.bfloat16,
    ),
    "gpt-neox-turns": Case(  # attention and MLP one after the other
        "gpt_neox",
        {
            "num_key_value_heads": 4,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rotary_pct": 1.0,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": Case(
        "stablelm",
        {
            "hidden_size": 128,
            "partial_rotary_factor": 0.5,
            "use_qkv_bias": True,
            "layer_norm_eps": 0.05,
        },
        torch.bfloat16,
    ),
    "stablelm-parallel": Case(
        "stablelm",
        {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "afmoe": Case(  # the first layer has no experts; scaled embeddings
        "afmoe",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "route_scale": 2.5,
            "mup_enabled": True,
            "rms_norm_eps": 0.05,
        },
        torch.bfloat16,
    ),
    "afmoe-dense": Case(
        "afmoe",
        {
            "num_dense_layers": 2,
            "head_dim": 16,
            "sliding_window": 6,
            "global_attn_every_n_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "laguna": Case(  # as published: two RoPEs, and more query heads where there is a window
        "laguna",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_attention_heads": 6,
            "num_attention_heads_per_layer": [6, 8, 6],
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 0.5,
            "rms_norm_eps": 0.05,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 64.0,
                    "beta_slow": 1.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        torch.bfloat16,
    ),
    "laguna-full": Case(  # a gate a channel; the first layers are dense
        "laguna",
        {
            "head_dim": 32,
            "gating": "per-element",
            "mlp_layer_types": ["sparse", "dense"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "moe_routed_scaling_factor": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "mimo-v2-flash": Case(  # as published, but for sizes: see the family
        "mimo_v2_flash",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "v_head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": None,
            "rms_norm_eps": 0.05,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 300.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
        torch.bfloat16,
    ),
    "mimo-v2-flash-whole": Case(  # every layer sees all, and values are as wide as keys
        "mimo_v2_flash",
        {
            "head_dim": 48,
            "v_head_dim": 48,
            "layer_types": ["full_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 32,
            "attention_value_scale": None,
            "tie_word_embeddings": True,
        },
    ),
    "mimo-v2-flash-windows": Case(  # every layer has a window; values are narrower
        "mimo_v2_flash",
        {
            "head_dim": 32,
            "v_head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense"],
        },
    ),
    "axk1": Case(  # what experts and the shared layer add is normalized together
        "axk1",
        {
            **{key: one for key, one in LATENT.items() if key != "first_k_dense_replace"},
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 0.05,
            "rope_parameters": LATENT_ROPE,
        },
        torch.bfloat16,
    ),
    "cohere": Case(
        "cohere",
        {
            "layer_norm_eps": 0.05,
            "logit_scale": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        torch.bfloat16,
    ),
    "cohere-norms": Case(  # as Command R+: each head of queries and keys has a norm of its own
        "cohere",
        {"hidden_size": 128, "use_qk_norm": True, "layer_norm_eps": 0.05, "logit_scale": 2.0},
        torch.bfloat16,
    ),
    "cohere2": Case(  # layers that see all rotate nothing
        "cohere2",
        {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "layer_norm_eps": 0.05,
            "logit_scale": 0.5,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        torch.bfloat16,
        shards=True,
    ),
    "exaone4": Case(  # layers that see all rotate nothing
        "exaone4",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rms_norm_eps": 0.05,
        },
        torch.bfloat16,
    ),
    "exaone4-full": Case(  # as 1.2B: no window, so all rotate
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "exaone-moe": Case(
        "exaone_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
        },
        torch.bfloat16,
    ),
    "hunyuan": Case(  # RoPE of another base, and norms behind it
        "hunyuan_v1_dense",
        {
            "head_dim": 32,
            "rms_norm_eps": 0.05,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 500.0,
                "alpha": 8.0,
                "factor": 1.0,
                "beta_fast": 32,
            },
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "hunyuan-biases": Case(
        "hunyuan_v1_dense", {"num_key_value_heads": 4, "attention_bias": True, "head_dim": 16}
    ),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": 8,
            "moe_topk": 3,
            "intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 500.0,
                "alpha": 8.0,
                "factor": 1.0,
            },
        },
        torch.bfloat16,
    ),
    "minimax-m2": Case(  # half of each head rotates
        "minimax_m2",
        {
            "head_dim": 32,
            "rotary_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rms_norm_eps": 0.05,
        },
        torch.bfloat16,
    ),
    "minimax-m2-tied": Case(  # every token is given to all experts, so that rounding chooses none
        "minimax_m2",
        {
            "head_dim": 16,
            "num_key_value_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
        },
    ),
    "olmo": Case("olmo", {"clip_qkv": 1.0}, torch.bfloat16),  # which many numbers are beyond
    "olmo-biases": Case("olmo", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": Case("olmo2", {"rms_norm_eps": 0.05}, torch.bfloat16),
    "olmo2-biases": Case(
        "olmo2",
        {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
        shards=True,
    ),
    "olmo3": Case(
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        torch.bfloat16,
    ),
    "granite-4-attention": Case(  # no layer is a state space
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "embedding_multiplier": 6.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
        },
    ),
    "phi3": Case("phi3", {"sliding_window": None, "pad_token_id": 0}, torch.bfloat16, shards=True),
    "phi3-window": Case("phi3", {"sliding_window": 6, "num_key_value_heads": 4, "pad_token_id": 0}),
    "phi3-longrope": _longrope(),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}, torch.bfloat16),
    "qwen2-window": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen2-ragged": Case(  # no width is a multiple of a quantization block
        "qwen2", {"hidden_size": 80, "intermediate_size": 112, "head_dim": 32}
    ),
    "qwen3": Case("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, torch.bfloat16),
    "qwen3-biases": Case("qwen3", {"head_dim": 16, "attention_bias": True}),
    "ernie": Case("ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}, torch.bfloat16),
    "ernie-biases": Case("ernie4_5", {"head_dim": None, "use_bias": True}),
    "seed-oss": Case("seed_oss", {"head_dim": 32, "attention_out_bias": True}),
    "smollm3": Case(
        "smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True, "pad_token_id": 0}
    ),
    "smollm3-window": Case(
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": 0,
        },
    ),
    "qwen3-window": Case(
        "qwen3",
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


_DELTA_NETS: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 0.05,  # so that each norm's tells
    "pad_token_id": 0,
}
_SHARED_EXPERT: Mapping[str, Any] = {
    **_DELTA_NETS,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_FULL, _LINEAR = "full_attention", "linear_attention"
# Models with layers that have a state in place of keys and values.
_OLMO_HYBRID: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "rms_norm_eps": 0.05,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
HYBRID: Mapping[str, Case] = {
    "qwen3.5": Case("qwen3_5_text", _DELTA_NETS, torch.bfloat16),
    "qwen3.5-tied": Case(  # as many heads of keys and values, and a layer of a state is the last
        "qwen3_5_text",
        {
            **_DELTA_NETS,
            "num_hidden_layers": 3,
            "layer_types": [_FULL, _LINEAR, _LINEAR],
            "num_key_value_heads": 4,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-yarn": Case(
        "qwen3_5_text",
        {
            **_DELTA_NETS,
            "num_hidden_layers": 2,
            "layer_types": [_LINEAR, _FULL],
            "linear_num_key_heads": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        torch.bfloat16,
    ),
    "qwen3.5-images": Case(
        "qwen3_5_text",
        {**_DELTA_NETS, "tie_word_embeddings": True},
        torch.bfloat16,
        inside="qwen3_5",
    ),
    "olmo-hybrid": Case("olmo_hybrid", _OLMO_HYBRID, torch.bfloat16),
    "olmo-hybrid-rope": Case(  # value heads share keys, and how much of them is new is at most 1
        "olmo_hybrid",
        {
            **_OLMO_HYBRID,
            "num_hidden_layers": 2,
            "layer_types": [_FULL, _LINEAR],
            "linear_num_value_heads": 8,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 2,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": Case("qwen3_5_moe_text", _SHARED_EXPERT),
    "qwen3.5-moe-images": Case(
        "qwen3_5_moe_text", _SHARED_EXPERT, torch.bfloat16, shards=True, inside="qwen3_5_moe"
    ),
    "qwen3-next": Case("qwen3_next", _SHARED_EXPERT, torch.bfloat16),
    "qwen3-next-dense-layers": Case(
        "qwen3_next",
        {
            **_SHARED_EXPERT,
            "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR],
            "linear_num_key_heads": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
}
_KIMI: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 0.05,  # so that each norm's tells
    "pad_token_id": 0,
}
# Decays of each channel, and attention of latents.
KIMI: Mapping[str, Case] = {
    "kimi-linear": Case(
        "kimi_linear",
        {**_KIMI, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]},
        torch.bfloat16,
    ),
    "kimi-linear-groups": Case(  # the queries of latents, too; a layer with attention is the last
        "kimi_linear",
        {
            **_KIMI,
            "num_hidden_layers": 3,
            "layer_types": [_FULL, _LINEAR, _FULL],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "q_lora_rank": 24,
            "linear_conv_kernel_dim": 3,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    ),
}
_SPACES: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_expand": 3,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "rms_norm_eps": 0.05,
    "pad_token_id": 0,
}
_GRANITE_4: Mapping[str, Any] = {
    **_SPACES,
    "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "shared_intermediate_size": 64,
    "embedding_multiplier": 6.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}
_NEMOTRON: Mapping[str, Any] = {
    "layers_block_type": [_LINEAR, "mlp", _LINEAR, "full_attention", "mlp", _LINEAR, "mlp"],
    "num_hidden_layers": None,
    "head_dim": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 3,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "time_step_min": 1e-9,  # by which transformers limits steps of prompts, and of nothing else
    "layer_norm_epsilon": 0.05,
}
_NEMOTRON_EXPERTS: Mapping[str, Any] = {
    **_NEMOTRON,
    "layers_block_type": [_LINEAR, "moe", _LINEAR, _FULL, "moe", _LINEAR, "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 2.5,
}
# Experts without a gate, which no graph for onnxruntime-genai has.
UNGATED_EXPERTS: Mapping[str, Case] = {
    "nemotron-3": Case("nemotron_h", _NEMOTRON_EXPERTS, torch.bfloat16),
    "nemotron-3-groups": Case(  # experts beside a feed-forward layer, and in groups
        "nemotron_h",
        {
            **_NEMOTRON_EXPERTS,
            "layers_block_type": [_FULL, "moe", _LINEAR, "mlp", _LINEAR, "moe", _FULL],
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_bias": True,
            "moe_shared_expert_intermediate_size": 96,
        },
    ),
}
# Models with state spaces.
SPACES: Mapping[str, Case] = {
    "granite-4": Case("granitemoehybrid", _GRANITE_4, torch.bfloat16),
    "granite-4-dense": Case(  # groups, and a layer of a state is the last
        "granitemoehybrid",
        {
            **_GRANITE_4,
            "layer_types": [_FULL, _LINEAR, _FULL, _LINEAR],
            "num_local_experts": 0,
            "mamba_n_groups": 3,
            "mamba_d_conv": 2,
            "mamba_conv_bias": False,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": Case("nemotron_h", _NEMOTRON, torch.bfloat16),
    "nemotron-h-biases": Case(  # attention is the last block
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": ["full_attention", "mlp", _LINEAR, "full_attention"],
            "n_groups": 1,
            "use_conv_bias": False,
            "mlp_bias": True,
        },
    ),
    "bamba": Case("bamba", {**_SPACES, "attn_layer_indices": [1, 2]}, torch.bfloat16),
    "bamba-biases": Case(
        "bamba",
        {
            **_SPACES,
            "num_hidden_layers": 2,
            "attn_layer_indices": [0],
            "mamba_n_groups": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}

_FALCON_H1: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "rms_norm_eps": 0.05,
    "pad_token_id": 0,
    # Each another number, so that each tells.
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.4,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.5,
    "mlp_multipliers": [0.8, 0.45],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 1.2, 0.75, 0.85, 1.4],
}
# Models with attention and a state space in every layer.
BOTH: Mapping[str, Case] = {
    "falcon-h1": Case("falcon_h1", _FALCON_H1, torch.bfloat16),
    "falcon-h1-norm": Case(  # which published ones may have, and of which some have one group
        "falcon_h1",
        {
            **_FALCON_H1,
            "mamba_d_ssm": None,
            "mamba_expand": 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
}
SPACES = {**SPACES, **BOTH}

_CONV, _SLIDING = "conv", "sliding_attention"
_SHORT_CONV: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": [_CONV, _CONV, _FULL, _CONV],
    "norm_eps": 0.05,  # so that each norm's tells
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
_LFM3: Mapping[str, Any] = {
    "head_dim": 32,
    "norm_eps": 0.05,
    "pad_token_id": 0,
    "sliding_window": 6,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        _FULL: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
}
# Models with layers that are a convolution.
SHORT_CONV: Mapping[str, Case] = {
    "lfm2": Case("lfm2", {**_SHORT_CONV, "block_multiple_of": 48}, torch.bfloat16),
    "lfm2-biases": Case(  # attention in the last layer, and in none beside it
        "lfm2",
        {
            **_SHORT_CONV,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "layer_types": [_CONV, _FULL],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_embedding": True,
        },
        shards=True,
    ),
    "lfm2-moe": Case(  # the first layer has none
        "lfm2_moe",
        {
            **_SHORT_CONV,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "tie_embedding": True,
        },
        torch.bfloat16,
    ),
    "lfm2-moe-uncorrected": Case(
        "lfm2_moe",
        {
            **_SHORT_CONV,
            "num_hidden_layers": 3,
            "layer_types": [_FULL, _CONV, _CONV],
            "num_dense_layers": 0,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "use_expert_bias": False,
        },
    ),
    "lfm3": Case(  # as published: two RoPEs, a gate a head, norms on both sides, seven tokens
        "lfm3",
        {
            **_LFM3,
            "num_hidden_layers": 5,
            "layer_types": [_CONV, _CONV, _FULL, _CONV, _SLIDING],
        },
        torch.bfloat16,
    ),
    "lfm3-bare": Case(  # without what may be left out; every layer with attention has a window
        "lfm3",
        {
            **_LFM3,
            "num_hidden_layers": 2,
            "layer_types": [_SLIDING, _CONV],
            "rope_parameters": {_SLIDING: {"rope_type": "default", "rope_theta": 500.0}},
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
        },
    ),
}


def configuration(case: Case) -> PreTrainedConfig:
    """Transformers' configuration of a case."""
    unread = _OWN_KEYS.get(case.family, ())
    base = {key: value for key, value in BASE.items() if key not in unread}
    values = {**base, **case.config}
    if case.inside is None:
        return AutoConfig.for_model(case.family, **values)
    vision = {
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    }
    return AutoConfig.for_model(
        case.inside,
        text_config={**values, "model_type": case.family},
        vision_config=vision | VISION[case.inside],
        tie_word_embeddings=values["tie_word_embeddings"],
    )


def make(case: Case, folder: Path, seed: int = 0, **saving: Any) -> PreTrainedModel:
    """Write the checkpoint; returns the model in float32, with the weights as written.

    `saving` is what `save_pretrained` is told besides.
    """
    models = AutoModelForCausalLM if case.inside is None else AutoModelForImageTextToText
    torch.manual_seed(seed)
    model = models.from_config(configuration(case))
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight")
        centre = 1.0 if is_scale and case.family not in OFFSET_NORMS else 0.0
        centres = {**CENTRES, **case.centres}
        centre = next((one for end, one in centres.items() if name.endswith(end)), centre)
        spread = 0.2 if parameter.ndim == 1 else 2 / parameter.shape[-1] ** 0.5
        parameter.data = torch.randn_like(parameter) * spread + centre
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            buffer.copy_(torch.randn_like(buffer) * 0.3)
        if name.endswith("layer_scalar"):
            buffer.copy_(torch.rand_like(buffer) * 0.5 + 0.5)
    if case.dtype != torch.float32:  # else `to` might spoil complex buffers
        model.to(case.dtype)
    packed = _pack_experts(model) if case.mxfp4 else {}
    model.save_pretrained(folder, max_shard_size="20KB" if case.shards else "5GB", **saving)
    model.generation_config.save_pretrained(folder)
    # loaded anew: `model.float()` would not bring back the RoPE buffers, which `to` rounded
    found = models.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if packed:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: one for name, one in tensors.items() if not name.endswith(EXPERT_WEIGHTS)}
        save_file(kept | packed, folder / "model.safetensors")
        edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    return found


def _pack_experts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Round the experts to numbers of MXFP4; returns these packed, as gpt-oss is published."""
    packed = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(EXPERT_WEIGHTS):
            continue
        rows = parameter.data.float().swapaxes(1, 2)  # [experts, outputs, inputs]
        blocks = rows.reshape(*rows.shape[:2], -1, 32)
        exponents = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scaled = blocks / torch.exp2(exponents)
        nearest = (scaled.abs()[..., None] - levels).abs().argmin(-1)
        meant = levels[nearest] * scaled.sign() * torch.exp2(exponents)
        parameter.data = meant.reshape(rows.shape).swapaxes(1, 2).to(parameter.dtype).contiguous()
        quants = (nearest + 8 * (scaled < 0)).to(torch.uint8)
        packed[f"{name}_blocks"] = quants[..., 0::2] | quants[..., 1::2] << 4
        packed[f"{name}_scales"] = (exponents[..., 0] + 127).to(torch.uint8)
    return packed


def edit_config(folder: Path, **values: Any) -> None:
    """Change keys of `config.json`; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def tokens(seed: int = 0, count: int = TOKENS) -> NDArray[np.int64]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def logits(model: PreTrainedModel, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Transformers' logits of every position, float32 [num_tokens, vocab]."""
    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.from_numpy(token_ids)[None]).logits[0].numpy()
    return found


def greedy(model: PreTrainedModel, prompt: NDArray[np.int64], count: int) -> list[int]:
    """`count` tokens that follow `prompt`, each the likeliest, without a cache."""
    token_ids = prompt
    for _ in range(count):
        token_ids = np.append(token_ids, logits(model, token_ids)[-1].argmax())
    return token_ids[len(prompt) :].tolist()
