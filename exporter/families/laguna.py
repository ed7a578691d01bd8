"""Laguna: query heads and a RoPE by layer, gates of attention that are a softplus, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import (
    check_choice,
    experts_spec,
    layers_by_kind,
    with_experts,
)
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.lfm3 import whole_ropes
from onnxport.exporter.ropeconfig import check_outer, rope_from
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_PARTIAL: Final = "partial_rotary_factor"
# Where the configuration says nothing of RoPE.
_ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    _FULL: {"rope_theta": 500_000.0, _PARTIAL: 0.5},
    _SLIDING: {"rope_theta": 10_000.0, _PARTIAL: 1.0},
}
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "moe_apply_router_weight_on_input": (False,),
    "moe_router_logit_softcapping": (0.0,),
    "swa_attention_sink_enabled": (False,),  # which vLLM reads
}
_GATES: Final = {"per-head": True, "per-element": False}  # whether there is one number a head


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Laguna: heads of 128 unless given; the first layer has no experts, likewise."""
    check_choice(config, _KNOWN)
    num_layers = config.require("num_hidden_layers", int)
    heads = _query_heads(config, num_layers)
    windows = windows_by_type(
        config,
        config.get("sliding_window", int, None if config.is_null("sliding_window") else 512)
        or None,
        [_FULL] * num_layers,
    )
    kinds = [_FULL if window is None else _SLIDING for window in windows]
    ropes = whole_ropes(config, [kind for kind in _ROPES if kind in kinds], _ROPES)
    first = ropes[_FULL if _FULL in kinds else _SLIDING]
    local = ropes[_SLIDING] if _SLIDING in kinds else first
    check_outer(config, _PARTIAL, first.get(_PARTIAL, 1.0))
    spec = decoder_spec(
        config.replaced(num_attention_heads=max(heads)),
        family="laguna",
        head_size=128,
        num_kv_heads=8,
        qk_norm=True,
        sliding_window=windows,
        context_length=context_length,
        rope=first,
    )
    own, _ = rope_from(config, local, spec.head_size, None)
    try:
        spec = replace(
            spec,
            local_rope=None if own == spec.rope else own,
            attention_gate=True,
            head_gates=_has_gates_of_heads(config, num_layers) or None,
            softplus_gates=True,
            layer_heads=None if len(set(heads)) == 1 else heads,
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error
    return with_experts(spec, _experts(config, num_layers))


def _query_heads(config: Config, num_layers: int) -> tuple[int, ...]:
    """The query heads of each layer."""
    key = "num_attention_heads_per_layer"
    alike = [config.require("num_attention_heads", int)] * num_layers
    heads = config.get(key, list, alike)
    if len(heads) != num_layers or not all(type(one) is int and one > 0 for one in heads):
        raise CheckpointError(
            f"{config.path}: {key} is {heads}; it must be {num_layers} integers above 0, one a "
            "layer."
        )
    return tuple(heads)


def _has_gates_of_heads(config: Config, num_layers: int) -> bool:
    """Whether gates have a number a head, and not one a channel.

    What `gating_types` says layer by layer, which llama.cpp's converter reads, must be the same.
    """
    gating = config.get("gating", object, True)
    kind = "per-head" if gating is True else gating
    types = config.get("gating_types", list, [kind] * num_layers)
    told = {str(one).replace("_", "-") for one in types}
    if kind not in _GATES or told != {kind}:
        raise UnsupportedModelError(
            f"{config.path}: gating is {gating!r} and gating_types are {types}; supported is true "
            f"or one of {', '.join(_GATES)}, of all layers."
        )
    return _GATES[str(kind)]


def _experts(config: Config, num_layers: int) -> ExpertsSpec:
    return experts_spec(
        config,
        count=256,
        per_token=8,
        layers=layers_by_kind(config, num_layers, dense=1),
        size=config.get("moe_intermediate_size", int, 512),
        normalized=True,
        sigmoid=True,
        corrected=True,
        scale=config.get("moe_routed_scaling_factor", float, 1.0),
        shared_size=config.get("shared_expert_intermediate_size", int, 512) or None,
    )


FAMILY: Final = Family(
    name="laguna",
    architecture="LagunaForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        attention_gate="self_attn.g_proj",
        correction="mlp.experts.e_score_correction_bias",
        shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down=("mlp.shared_expert.down_proj",),
    ),
)
