"""FlexOlmo: OLMo 2 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.olmo2 import olmo_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """FlexOlmo: five of seven experts, whose weights are those of the softmax of all."""
    spec = olmo_spec(config, family="flex_olmo", context_length=context_length, theta=500_000.0)
    experts = experts_spec(
        config,
        count=7,
        per_token=5,
        size=spec.intermediate_size,
        normalized=config.get("norm_topk_prob", bool, False),
    )
    return replace(spec, experts=experts)


FAMILY: Final = Family(name="flex_olmo", architecture="FlexOlmoForCausalLM", spec=read_spec)
