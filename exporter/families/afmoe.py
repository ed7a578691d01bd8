"""AFMoE, of Trinity: gated attention, norms on both sides of layers, sigmoids choose experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import check_choice, experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "n_group": (1,),
    "num_expert_groups": (1,),
    "num_limited_groups": (1,),
    "route_norm": (True,),
    "score_func": ("sigmoid",),
    "topk_group": (1,),
}
_UNUSED: Final = ("load_balance_coeff", "use_grouped_mm")  # of training; how products are made


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """AFMoE: layers with a window rotate, and every fourth sees all and does not.

    Where `mup_enabled` says so, embeddings are scaled, which goes into weights as Gemma's does.
    """
    check_choice(config, _KNOWN)
    config.ignore(*_UNUSED)
    windows = windows_by_type(
        config,
        config.get("sliding_window", int, None if config.is_null("sliding_window") else 1024),
        _kinds(config),
    )
    spec = decoder_spec(
        config,
        family="afmoe",
        head_size=128,
        qk_norm=True,
        sliding_window=windows,
        context_length=context_length,
    )
    spec = replace(spec, output_norms=True, attention_gate=True, experts=_experts(config))
    rotated = tuple(window is not None for window in windows)
    if not all(rotated):
        spec = replace(spec, rotated_layers=rotated)
    if not config.get("mup_enabled", bool, False):
        return spec
    return replace(
        spec,
        rms_norm_eps=spec.rms_norm_eps / spec.hidden_size,
        inner_norm_eps=spec.rms_norm_eps,
        residual_scale=1 / math.sqrt(spec.hidden_size),
        stream_scale=math.sqrt(spec.hidden_size),
    )


def _kinds(config: Config) -> list[str]:
    """The layers' types where `layer_types` does not say: every so many sees all."""
    num_layers = config.require("num_hidden_layers", int)
    every = config.get("global_attn_every_n_layers", int, 4)
    if every < 1:
        raise CheckpointError(
            f"{config.path}: global_attn_every_n_layers is {every}; it must be above 0."
        )
    return [_SLIDING if (layer + 1) % every else _FULL for layer in range(num_layers)]


def _experts(config: Config) -> ExpertsSpec | None:
    """The experts of layers behind the first ones; None: no layer has any."""
    dense = config.get("num_dense_layers", int, 1)
    layers = tuple(layer >= dense for layer in range(config.require("num_hidden_layers", int)))
    size = config.get("moe_intermediate_size", int, 1408)
    experts = experts_spec(
        config,
        count=64,
        per_token=6,
        count_keys=("num_experts",),
        layers=layers,
        size=size,
        normalized=True,
        sigmoid=True,
        corrected=True,
        scale=config.get("route_scale", float, 1.0),
        shared_size=size * config.get("num_shared_experts", int, 2) or None,
    )
    return experts if any(layers) else None


FAMILY: Final = Family(
    name="afmoe",
    architecture="AfmoeForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        attention_gate="self_attn.gate_proj",
        o_norm="post_attention_layernorm.weight",
        post_norm="pre_mlp_layernorm.weight",
        down_norm="post_mlp_layernorm.weight",
        router="mlp.router.gate",
        correction="mlp.expert_bias",
    ),
)
