"""OLMo Hybrid: gated delta nets with norms ahead, between layers of OLMo 2 that rotate nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, check_heads
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.olmo2 import olmo_spec
from onnxport.graphs.linear_spec import LinearAttentionSpec
from onnxport.graphs.spec import ArchSpec

_LINEAR: Final = "linear_attention"
_FULL: Final = "full_attention"
_THETA: Final = "rope_theta"
_NORM_EPS: Final = 1e-5  # of the norms behind delta nets, whatever rms_norm_eps is
# How states begin in training.
_OF_TRAINING: Final = (
    *("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor"),
    *("linear_dt_max", "linear_dt_min"),
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """OLMo Hybrid: `rope_theta` null, as published, says that attention rotates nothing."""
    config.ignore(*_OF_TRAINING)
    spec = olmo_spec(config, family="olmo_hybrid", context_length=context_length)
    check_heads(config, spec)
    rotated = None if _rotates(config) else (False,) * spec.num_layers
    try:
        linear = _linear(config, spec)
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error
    return replace(spec, linear=linear, rotated_layers=rotated, state_input_norms=True)


def _rotates(config: Config) -> bool:
    """Whether attention rotates. Raises UnsupportedModelError where readers differ."""
    told = config.get("rope_parameters", dict, None)
    if told is not None and _THETA in told:
        return told[_THETA] is not None
    if config.has(_THETA) or config.is_null(_THETA):
        return config.has(_THETA)
    if config.is_null("rope_parameters"):
        raise UnsupportedModelError(
            f"{config.path}: rope_parameters is null. That should say that attention rotates "
            "nothing, and transformers takes a rope_theta of 10000 for it. Say which: "
            '{"rope_theta": null, "rope_type": "default"} or {"rope_theta": 10000.0, …}.'
        )
    return True


def _linear(config: Config, spec: ArchSpec) -> LinearAttentionSpec:
    """The layers without attention; sizes are of the model's unless told."""
    key_heads = config.get("linear_num_key_heads", int, spec.num_heads)
    key_size = config.get(
        "linear_key_head_dim", int, int(0.75 * spec.hidden_size / max(key_heads, 1))
    )
    return LinearAttentionSpec(
        layers=_layers(config, spec.num_layers),
        key_heads=key_heads,
        value_heads=config.get("linear_num_value_heads", int, spec.num_heads),
        key_size=key_size,
        value_size=config.get("linear_value_head_dim", int, 2 * key_size),
        kernel=config.get("linear_conv_kernel_dim", int, 4),
        doubled_beta=config.get("linear_allow_neg_eigval", bool, True) or None,
        norm_eps=_NORM_EPS,
    )


def _layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers have no attention: all but every fourth, or the last, unless told."""
    counted = [_LINEAR if (layer + 1) % 4 else _FULL for layer in range(num_layers)]
    if _FULL not in counted:
        counted[-1] = _FULL
    types = config.get("layer_types", list, counted)
    known = len(types) == num_layers and all(kind in (_LINEAR, _FULL) for kind in types)
    if not known or {*types} != {_LINEAR, _FULL}:
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {types}; supported are {num_layers} entries (one a "
            f"layer) from {_FULL!r} and {_LINEAR!r}, and some of each."
        )
    return tuple(kind == _LINEAR for kind in types)


_NAMES: Final = TensorNames(
    linear_in=tuple(f"linear_attn.{name}_proj" for name in "qkvgba"),
    linear_norm="linear_attn.o_norm.weight",
    linear_o=("linear_attn.o_proj",),
)
_APART: Final = replace(
    _NAMES,
    linear_conv_apart=(
        "linear_attn.q_conv1d.weight",
        "linear_attn.k_conv1d.weight",
        "linear_attn.v_conv1d.weight",
    ),
    told_by=("linear_attn.q_conv1d.weight",),
)
# Norms of layers with a state, by names that transformers reads and writes. It writes one of those
# of attention by the second, too, and cuts convolutions in thirds.
_AHEAD, _BEHIND = "attention_layer_norm.weight", "feedforward_layer_norm.weight"
_OTHERS: Final = replace(
    _APART, input_norm=_AHEAD, post_norm=_BEHIND, told_by=(_AHEAD, _APART.o_norm)
)
_WRITTEN: Final = replace(_OTHERS, o_norm=_BEHIND, linear_conv_in_thirds=True, told_by=(_AHEAD,))
FAMILY: Final = Family(
    name="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    spec=read_spec,
    tensors=_OTHERS,
    other_layouts=(_WRITTEN, _APART, _NAMES),
)
