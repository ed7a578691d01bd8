"""DeepSeek V3 and R1, Kimi K2, Moonlight: attention of latents, experts that sigmoids choose."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import FURTHER_LAYERS, corrected_experts, with_experts
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.mtp import behind_the_last
from onnxport.exporter.latentconfig import latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(
    kv_rank=512, nope_size=128, rope_size=64, value_size=128, query_rank=1536
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """DeepSeek V3: neighbours rotate unless told otherwise; groups of experts."""
    spec = latent_spec(
        config,
        family="deepseek_v3",
        defaults=_SIZES,
        interleaved=config.get("rope_interleave", bool, True),
        context_length=context_length,
    )
    config.ignore(*FURTHER_LAYERS)
    experts = corrected_experts(
        config,
        count=256,
        per_token=8,
        size=2048,
        normalized=True,
        shared=1,
        first_dense=3,
        scale=2.5,
        groups=(8, 4),
    )
    return with_experts(spec, experts)


FAMILY: Final = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    spec=read_spec,
    further_layers=FURTHER_LAYERS,
    mtp=behind_the_last,
    other_types=("kimi_k2",),
)
