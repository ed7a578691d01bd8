"""DeepSeek V2 and V2 Lite: attention of latents, experts that a softmax chooses."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import softmax_experts, with_experts
from onnxport.exporter.families.base import Family
from onnxport.exporter.latentconfig import latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(
    kv_rank=512, nope_size=128, rope_size=64, value_size=128, query_rank=1536
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """DeepSeek V2: neighbours rotate; the first layers may be without experts."""
    spec = latent_spec(
        config,
        family="deepseek_v2",
        defaults=_SIZES,
        interleaved=True,
        context_length=context_length,
    )
    experts = softmax_experts(config, count=64, size=1407, shared=2)
    return with_experts(spec, experts)


FAMILY: Final = Family(name="deepseek_v2", architecture="DeepseekV2ForCausalLM", spec=read_spec)
