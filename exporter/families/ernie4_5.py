"""ERNIE 4.5, dense: Llama that rotates neighbouring channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """ERNIE: biases everywhere or nowhere; heads of 128 unless given."""
    biased = config.get("use_bias", bool, False)
    spec = decoder_spec(
        config,
        family="ernie4_5",
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=2,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        context_length=context_length,
        theta=500_000.0,
        tied=True,
    )
    return replace(spec, rope=replace(spec.rope, interleaved=True))


FAMILY: Final = Family(name="ernie4_5", architecture="Ernie4_5ForCausalLM", spec=read_spec)
