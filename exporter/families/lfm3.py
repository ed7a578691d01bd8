"""LFM3: short convolutions between layers with a window and layers that see all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families import lfm2
from onnxport.exporter.families.base import Family
from onnxport.exporter.ropeconfig import rope_by_layer_type, rope_from
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec

_CONV: Final = "conv"
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_ATTENTION: Final = (_FULL, _SLIDING)
# Where the configuration says nothing of RoPE.
_ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    _FULL: {"rope_theta": 1_000_000.0, "rope_type": "proportional", "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_theta": 10_000.0},
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """LFM3: norms on both sides of layers, and a gate of each head of attention."""
    types = _types(config)
    ropes = whole_ropes(config, [kind for kind in _ATTENTION if kind in types], _ROPES)
    spec = decoder_spec(
        config,
        family="lfm3",
        head_size=128,
        num_kv_heads=4,
        intermediate_size=7680,
        qk_norm=True,
        sliding_window=_windows(config, types),
        context_length=context_length,
        rope={},
        tied=True,
        epsilon="norm_eps",
    )
    # Of layers that are not there, RoPE is that of the others.
    found = {kind: _rope(config, kind, one, spec) for kind, one in ropes.items() if kind in types}
    first = found[_FULL if _FULL in types else _SLIDING]
    local = found.get(_SLIDING, first)
    gated = config.get("use_attention_gate", bool, True) or None
    spec = replace(
        spec,
        rope=first,
        local_rope=None if local == first else local,
        output_norms=config.get("use_sandwich_norm", bool, True) or None,
        attention_gate=gated,
        head_gates=gated,
    )
    return lfm2.with_convolutions(config, spec, tuple(kind == _CONV for kind in types), 7)


def _types(config: Config) -> list[str]:
    """The layers' types. Raises UnsupportedModelError for others than are known."""
    num_layers = config.require("num_hidden_layers", int)
    types = config.get("layer_types", list, [_default(layer) for layer in range(num_layers)])
    known = (_CONV, *_ATTENTION)
    if len(types) != num_layers or not all(kind in known for kind in types):
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {types}; supported are {num_layers} entries (one a "
            f"layer) from {', '.join(known)}."
        )
    if not any(kind in _ATTENTION for kind in types):
        raise UnsupportedModelError(
            f"{config.path}: none of the {num_layers} layers has attention; supported is that "
            "some have, and the others are convolutions."
        )
    return types


def _default(layer: int) -> str:
    """The type of a layer where `layer_types` does not say."""
    if layer % 4 == 2:
        return _FULL
    return _SLIDING if layer and layer % 4 == 0 else _CONV


def _windows(config: Config, types: list[str]) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 256)
    if window is None and _SLIDING in types:
        raise UnsupportedModelError(
            f"{config.path}: sliding_window is null, and layer_types has {_SLIDING}, which needs "
            "one."
        )
    return tuple(window if kind == _SLIDING else None for kind in types)


def whole_ropes(
    config: Config, wanted: Sequence[str], defaults: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """RoPE keys by layer type, of which there is no old spelling.

    Args:
        config: The model's configuration.
        wanted: The types of layers that there are.
        defaults: By layer type, what holds where `rope_parameters` is absent.

    Raises UnsupportedModelError for the old spelling, and where a type that there is lacks its own.
    """
    given = config.get("rope_parameters", dict, {})
    is_whole = all(
        isinstance(given.get(kind), dict) and given[kind].get("rope_theta") is not None
        for kind in wanted
    )
    others = {key: config.get(key, object, None) for key in ("rope_scaling", "rope_theta")}
    if any(one is not None for one in others.values()) or (given and not is_whole):
        raise UnsupportedModelError(
            f"{config.path}: rope_parameters is {given}, rope_scaling {others['rope_scaling']} and "
            f"rope_theta {others['rope_theta']}; supported is an object with a rope_theta for each "
            f"of {', '.join(wanted)} in the first, and no others."
        )
    nothing: dict[str, Mapping[str, Any]] = {kind: {} for kind in defaults}
    return rope_by_layer_type(config, nothing if given else defaults, _FULL)


def _rope(config: Config, kind: str, values: dict[str, Any], spec: ArchSpec) -> RopeSpec:
    """The rotary embedding of a type of layers."""
    size = spec.head_size
    rope, _ = rope_from(config, values, size, spec.context_length, proportional=True)
    if rope.rotary_dim != size:
        raise UnsupportedModelError(
            f"{config.path}: the RoPE of {kind} is of type {rope.type!r} with a "
            "partial_rotary_factor, which only the type 'proportional' may have, for LFM3."
        )
    return rope


_TENSORS: Final = replace(
    lfm2.FAMILY.tensors,
    q_norm="self_attn.q_norm.weight",
    k_norm="self_attn.k_norm.weight",
    o=("self_attn.o_proj",),
    attention_gate="self_attn.gate_proj",  # as published
    o_norm="post_operator_norm.weight",
    down_norm="post_ffn_norm.weight",
)
FAMILY: Final = Family(
    name="lfm3",
    architecture="Lfm3ForCausalLM",
    spec=read_spec,
    tensors=_TENSORS,
    other_layouts=(replace(_TENSORS, attention_gate="self_attn.g_proj"),),  # as transformers has it
)
