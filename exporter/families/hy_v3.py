"""Hunyuan 3: norms of queries and keys ahead of RoPE; sigmoids choose experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import (
    FURTHER_LAYERS,
    check_choice,
    experts_spec,
    layers_by_kind,
    number_of,
    with_experts,
)
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.mtp import behind_the_last
from onnxport.graphs.spec import ArchSpec

# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "moe_router_enable_expert_bias": (True,),
    "moe_router_use_sigmoid": (True,),
    "qk_norm": (True,),
    "route_norm": (True,),
}
# Where sums and products are rounded, how they are made, and layers behind the last.
_UNUSED: Final = (
    *("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"),
    *("use_grouped_mm", *FURTHER_LAYERS),
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Hunyuan 3: heads of 128 unless given; the first layer has no experts."""
    check_choice(config, _KNOWN)
    config.ignore(*_UNUSED)
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config,
        family="hy_v3",
        head_size=128,
        num_kv_heads=8,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=config.get("mlp_bias", bool, False),
        qk_norm=True,
        context_length=context_length,
        theta=11_158_840.0,
    )
    size = number_of(config, ("moe_intermediate_size", "expert_hidden_dim"), 1536)
    experts = experts_spec(
        config,
        count=192,
        per_token=8,
        layers=layers_by_kind(config, spec.num_layers, dense=1),
        size=size,
        normalized=True,
        sigmoid=True,
        corrected=True,
        scale=config.get("router_scaling_factor", float, 2.826),
        shared_size=size * number_of(config, ("num_shared_experts",), 1) or None,
    )
    return with_experts(spec, experts)


def _behind(names: TensorNames, num_layers: int, found: frozenset[str]) -> TensorNames:
    """The names of its layer of multi-token prediction, whose last norm is called otherwise.

    Files may have a head there, too, which vLLM does not read: states go to the model's.
    """
    moved = behind_the_last(names, num_layers, found)
    return replace(
        moved,
        final_norm=f"{moved.layer}final_layernorm.weight",
        ignored=(*moved.ignored, ".shared_head.weight"),
    )


FAMILY: Final = Family(
    name="hy_v3",
    architecture="HYV3ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        router="mlp.router.gate",
        correction="mlp.expert_bias",
        shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down=("mlp.shared_mlp.down_proj",),
    ),
    further_layers=FURTHER_LAYERS,
    mtp=_behind,
)
