"""OLMo 2: no norms before layers, but on what they add, and on all queries (keys) at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """OLMo 2: optional biases on attention projections."""
    return olmo_spec(config, family="olmo2", context_length=context_length)


def olmo_spec(config: Config, **differences: Any) -> ArchSpec:
    """What OLMo 2 and 3 share; `differences` are keyword arguments of `decoder_spec`."""
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(config, qkv_bias=biased, o_bias=biased, qk_norm=True, **differences)
    return replace(spec, raw_inputs=True, output_norms=True, whole_qk_norm=True)


FAMILY: Final = Family(name="olmo2", architecture="Olmo2ForCausalLM", spec=read_spec)
