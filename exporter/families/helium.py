"""Helium 1: Llama that rotates neighbouring channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Helium: no bias on the output projection; heads of 128 unless given."""
    spec = decoder_spec(
        config,
        family="helium",
        head_size=128,
        num_kv_heads=20,
        qkv_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
        theta=100_000.0,
    )
    return replace(spec, rope=replace(spec.rope, interleaved=True))


FAMILY: Final = Family(name="helium", architecture="HeliumForCausalLM", spec=read_spec)
