"""GLM 4.7 Flash: DeepSeek V3's attention of latents and experts, by other defaults."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import (
    FURTHER_LAYERS,
    corrected_experts,
    layers_by_kind,
    with_experts,
)
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.mtp import behind_the_last
from onnxport.exporter.latentconfig import latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(kv_rank=512, nope_size=192, rope_size=64, value_size=256, query_rank=768)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GLM 4.7 Flash: which layers have experts is in `mlp_layer_types`."""
    spec = latent_spec(
        config,
        family="glm4_moe_lite",
        defaults=_SIZES,
        interleaved=config.get("rope_interleave", bool, True),
        context_length=context_length,
    )
    config.ignore(*FURTHER_LAYERS)
    experts = corrected_experts(
        config,
        count=64,
        per_token=4,
        size=1536,
        normalized=True,
        shared=1,
        layers=layers_by_kind(config, spec.num_layers, dense=1),
        scale=1.8,
    )
    return with_experts(spec, experts)


FAMILY: Final = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    spec=read_spec,
    further_layers=FURTHER_LAYERS,
    mtp=behind_the_last,
)
