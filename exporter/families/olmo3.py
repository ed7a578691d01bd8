"""OLMo 3: OLMo 2 with windows, whose layers keep the RoPE that the model was first trained with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.olmo2 import olmo_spec
from onnxport.exporter.ropeconfig import rope_by_layer_type, rope_from
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_THETA: Final = 500_000.0


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """OLMo 3: every fourth layer sees all unless told otherwise, and has the scaled RoPE."""
    ropes = _ropes(config)
    spec = olmo_spec(
        config,
        family="olmo3",
        sliding_window=_windows(config),
        context_length=context_length,
        rope=ropes[_FULL],
    )
    return replace(spec, local_rope=local_rope(config, ropes[_SLIDING], spec))


def _windows(config: Config) -> tuple[int | None, ...]:
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    types = [_SLIDING if (layer + 1) % 4 else _FULL for layer in range(num_layers)]
    return windows_by_type(config, window, types)


def _ropes(config: Config) -> dict[str, dict[str, Any]]:
    """RoPE keys by layer type.

    An outer `rope_theta` is that of all layers in transformers 4, and that of layers without a
    window in transformers 5; so it is refused unless both mean the same.
    """
    theta = config.get("rope_theta", float, _THETA)
    sliding = config.get("rope_parameters", dict, {}).get(_SLIDING)
    if theta != _THETA and not (isinstance(sliding, dict) and "rope_theta" in sliding):
        raise UnsupportedModelError(
            f"{config.path}: rope_theta is {theta}, which versions of transformers read in two "
            f"ways; say in rope_parameters what it is for {_FULL} and for {_SLIDING}."
        )
    return rope_by_layer_type(
        config, {_FULL: {"rope_theta": theta}, _SLIDING: {"rope_theta": _THETA}}, scaled=_FULL
    )


def local_rope(config: Config, values: dict[str, Any], spec: ArchSpec) -> RopeSpec | None:
    """The rotary embedding of layers with a window, where it is another one."""
    local, _ = rope_from(config, values, spec.head_size, None)
    if local == spec.rope or not any(spec.sliding_window):
        return None
    if local.type != "default" or local.rotary_dim != spec.head_size:
        raise UnsupportedModelError(
            f"{config.path}: the RoPE of {_SLIDING} is of type {local.type!r} and rotates "
            f"{local.rotary_dim} of {spec.head_size} channels; supported are the type default, "
            f"and all channels, where it is not that of {_FULL}."
        )
    return local


FAMILY: Final = Family(name="olmo3", architecture="Olmo3ForCausalLM", spec=read_spec)
