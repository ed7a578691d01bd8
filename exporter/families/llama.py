"""Llama 1 to 3, and the many models that share its architecture."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Llama: optional biases on all attention projections, and on the MLP's."""
    attention_bias = config.get("attention_bias", bool, False)
    return decoder_spec(
        config,
        family="llama",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
    )


FAMILY: Final = Family(name="llama", architecture="LlamaForCausalLM", spec=read_spec)
