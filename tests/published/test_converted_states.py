"""Layers that keep a state in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.published.converted import Model, check
from tests.published.places import needs_llama_cpp
from tests.tiers import every

pytestmark = needs_llama_cpp

# As many channels of a head's keys as of its values, and states as llama.cpp has them.
SQUARE: Mapping[str, Any] = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
HEADS: Mapping[str, Any] = {"head_dim": 16}  # which are the width of the model together
WIDE: Mapping[str, Any] = {"mamba_expand": 2, "mamba_n_heads": 4}
QWEN: Mapping[str, Any] = {"mtp_num_hidden_layers": 1}
OF_EXPERTS = (
    *("layers_block_type", "num_experts_per_tok", "n_routed_experts", "n_group", "topk_group"),
)
MTP = "mtp.layers.0."
# As many heads of states as of attention, and one epsilon of all norms, as llama.cpp has them.
KIMI: Mapping[str, Any] = {"linear_num_heads": 4, "rms_norm_eps": 1e-6}
OF_KIMI: Mapping[str, Any] = {
    "linear_attn_config": {
        **{"full_attn_layers": [3], "kda_layers": [1, 2, 4], "num_heads": 4},
        **{"head_dim": 16, "short_conv_kernel_size": 4},
    },
    **{"first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid"},
}
DENSE = {  # which transformers writes as if they had experts
    f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")
}
GRANITE: Mapping[str, Any] = {"layer_types": ["mamba", "mamba", "attention", "mamba"]}
MODELS: Mapping[str, Model] = {
    "granite-4": Model("granite-4", WIDE, GRANITE),
    "granite-4-dense": Model(
        "granite-4-dense",
        {**WIDE, "mamba_n_groups": 2, "mamba_conv_bias": True, "position_embedding_type": "nope"},
        {"layer_types": ["attention", "mamba"] * 2, "intermediate_size": 64},
    ),
    "granite-4-attention": Model(
        "granite-4-attention",
        {},
        {"layer_types": ["attention"] * 2, "intermediate_size": 80, "num_experts_per_tok": 0},
    ),
    "bamba": Model("bamba", WIDE, {"attn_rotary_emb": 16}),
    "bamba-biases": Model(
        "bamba-biases", {**WIDE, "attn_layer_indices": [1]}, {"attn_rotary_emb": 16}
    ),
    "falcon-h1": Model("falcon-h1", {"head_dim": 16}),
    "falcon-h1-norm": Model(  # multipliers of both ends of a tied model would be in one table
        "falcon-h1-norm", {"mamba_d_ssm": 128, "tie_word_embeddings": False}
    ),
    "kimi-linear": Model("kimi-linear", KIMI, OF_KIMI, names=DENSE),
    "kimi-linear-fused": Model(
        "kimi-linear", KIMI, OF_KIMI, names=DENSE, options={"fuse_qkv": True}
    ),
    "lfm2": Model("lfm2", HEADS),
    "lfm2-moe": Model("lfm2-moe", {**HEADS, "routed_scaling_factor": 1.0}),
    "nemotron-h": Model(
        "nemotron-h",
        {"mamba_num_heads": 4, "n_groups": 2},
        {"hybrid_override_pattern": "M-M*-M-", "num_hidden_layers": 7},
        without=OF_EXPERTS,
    ),
    "nemotron-3": Model("nemotron-3", {"mamba_num_heads": 4, "n_groups": 2}),
    "qwen3-next": Model("qwen3-next", SQUARE, further=MTP),
    "qwen3.5": Model("qwen3.5", SQUARE, QWEN, further=MTP),
    "qwen3.5-images": Model("qwen3.5-images", SQUARE, QWEN, further=MTP),
    "qwen3.5-moe": Model("qwen3.5-moe", SQUARE, QWEN, further=MTP),
    "qwen3.5-moe-fused": Model(
        "qwen3.5-moe", SQUARE, QWEN, further=MTP, options={"fuse_gate_up_exps": True}
    ),
}


@pytest.mark.parametrize("name", every(3, MODELS))
def test_logits(tmp_path: Path, name: str) -> None:
    check(MODELS[name], tmp_path)
