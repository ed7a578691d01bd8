"""Gemma 4, text: Gemma 3 whose layers without a window have larger heads and turn a part of them.

Small ones (E2B, E4B) are told of each token in every layer, by a table of its own, and their last
layers read the keys and values of earlier ones. One (26B-A4B) has experts beside each feed-forward
layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.gemma import GELU, TENSORS
from onnxport.exporter.families.wrapped import newer_names, wrapped
from onnxport.exporter.ropeconfig import rope_by_layer_type, rope_from
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.heads_spec import HeadsSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_ROPE_TYPES: Final = ("default", "linear", "proportional")
_ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    _FULL: {"rope_theta": 1_000_000.0, "rope_type": "proportional", "partial_rotary_factor": 0.25},
    _SLIDING: {"rope_theta": 10_000.0},
}
_OVERRIDES: Final = {"head_dim", "num_key_value_heads"}
_MOST_DIGITS: Final = 9  # of a layer's number


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Gemma 4: norms' weights are stored as they are, and scores are not scaled."""
    _check(config)
    windows = _windows(config)
    ropes = _ropes(config)
    spec = decoder_spec(
        config,
        family="gemma4_text",
        head_size=256,
        num_kv_heads=4,
        qk_norm=True,
        sliding_window=windows,
        context_length=context_length,
        rope=ropes[_SLIDING],
        hidden_act="gelu_tanh",
        tied=True,
    )
    heads = _global_heads(config, spec)
    size = spec.head_size if heads is None else heads.head_size
    rope = _rope(config, _FULL, ropes[_FULL], size, spec.context_length)
    local = _rope(config, _SLIDING, ropes[_SLIDING], spec.head_size, spec.context_length)
    shared = config.get("num_kv_shared_layers", int, 0) or None
    is_wide = config.get("use_double_wide_mlp", bool, False) and shared
    try:
        return replace(
            spec,
            rope=rope,
            local_rope=None if local == rope else local,
            global_heads=heads,
            rms_norm_eps=spec.rms_norm_eps / spec.hidden_size,
            inner_norm_eps=spec.rms_norm_eps,
            attention_scale=1.0,
            residual_scale=1 / math.sqrt(spec.hidden_size),
            stream_scale=math.sqrt(spec.hidden_size),
            output_norms=True,
            value_norm=True,
            shared_kv_layers=shared,
            shared_kv_intermediate_size=2 * spec.intermediate_size if is_wide else None,
            layer_scales=True,
            layer_input_size=_layer_input_size(config, spec),
            logits_softcap=_cap(config),
            experts=_experts(config, spec),
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _check(config: Config) -> None:
    """Refuse what is not supported of all that a configuration may say."""
    activation = config.get("hidden_activation", str, GELU)
    if activation != GELU:
        raise UnsupportedModelError(
            f"{config.path}: hidden_activation is {activation!r}; supported is {GELU!r}."
        )


def _experts(config: Config, spec: ArchSpec) -> ExpertsSpec | None:
    """Experts beside a feed-forward layer, whose weights add up to 1; None: there are none."""
    if not config.get("enable_moe_block", bool, False):
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    if config.get("num_kv_shared_layers", int, 0):
        raise UnsupportedModelError(
            f"{config.path}: enable_moe_block is true and num_kv_shared_layers is not 0; supported "
            "is one of them, for Gemma 4."
        )
    try:
        return ExpertsSpec(
            count=config.require("num_experts", int),
            per_token=config.require("top_k_experts", int),
            size=config.require("moe_intermediate_size", int),
            normalized=True,
            shared_size=spec.intermediate_size,
            apart=True,
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _windows(config: Config) -> tuple[int | None, ...]:
    """Each layer's window, which counts the query's own token: every sixth and the last have none.

    Raises UnsupportedModelError where the last one has one, which transformers changes, or all.
    """
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 512)
    types = [_SLIDING if (i + 1) % 6 else _FULL for i in range(num_layers)]
    windows = windows_by_type(config, window, [*types[:-1], _FULL][:num_layers])
    if any(windows) and windows[-1] is None:
        return windows
    raise UnsupportedModelError(
        f"{config.path}: layer_types is {config.get('layer_types', list, types)}; supported is "
        f"{_FULL} in the last layer, and {_SLIDING} in others, for Gemma 4."
    )


def _ropes(config: Config) -> dict[str, dict[str, Any]]:
    """RoPE keys by layer type, of which there is no old spelling."""
    given = config.get("rope_parameters", dict, {})
    is_whole = all(isinstance(given.get(kind), dict) for kind in _ROPES) and all(
        given[kind].get("rope_theta") is not None for kind in _ROPES
    )
    if config.has("rope_scaling") or (given and not is_whole):
        raise UnsupportedModelError(
            f"{config.path}: rope_parameters is {given} and rope_scaling "
            f"{config.get('rope_scaling', object, None)}; supported is an object with a rope_theta "
            f"for each of {', '.join(_ROPES)} in the first, and nothing in the second."
        )
    nothing: dict[str, Mapping[str, Any]] = {kind: {} for kind in _ROPES}
    return rope_by_layer_type(config, nothing if given else _ROPES, _FULL)


def _rope(
    config: Config, kind: str, values: dict[str, Any], head_size: int, context_length: int
) -> RopeSpec:
    """The rotary embedding of a type of layers."""
    rope, _ = rope_from(config, values, head_size, context_length, proportional=kind == _FULL)
    if rope.type not in _ROPE_TYPES or rope.rotary_dim != head_size:
        raise UnsupportedModelError(
            f"{config.path}: the RoPE of {kind} is of type {rope.type!r} and rotates "
            f"{rope.rotary_dim} of {head_size} channels; supported are the types "
            f"{', '.join(_ROPE_TYPES)}, the last one in layers without a window, where it may have "
            "a partial_rotary_factor, for Gemma 4."
        )
    return rope


def _global_heads(config: Config, spec: ArchSpec) -> HeadsSpec | None:
    """Heads of layers without a window, by transformers' newer key or by the older ones."""
    shares = config.get("attention_k_eq_v", bool, False)
    size = config.get("global_head_dim", int, 512)
    count = config.get("num_global_key_value_heads", int, spec.num_kv_heads)
    if not shares:
        count = spec.num_kv_heads
    if config.has("per_layer_config"):
        size, count = _overrides(config, spec)
    if not shares and (size, count) == (spec.head_size, spec.num_kv_heads):
        return None
    try:
        return HeadsSpec(head_size=size, num_kv_heads=count, keys_are_values=shares)
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _overrides(config: Config, spec: ArchSpec) -> tuple[int, int]:
    """Size and number of KV heads of layers without a window, by `per_layer_config`.

    Raises UnsupportedModelError where it says something else, or something of other layers.
    """
    given = config.require("per_layer_config", dict)
    layers = [layer for layer, window in enumerate(spec.sliding_window) if window is None]
    # Transformers fills numbers up with zeros; Python makes none of more than 4,300 digits.
    told = {
        int(key): one for key, one in given.items() if key.isdecimal() and len(key) <= _MOST_DIGITS
    }
    first = told.get(layers[0], {})
    is_known = (
        len(told) == len(given)
        and set(told) <= set(layers)
        and all(told.get(layer, {}) == first for layer in layers)
        and isinstance(first, dict)
        and set(first) <= _OVERRIDES
        and all(type(one) is int for one in first.values())
    )
    if not is_known:
        raise UnsupportedModelError(
            f"{config.path}: per_layer_config is {given}; supported are {sorted(_OVERRIDES)}, the "
            f"same for each of the layers without a window, {layers}."
        )
    return first.get("head_dim", spec.head_size), first.get(
        "num_key_value_heads", spec.num_kv_heads
    )


def _layer_input_size(config: Config, spec: ArchSpec) -> int | None:
    """Channels of what layers are told of each token; None: nothing."""
    key, rows = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    size = config.get(key, int, 0 if config.is_null(key) else 256)
    vocab = config.get(rows, int, 262_144)
    if not size:
        return None
    if vocab != spec.vocab_size:
        raise UnsupportedModelError(
            f"{config.path}: {rows} is {vocab} and vocab_size {spec.vocab_size}; supported is a "
            f"{key} of {size} with as many rows as there are tokens, or {key} = 0."
        )
    return size


def _cap(config: Config) -> float | None:
    key = "final_logit_softcapping"
    found = config.get(key, float, None)
    if found is not None and not 0 < found < math.inf:
        raise CheckpointError(f"{config.path}: {key} is {found}; it must be above 0, or null.")
    return found


_DENSE: Final = replace(TENSORS, norm_offset=0.0)
_WITH_EXPERTS: Final = replace(
    _DENSE,
    router="router.proj",
    expert_gate_up=("experts.gate_up_proj",),
    expert_down=("experts.down_proj",),
    shared_gate_up=_DENSE.gate_up,
    shared_down=_DENSE.down,
)
_OTHERS: Final = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")

FAMILY: Final = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    spec=read_spec,
    tensors=_WITH_EXPERTS,
    other_layouts=(_DENSE,),
)
WITH_IMAGES: Final = wrapped(
    FAMILY,
    name="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    image_keys=(
        *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"),
        *("boa_token_id", "eoa_token_index", "audio_token_id"),
        *("audio_config", "vision_config", "vision_soft_tokens_per_image"),
    ),
    defaults={  # transformers' Gemma4TextConfig
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262_144,
    },
    layouts=(newer_names(_WITH_EXPERTS, _OTHERS), newer_names(_DENSE, _OTHERS)),
)
