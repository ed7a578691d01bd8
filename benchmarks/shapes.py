"""The configurations of published models, as far as their sizes matter."""

from __future__ import annotations

from typing import Any, Final


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv: int, *, tied: bool) -> Any:
    return _shape("qwen2", 151_936, hidden, inner, layers, heads, kv, tied, 1e-6, 1_000_000.0)


def _llama(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv: int) -> Any:
    tied = hidden < 4096 and vocab > 100_000
    return _shape("llama", vocab, hidden, inner, layers, heads, kv, tied, 1e-5, 500_000.0)


def _shape(
    family: str,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv: int,
    tied: bool,
    eps: float,
    theta: float,
) -> dict[str, Any]:
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    return {
        **_shape("gpt_oss", 201_088, 2880, 2880, layers, 64, 8, False, 1e-5, 150_000.0),
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rope_scaling": {**scaling, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "quantization_config": {"quant_method": "mxfp4"},
    }


def _gemma3(hidden: int, inner: int, layers: int, heads: int, kv: int, window: int) -> Any:
    config = _shape("gemma3_text", 262_144, hidden, inner, layers, heads, kv, True, 1e-6, 1e6)
    del config["hidden_act"]
    return {
        **config,
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": window,
        "sliding_window_pattern": 6,
    }


def _delta_nets(key_heads: int, value_heads: int) -> dict[str, Any]:
    """What Qwen3-Next and Qwen3.5 have: every fourth layer has attention."""
    return {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def _spaces(
    layers: int, attention: list[int], heads: int, channels: int, inner: int
) -> dict[str, Any]:
    """What Granite 4 has without experts."""
    return {
        "layer_types": ["attention" if layer in attention else "mamba" for layer in range(layers)],
        "mamba_n_heads": heads,
        "mamba_d_head": channels,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "num_local_experts": 0,
        "shared_intermediate_size": inner,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.015625,
    }


def _granite_4(layers: int, attention: list[int], hidden: int, inner: int, channels: int) -> Any:
    """A small one, with 12 heads of attention and 48 of a state space."""
    return {
        **_shape("granitemoehybrid", 100_352, hidden, inner, layers, 12, 4, True, 1e-5, 10_000.0),
        **_spaces(layers, attention, 48, channels, inner),
        "architectures": ["GraniteMoeHybridForCausalLM"],
    }


def _lfm2(hidden: int, inner: int, heads: int) -> dict[str, Any]:
    """Layers of short convolutions, and every second or third of attention."""
    attention = (2, 5, 8, 10, 12, 14)
    kinds = ["full_attention" if layer in attention else "conv" for layer in range(16)]
    config = _shape("lfm2", 65_536, hidden, inner, 16, heads, 8, True, 1e-5, 1_000_000.0)
    config["norm_eps"] = config.pop("rms_norm_eps")
    return {
        **config,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": kinds,
    }


def _experts(count: int, per_token: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": per_token, "norm_topk_prob": False}


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": _llama(512, 128, 256, 2, 4, 2),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18_944, 28, 28, 4, tied=False),
    "llama-3.2-1b": _llama(128_256, 2048, 8192, 16, 32, 8),
    "llama-3.2-3b": {**_llama(128_256, 3072, 8192, 28, 24, 8), "head_dim": 128},
    "llama-2-7b": {**_llama(32_000, 4096, 11_008, 32, 32, 32), "rope_theta": 10_000.0},
    "llama-3.1-8b": _llama(128_256, 4096, 14_336, 32, 32, 8),
    "olmoe-1b-7b": {
        **_shape("olmoe", 50_304, 2048, 1024, 16, 16, 16, False, 1e-5, 10_000.0),
        **_experts(64, 8),
        "max_position_embeddings": 4096,
    },
    "qwen3-30b-a3b": {
        **_shape("qwen3_moe", 151_936, 2048, 6144, 48, 32, 4, False, 1e-6, 1_000_000.0),
        **_experts(128, 8),
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "qwen3.5-0.8b": {
        **_shape("qwen3_5_text", 248_320, 1024, 3584, 24, 8, 2, True, 1e-6, 1e7),
        **_delta_nets(16, 16),
        "architectures": ["Qwen3_5ForCausalLM"],
    },
    "qwen3.5-4b": {
        **_shape("qwen3_5_text", 248_320, 2560, 9216, 32, 16, 4, True, 1e-6, 1e7),
        **_delta_nets(16, 32),
        "architectures": ["Qwen3_5ForCausalLM"],
    },
    "qwen3-next-80b-a3b": {
        **_shape("qwen3_next", 151_936, 2048, 5120, 48, 16, 2, False, 1e-6, 1e7),
        **_delta_nets(16, 32),
        **_experts(512, 10),
        "architectures": ["Qwen3NextForCausalLM"],
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "granite-4.0-h-micro-3b": {
        **_shape("granitemoehybrid", 100_352, 2048, 8192, 40, 32, 8, True, 1e-5, 10_000.0),
        **_spaces(40, [5, 15, 25, 35], 64, 64, 8192),
        "architectures": ["GraniteMoeHybridForCausalLM"],
    },
    "gemma-3-1b": _gemma3(1152, 6912, 26, 4, 1, 512),
    "gemma-3-270m": _gemma3(640, 2048, 18, 4, 1, 512),
    "granite-4.0-h-350m": _granite_4(32, [10, 13, 17, 27], 768, 2048, 32),
    "granite-4.0-h-1b": _granite_4(40, [5, 15, 25, 35], 1536, 4096, 64),
    "granite-3.1-1b-a400m": {
        **_shape("granitemoe", 49_155, 1024, 512, 24, 16, 8, True, 1e-6, 10_000.0),
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": 32,
        "num_experts_per_tok": 8,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    },
    "lfm2-350m": _lfm2(1024, 4608, 16),
    "lfm2-1.2b": _lfm2(2048, 8192, 32),
}
