"""Checkpoints of GLM 4.5 with the names of tensors that Bailing V2 and Sarvam have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.exporter import checkpoints

# What transformers calls the tensors, which are published as on the right.
PUBLISHED = {
    r"\.embed_tokens\.": ".word_embeddings.",
    r"\.self_attn\.o_proj\.": ".attention.dense.",
    r"\.self_attn\.q_norm\.": ".attention.query_layernorm.",
    r"\.self_attn\.k_norm\.": ".attention.key_layernorm.",
    r"gate\.e_score_correction_bias": "gate.expert_bias",
}
CASE = checkpoints.Case(
    "glm4_moe",
    {
        **checkpoints.CASES["glm4-moe"].config,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    },
    torch.bfloat16,
)
# What Bailing V2 says in place of what GLM 4.5 does.
CONFIG: Mapping[str, Any] = {
    **{"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe"},
    **{"n_routed_experts": None, "num_experts": 8, "score_function": "sigmoid"},
    **{"n_shared_experts": None, "num_shared_experts": 1},
    **{"attention_bias": None, "use_qkv_bias": True},
}
_QUERIES = re.compile(r"(.*)\.self_attn\.q_proj\.(weight|bias)")


def publish(folder: Path, **config: Any) -> None:
    """Rename a checkpoint's tensors, and change keys of its configuration; None removes one."""
    tensors = {
        _published(name): one for name, one in load_file(folder / "model.safetensors").items()
    }
    for name in list(tensors):
        if found := _QUERIES.fullmatch(name):
            layer, kind = found.groups()
            parts = [tensors.pop(f"{layer}.self_attn.{one}_proj.{kind}") for one in "qkv"]
            tensors[f"{layer}.attention.query_key_value.{kind}"] = torch.cat(parts)
    stored = {name: one.contiguous() for name, one in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    checkpoints.edit_config(folder, **config)


def _published(name: str) -> str:
    for pattern, new in PUBLISHED.items():
        name = re.sub(pattern, new, name)
    return name
