"""OLMoE 1B-7B: experts, and norms on all queries (keys) at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """OLMoE: optional biases on attention projections; eight of 64 experts."""
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config,
        family="olmoe",
        qkv_bias=biased,
        o_bias=biased,
        qk_norm=True,
        context_length=context_length,
    )
    experts = experts_spec(
        config,
        count=64,
        per_token=8,
        size=spec.intermediate_size,
        normalized=config.get("norm_topk_prob", bool, False),
    )
    return replace(spec, whole_qk_norm=True, experts=experts)


FAMILY: Final = Family(name="olmoe", architecture="OlmoeForCausalLM", spec=read_spec)
