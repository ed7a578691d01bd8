"""Arcee's AFM: Llama whose feed-forward layers have no gate."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Arcee: the square of what is positive; optional biases."""
    biased = config.get("attention_bias", bool, False)
    return ungated_spec(
        config,
        default="relu2",
        family="arcee",
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
    )


FAMILY: Final = Family(name="arcee", architecture="ArceeForCausalLM", spec=read_spec)
