"""Ministral 3: Mistral whose queries grow beyond the context that it was first trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.spec import ArchSpec

_BETA: Final = "llama_4_scaling_beta"
_ORIGINAL: Final = "original_max_position_embeddings"


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Ministral 3: heads of 128 unless given; one optional window for all layers."""
    rope, growth = growing_queries(config, rope_parameters(config))
    window = config.get("sliding_window", int, None)
    spec = decoder_spec(
        config,
        family="ministral3",
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=8,
        sliding_window=(window,) * config.require("num_hidden_layers", int),
        context_length=context_length,
        rope={"rope_theta": 1_000_000.0, **rope},
    )
    return replace(spec, query_growth=growth)


def growing_queries(
    config: Config, rope: Mapping[str, Any]
) -> tuple[dict[str, Any], GrowthSpec | None]:
    """RoPE keys without what makes queries grow, and how they do; None: they do not.

    Raises CheckpointError: a number is missing, none, or out of range.
    """
    rope = dict(rope)
    beta = _number(config, _BETA, rope.pop(_BETA, None))
    original = _number(config, _ORIGINAL, rope.get(_ORIGINAL))
    rope.pop("max_position_embeddings", None)  # transformers repeats the model's there
    if not beta:
        return rope, None
    try:
        return rope, GrowthSpec(strength=beta, interval=int(original), offset=0, without_rope=False)
    except ValueError as error:
        raise CheckpointError(
            f"{config.path}: {_BETA} is {beta} and {_ORIGINAL} {original}: {error}."
        ) from error


def _number(config: Config, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(
            f"{config.path}: the RoPE key {name!r} is {value!r}; this model needs a number."
        )
    return value


FAMILY: Final = Family(name="ministral3", architecture="Ministral3ForCausalLM", spec=read_spec)
