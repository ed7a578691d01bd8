"""Solar Open: Llama with experts in every layer that sigmoids choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import corrected_experts
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec

_UNUSED_SIZE: Final = 10240  # of dense layers, of which there are none


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Solar Open: heads of 128 unless given; no layer without experts."""
    spec = decoder_spec(
        config,
        family="solar_open",
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=8,
        intermediate_size=_UNUSED_SIZE,
        qkv_bias=config.get("attention_bias", bool, False),
        context_length=context_length,
        theta=1_000_000.0,
    )
    experts = corrected_experts(
        config, count=128, per_token=8, size=1280, normalized=True, shared=1
    )
    return replace(spec, experts=experts)


FAMILY: Final = Family(name="solar_open", architecture="SolarOpenForCausalLM", spec=read_spec)
