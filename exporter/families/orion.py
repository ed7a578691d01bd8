"""Orion 14B: Llama with LayerNorms."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Orion: `rms_norm_eps` is that of LayerNorms, which have biases; nothing else has."""
    spec = decoder_spec(config, family="orion", context_length=context_length)
    return replace(spec, layer_norms=True, norm_biases=True)


FAMILY: Final = Family(name="orion", architecture="OrionForCausalLM", spec=read_spec)
