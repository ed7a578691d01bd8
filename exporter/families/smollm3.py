"""SmolLM3: Llama in which some layers rotate nothing (NoPE), every fourth unless told otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """SmolLM3: where there is a sliding window, layers without rotation have it."""
    attention_bias = config.get("attention_bias", bool, False)
    rotated = rotated_layers(config)
    spec = decoder_spec(
        config,
        family="smollm3",
        num_kv_heads=4,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", bool, False),
        sliding_window=_windows(config, rotated),
        context_length=context_length,
        theta=2_000_000.0,
        tied=True,
    )
    return replace(spec, rotated_layers=rotated)


def rotated_layers(config: Config) -> tuple[bool, ...]:
    """Which layers rotate: all but every so many, or what `no_rope_layers` says for all its name.

    Raises CheckpointError: it has no flag for each layer.
    """
    num_layers = config.require("num_hidden_layers", int)
    interval = config.get("no_rope_layer_interval", int, 4)
    flags = config.get("no_rope_layers", list, None)
    if flags is None and interval > 0:
        flags = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if flags is None or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
        raise CheckpointError(
            f"{config.path}: no_rope_layers is {flags} and no_rope_layer_interval {interval}; the "
            f"first has a 1 or a 0 for each of {num_layers} layers, or the second is above 0."
        )
    return tuple(bool(flag) for flag in flags[:num_layers])


def _windows(config: Config, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    config.get("max_window_layers", int, None)  # is there, and nobody reads it
    window = config.get("sliding_window", int, None)
    if not config.get("use_sliding_window", bool, False):
        window = None
    kinds = [
        "full_attention" if window is None or turns else "sliding_attention" for turns in rotated
    ]
    kinds = config.get("layer_types", list, kinds)
    known: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        known["sliding_attention"] = window
    if len(kinds) != len(rotated) or not all(kind in known for kind in kinds):
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {kinds} and the window {window}; supported are "
            f"{len(rotated)} entries (one a layer) from {sorted(known)}, and sliding_attention "
            "only with use_sliding_window = true and a sliding_window."
        )
    return tuple(known[kind] for kind in kinds)


FAMILY: Final = Family(name="smollm3", architecture="SmolLM3ForCausalLM", spec=read_spec)
