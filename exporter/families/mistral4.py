"""Mistral Small 4: attention of latents, experts that a softmax chooses, and queries that grow.

These do as Ministral 3's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import (
    experts_spec,
    groups_of,
    layers_behind,
    number_of,
    with_experts,
)
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.ministral3 import growing_queries
from onnxport.exporter.latentconfig import latent_spec
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(kv_rank=256, nope_size=64, rope_size=64, value_size=128, query_rank=1024)
# What holds where a configuration has no RoPE keys at all.
_ROPE: Final[Mapping[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Mistral 4: neighbours rotate unless told otherwise; of a head a part rotates."""
    rope_size = config.get("qk_rope_head_dim", int, _SIZES.rope_size)
    rope, growth = growing_queries(config, _rope(config, rope_size))
    spec = latent_spec(
        config.replaced(head_dim=rope_size),
        family="mistral4",
        defaults=_SIZES,
        interleaved=config.get("rope_interleave", bool, True),
        context_length=context_length,
        rope=rope,
    )
    return with_experts(replace(spec, query_growth=growth), _experts(config))


def _rope(config: Config, rope_size: int) -> dict[str, Any]:
    """RoPE keys of what rotates; `head_dim` and the part of it that does say how much that is."""
    size = config.get("qk_nope_head_dim", int, _SIZES.nope_size) + rope_size
    rope = rope_parameters(config) or dict(_ROPE)
    part = rope.pop("partial_rotary_factor", rope_size / size)
    head_size = config.get("head_dim", int, size)
    if head_size != size or int(head_size * part) != rope_size:
        raise CheckpointError(
            f"{config.path}: head_dim is {head_size} and partial_rotary_factor {part}, and "
            f"qk_nope_head_dim and qk_rope_head_dim make heads of {size} channels, {rope_size} of "
            "which rotate. Remove the wrong ones."
        )
    return rope


def _experts(config: Config) -> ExpertsSpec:
    size = config.get("moe_intermediate_size", int, 2048)
    return experts_spec(
        config,
        count=128,
        per_token=4,
        count_keys=("n_routed_experts", "num_local_experts"),
        layers=layers_behind(config, 0),
        size=size,
        normalized=config.get("norm_topk_prob", bool, True),
        scale=config.get("routed_scaling_factor", float, 1.0),
        shared_size=size * number_of(config, ("n_shared_experts",), 1) or None,
        **groups_of(config, (1, 1), best=2),
    )


FAMILY: Final = Family(
    name="mistral4",
    architecture="Mistral4ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        expert_gate_up=("mlp.experts.gate_up_proj",),
        expert_down=("mlp.experts.down_proj",),
    ),
)
