"""Jais 2: LayerNorms with biases, biases everywhere, and feed-forward layers without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Jais 2: the square of what is positive."""
    biased = config.get("attention_bias", bool, True)
    spec = ungated_spec(
        config,
        default="relu2",
        family="jais2",
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=config.get("mlp_bias", bool, True),
        context_length=context_length,
        epsilon="layer_norm_eps",
    )
    return replace(spec, layer_norms=True, norm_biases=True)


FAMILY: Final = Family(name="jais2", architecture="Jais2ForCausalLM", spec=read_spec)
