"""Ling and Ring 2.0 (Bailing MoE V2): GLM 4.5's layers, with names of tensors of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import (
    FURTHER_LAYERS,
    check_choice,
    experts_spec,
    groups_of,
    layers_behind,
    with_experts,
)
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec

# How experts are chosen, and what the published code knows besides.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "moe_router_enable_expert_bias": (True,),
    "norm_head": (False,),
    "score_function": ("sigmoid",),
    "use_bias": (False,),
    "use_rmsnorm": (True,),
}
_UNUSED: Final = (
    *("embedding_dropout", "output_dropout", "max_window_layers", "mtp_loss_scaling_factor"),
    *("router_dtype", *FURTHER_LAYERS),
)
_ROTARY: Final = "rotary_dim"
NAMES: Final = TensorNames(
    embedding="model.word_embeddings.weight",
    qkv=("attention.query_key_value",),
    q_norm="attention.query_layernorm.weight",
    k_norm="attention.key_layernorm.weight",
    o=("attention.dense",),
    correction="mlp.gate.expert_bias",
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Bailing V2: a part of each head rotates, which has to be told, as has what else is optional.

    transformers has no class for it; the keys are read as vLLM reads them.
    """
    check_choice(config, _KNOWN)
    config.ignore(*_UNUSED)
    rotated, heads = config.get(_ROTARY, int, None), config.require("num_attention_heads", int)
    head = config.get("head_dim", int, config.require("hidden_size", int) // max(heads, 1))
    spec = decoder_spec(
        config,
        family="bailing_moe",
        num_kv_heads=config.require("num_key_value_heads", int),
        qkv_bias=config.get("use_qkv_bias", bool, False),
        qk_norm=config.get("use_qk_norm", bool, False),
        context_length=context_length,
        partial_rotary_factor=1.0 if rotated is None else rotated / max(head, 1),
    )
    if rotated not in (None, spec.rope.rotary_dim):
        raise CheckpointError(
            f"{config.path}: {_ROTARY} is {rotated}, and partial_rotary_factor makes "
            f"{spec.rope.rotary_dim} of {spec.head_size} channels rotate; remove the wrong one."
        )
    return with_experts(spec, _experts(config))


def _experts(config: Config) -> ExpertsSpec:
    size = config.require("moe_intermediate_size", int)
    shared = config.get("moe_shared_expert_intermediate_size", int, size)
    return experts_spec(
        config,
        count=None,
        per_token=None,
        count_keys=("num_experts",),
        layers=layers_behind(config, 0),
        size=size,
        normalized=config.require("norm_topk_prob", bool),
        sigmoid=True,
        corrected=True,
        scale=config.get("routed_scaling_factor", float, 1.0),
        shared_size=shared * config.get("num_shared_experts", int, 0) or None,
        **groups_of(config, (1, 1), best=2),
    )


FAMILY: Final = Family(
    name="bailing_moe",
    architecture="BailingMoeV2ForCausalLM",
    spec=read_spec,
    tensors=NAMES,
    further_layers=FURTHER_LAYERS,
)
