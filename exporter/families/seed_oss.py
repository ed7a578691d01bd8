"""Seed-OSS: Llama with biases on queries, keys and values, and heads of their own size."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Seed-OSS: the output projection's bias is told apart from the others'."""
    return decoder_spec(
        config,
        family="seed_oss",
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=8,
        qkv_bias=config.get("attention_bias", bool, True),
        o_bias=config.get("attention_out_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
    )


FAMILY: Final = Family(name="seed_oss", architecture="SeedOssForCausalLM", spec=read_spec)
