"""Youtu-LLM: DeepSeek V3's attention of latents, and no experts."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.latentconfig import latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(
    kv_rank=512, nope_size=128, rope_size=64, value_size=128, query_rank=1536
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Youtu-LLM: neighbours rotate, and the embedding is the head, unless told otherwise."""
    config.ignore("embedding_initializer_range")
    return latent_spec(
        config,
        family="youtu",
        defaults=_SIZES,
        interleaved=config.get("rope_interleave", bool, True),
        context_length=context_length,
        tied=True,
    )


FAMILY: Final = Family(name="youtu", architecture="YoutuForCausalLM", spec=read_spec)
