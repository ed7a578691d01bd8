"""Granite 3, dense: Llama with four multipliers, which go into weights that are there anyway.

What the layers read of the residual stream are norms of it, so it may be any number of times as
large: here it is that of Granite over `embedding_multiplier`. So embeddings stay as they are, what
layers add is `residual_multiplier / embedding_multiplier` times what their weights say, and the
norms' epsilon is over the square of it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Granite: optional biases, as Llama's; every multiplier is 1 where absent."""
    attention_bias = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config,
        family="granite",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
    )
    embedding = _multiplier(config, "embedding_multiplier")
    return replace(
        spec,
        rms_norm_eps=spec.rms_norm_eps / embedding**2,
        attention_scale=_multiplier(config, "attention_multiplier"),
        residual_scale=_multiplier(config, "residual_multiplier") / embedding,
        logits_scale=1 / _multiplier(config, "logits_scaling"),
    )


def _multiplier(config: Config, key: str) -> float:
    found = config.get(key, float, 1.0)
    if not 0 < found < math.inf:
        raise CheckpointError(f"{config.path}: {key} is {found}; it must be above 0.")
    return found


FAMILY: Final = Family(name="granite", architecture="GraniteForCausalLM", spec=read_spec)
