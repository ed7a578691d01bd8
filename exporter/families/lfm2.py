"""LFM2 and LFM2.5, dense and with experts: short convolutions between layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.qwen3_next import check_said
from onnxport.graphs.linear_spec import ShortConvSpec
from onnxport.graphs.spec import ArchSpec

_CONV: Final = "conv"
_FULL: Final = "full_attention"

# What published files say, and what is so in transformers whatever they say.
_SAID: Final[Mapping[str, tuple[Any, ...]]] = {
    "block_use_swiglu": (True,),
    "use_pos_enc": (True,),
}
# Of training, which published files tell, too.
_OF_TRAINING: Final = (
    *("block_mlp_init_scale", "block_out_init_scale"),
    *("block_use_xavier_init", "conv_use_xavier_init"),
)
# Second names of sizes, which transformers does not read.
_SECOND_NAMES: Final[Mapping[str, str]] = {
    "block_dim": "hidden_size",
    "block_norm_eps": "norm_eps",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """LFM2: features of its feed-forward layers are a part of what the configuration says."""
    num_layers = config.require("num_hidden_layers", int)
    layers = _layers(config, _counted(config, num_layers))
    spec = _read(config, "lfm2", _feed_forward_size(config), context_length)
    return with_convolutions(config, spec, layers)


def read_spec_with_experts(config: Config, context_length: int | None) -> ArchSpec:
    """LFM2-MoE: experts that sigmoids choose, behind the first layers."""
    layers = _layers(config, config.require("layer_types", list))
    spec = _read(config, "lfm2_moe", config.get("intermediate_size", int, 7168), context_length)
    dense = config.get("num_dense_layers", int, 2)
    sparse = tuple(layer >= dense for layer in range(spec.num_layers))
    experts = experts_spec(
        config,
        count=32,
        per_token=4,
        size=config.get("moe_intermediate_size", int, 1792),
        normalized=config.get("norm_topk_prob", bool, True),
        sigmoid=True,
        corrected=config.get("use_expert_bias", bool, True) or None,
        scale=config.get("routed_scaling_factor", float, 1.0),
        layers=sparse,
    )
    spec = with_convolutions(config, spec, layers)
    return replace(spec, experts=experts) if any(sparse) else spec


def _read(config: Config, family: str, size: int, context_length: int | None) -> ArchSpec:
    """What both read; `size` is of the features of a dense feed-forward layer."""
    check_said(config, _SAID)
    config.ignore(*_OF_TRAINING)
    for second, first in _SECOND_NAMES.items():
        _check_same(config, second, first)
    _check_same(config, "tie_embedding", "tie_word_embeddings")
    spec = decoder_spec(
        config,
        family=family,
        num_kv_heads=8,
        intermediate_size=size,
        qk_norm=True,
        context_length=context_length,
        theta=1_000_000.0,
        tied=config.get("tie_embedding", bool, True),
        epsilon="norm_eps",
    )
    theta = config.get("theta", float, spec.rope.theta)
    if theta != spec.rope.theta:
        raise CheckpointError(
            f"{config.path}: theta is {theta} and RoPE's is {spec.rope.theta}; remove the wrong "
            "one."
        )
    return replace(spec, intermediate_size=size)


def _check_same(config: Config, second: str, first: str) -> None:
    """Raise CheckpointError for two names of one thing that say two things."""
    found = {name: config.get(name, object, None) for name in (first, second)}
    if None not in found.values() and found[first] != found[second]:
        raise CheckpointError(
            f"{config.path}: {first} is {found[first]!r} and {second}, another name of it, is "
            f"{found[second]!r}; remove the wrong one."
        )


def _feed_forward_size(config: Config) -> int:
    """Features of a feed-forward layer, as transformers computes them.

    Unless told otherwise that is two thirds of a number, times another one, rounded up.
    """
    _check_same(config, "block_ff_dim", "intermediate_size")
    given = config.get("block_ff_dim", int, config.get("intermediate_size", int, 12288))
    times = config.get("block_ffn_dim_multiplier", float, 1.0)
    step = config.get("block_multiple_of", int, 256)
    if not config.get("block_auto_adjust_ff_dim", bool, True):
        return given
    if step < 1:
        raise CheckpointError(f"{config.path}: block_multiple_of is {step}; it must be above 0.")
    return -(-int(times * int(2 * given / 3)) // step) * step


def with_convolutions(
    config: Config, spec: ArchSpec, layers: tuple[bool, ...], kernel: int = 3
) -> ArchSpec:
    """The model with those layers, if there are some; `kernel` is what `conv_L_cache` is if absent.

    Raises CheckpointError for sizes that contradict each other.
    """
    kernel = config.get("conv_L_cache", int, kernel)
    bias = config.get("conv_bias", bool, False)
    if not any(layers):
        return spec
    try:
        conv = ShortConvSpec(channels=spec.hidden_size, kernel=kernel, bias=bias, layers=layers)
        return replace(spec, linear=conv)
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _counted(config: Config, num_layers: int) -> list[str]:
    """The types of layers: as `layer_types` says, or all but `full_attn_idxs` are convolutions."""
    places = config.get("full_attn_idxs", list, list(range(num_layers)))
    counted = [_FULL if layer in places else _CONV for layer in range(num_layers)]
    types = config.get("layer_types", list, counted)
    if config.has("full_attn_idxs") and types != counted:
        raise CheckpointError(
            f"{config.path}: full_attn_idxs is {places} and layer_types is {types}, which differ; "
            "remove the one that the model was not trained with."
        )
    return types


def _layers(config: Config, types: list[str]) -> tuple[bool, ...]:
    """Which layers are convolutions. Raises UnsupportedModelError for others than are known."""
    num_layers = config.require("num_hidden_layers", int)
    if len(types) != num_layers or not all(kind in (_CONV, _FULL) for kind in types):
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {types}; supported are {num_layers} entries (one a "
            f"layer) from {_FULL!r} and {_CONV!r}."
        )
    if _FULL not in types:
        raise UnsupportedModelError(
            f"{config.path}: none of the {num_layers} layers has attention; supported is that "
            "some have, and the others are convolutions."
        )
    return tuple(kind == _CONV for kind in types)


_TENSORS: Final = TensorNames(
    final_norm="model.embedding_norm.weight",
    input_norm="operator_norm.weight",
    q_norm="self_attn.q_layernorm.weight",
    k_norm="self_attn.k_layernorm.weight",
    o=("self_attn.out_proj",),
    post_norm="ffn_norm.weight",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down=("feed_forward.w2",),
    router="feed_forward.gate",
    expert_gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    expert_down=("feed_forward.experts.{}.w2",),
    correction="feed_forward.expert_bias",
    linear_in=("conv.in_proj",),
    linear_conv="conv.conv.weight",
    linear_o=("conv.out_proj",),
)
FAMILY: Final = Family(
    name="lfm2", architecture="Lfm2ForCausalLM", spec=read_spec, tensors=_TENSORS
)
WITH_EXPERTS: Final = Family(
    name="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    spec=read_spec_with_experts,
    tensors=_TENSORS,
)
