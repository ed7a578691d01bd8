"""Ministral 3: Mistral whose queries grow beyond the context that it was first trained with.

There each query is multiplied with `1 + beta * log(1 + floor(position / original))`, which is 1
within the original context. An artifact is for that: its graphs have no such factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, context_within, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.graphs.spec import ArchSpec

_BETA: Final = "llama_4_scaling_beta"
_ORIGINAL: Final = "original_max_position_embeddings"


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Ministral 3: heads of 128 unless given; one optional window for all layers."""
    rope, context_length = within_original(config, rope_parameters(config), context_length)
    window = config.get("sliding_window", int, None)
    return decoder_spec(
        config,
        family="ministral3",
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=8,
        sliding_window=(window,) * config.require("num_hidden_layers", int),
        context_length=context_length,
        rope={"rope_theta": 1_000_000.0, **rope},
    )


def within_original(
    config: Config, rope: Mapping[str, Any], context_length: int | None
) -> tuple[dict[str, Any], int | None]:
    """RoPE keys without what makes queries grow, and the context length within which none does.

    Raises:
        CheckpointError: A number is missing, or none.
        UnsupportedModelError: A longer context was asked for.
    """
    rope = dict(rope)
    beta = _number(config, _BETA, rope.pop(_BETA, None))
    original = _number(config, _ORIGINAL, rope.get(_ORIGINAL))
    rope.pop("max_position_embeddings", None)  # transformers repeats the model's there
    if beta:
        beyond = "this model's queries grow with their positions"
        end = int(original)
        context_length = context_within(config, end, context_length, f"its {_ORIGINAL}", beyond)
    return rope, context_length


def _number(config: Config, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(
            f"{config.path}: the RoPE key {name!r} is {value!r}; this model needs a number."
        )
    return value


FAMILY: Final = Family(name="ministral3", architecture="Ministral3ForCausalLM", spec=read_spec)
