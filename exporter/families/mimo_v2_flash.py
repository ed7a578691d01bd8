"""MiMo V2 Flash: windows with sinks and more KV heads, values narrower than keys, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import (
    FURTHER_LAYERS,
    check_choice,
    corrected_experts,
    layers_by_kind,
    with_experts,
)
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.granite import checked_multiplier
from onnxport.exporter.families.lfm3 import whole_ropes
from onnxport.exporter.ropeconfig import check_outer, rope_from
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.heads_spec import HeadsSpec
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_PARTIAL: Final = "partial_rotary_factor"
_ROTATED: Final = 0.334  # of each head
# Where the configuration says nothing of RoPE.
_ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    _FULL: {"rope_theta": 5_000_000.0, _PARTIAL: _ROTATED},
    _SLIDING: {"rope_theta": 10_000.0, _PARTIAL: _ROTATED},
}
# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_full_attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (True,),
    "n_shared_experts": (0,),
}
_UNUSED: Final = (
    *("attention_chunk_size", "hybrid_block_size", "moe_router_dtype"),
    *FURTHER_LAYERS,
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """MiMo V2 Flash: heads of 192 channels, of which values have 128, unless given."""
    check_choice(config, _KNOWN)
    config.ignore(*_UNUSED)
    num_layers = config.require("num_hidden_layers", int)
    windows = windows_by_type(config, _window(config), _kinds(num_layers))
    _check_pattern(config, "hybrid_layer_pattern", [window is not None for window in windows])
    kinds = [_FULL if window is None else _SLIDING for window in windows]
    ropes = _ropes(config, kinds)
    first = ropes[_FULL if _FULL in kinds else _SLIDING]
    local = ropes[_SLIDING] if _SLIDING in kinds else first
    check_outer(config, "layernorm_epsilon", config.get("rms_norm_eps", float, 1e-5))
    spec = decoder_spec(
        config.replaced(rms_norm_eps=config.get("rms_norm_eps", float, 1e-5)),
        family="mimo_v2_flash",
        head_size=192,
        num_kv_heads=4,
        sliding_window=windows,
        context_length=context_length,
        rope=first,
    )
    own, _ = rope_from(config, local, spec.head_size, None)
    try:
        spec = _with_windows(config, replace(spec, attention_scale=spec.head_size**-0.5))
        spec = replace(
            spec,
            local_rope=None if own == spec.rope else own,
            value_size=_value_size(config, spec),
            value_scale=_value_scale(config),
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error
    layers = layers_by_kind(config, num_layers, dense=1)
    _check_pattern(config, "moe_layer_freq", list(layers))
    experts = corrected_experts(
        config.replaced(moe_layer_freq=None),
        count=256,
        per_token=8,
        normalized=True,
        shared=0,
        size=2048,
        layers=layers,
    )
    return with_experts(spec, experts)


def _kinds(num_layers: int) -> list[str]:
    """The layers' types where `layer_types` does not say: the first sees all, and every sixth."""
    return [_SLIDING if i and (i + 1) % 6 else _FULL for i in range(num_layers)]


def _window(config: Config) -> int | None:
    """Visible tokens with the query's own, which `sliding_window_size` does not count."""
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 129)
    size = config.get("sliding_window_size", int, None)
    return window if size is None else size + 1


def _check_pattern(config: Config, key: str, wanted: list[bool]) -> None:
    """Refuse a list of 0 and 1 that transformers does not read, unless it says what holds."""
    found = config.get(key, list, list(map(int, wanted)))
    if found != wanted:
        raise CheckpointError(
            f"{config.path}: {key} is {found}, which transformers does not read here: it computes "
            f"with {list(map(int, wanted))}. Remove it, or give layer_types and mlp_layer_types "
            "what the model was trained with."
        )


def _ropes(config: Config, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """RoPE keys by layer type; those at the top may repeat what these say."""
    outer = dict.fromkeys(("rope_theta", "swa_rope_theta", _PARTIAL))
    wanted = [kind for kind in _ROPES if kind in kinds]
    ropes = whole_ropes(config.replaced(**outer), wanted, _ROPES)
    for rope in ropes.values():
        if rope.get("rope_type", "default") == "default":
            rope.setdefault(_PARTIAL, _ROTATED)
    for key, kind in (("rope_theta", _FULL), ("swa_rope_theta", _SLIDING)):
        if kind in kinds:
            check_outer(config, key, ropes[kind]["rope_theta"])
        else:  # of layers that are not there
            config.ignore(key)
    for kind in wanted:
        check_outer(config, _PARTIAL, ropes[kind].get(_PARTIAL, 1.0))
    return ropes


def _with_windows(config: Config, spec: ArchSpec) -> ArchSpec:
    """The model whose layers with a window have twice as many KV heads, and sinks.

    Other sizes of their own, which published files name, are those of all layers.
    """
    sizes = {"swa_num_attention_heads": spec.num_heads, "swa_head_dim": spec.head_size}
    check_choice(config, {key: (one,) for key, one in sizes.items()})
    heads = config.get("swa_num_key_value_heads", int, 2 * spec.num_kv_heads)
    slides = [window is not None for window in spec.sliding_window]
    if not any(slides):
        return spec
    spec = replace(spec, attention_sinks=True)
    if all(slides):
        return replace(spec, num_kv_heads=heads)
    others = HeadsSpec(
        head_size=spec.head_size, num_kv_heads=spec.num_kv_heads, keys_are_values=False
    )
    spec = replace(spec, num_kv_heads=heads, window_sinks=True)
    return spec if heads == others.num_kv_heads else replace(spec, global_heads=others)


def _value_size(config: Config, spec: ArchSpec) -> int | None:
    size = config.get("v_head_dim", int, 128)
    check_choice(config, {"swa_v_head_dim": (size,)})
    return None if size == spec.head_size else size


def _value_scale(config: Config) -> float | None:
    key = "attention_value_scale"
    scale = config.get(key, float, 1.0 if config.is_null(key) else 0.707)
    return None if scale == 1.0 else checked_multiplier(config, key, scale)


FAMILY: Final = Family(
    name="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    spec=read_spec,
    further_layers=FURTHER_LAYERS,
    tensors=TensorNames(sinks="self_attn.attention_sink_bias", further=("model.mtp.",)),
)
