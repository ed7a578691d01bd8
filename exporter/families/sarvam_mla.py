"""Sarvam 105B: DeepSeek V3's attention of latents and experts, without groups."""

from __future__ import annotations

from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import FURTHER_LAYERS, with_experts
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.sarvam_moe import sarvam_experts
from onnxport.exporter.latentconfig import latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(
    kv_rank=512, nope_size=128, rope_size=64, value_size=128, query_rank=None
)
_DROPPED: Final = ("embedding_dropout", "output_dropout", "q_head_dim", "router_dtype")
_YARN: Final = "deepseek_yarn"


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Sarvam: neighbours rotate unless told otherwise; published files have older spellings."""
    config.ignore(*_DROPPED, *FURTHER_LAYERS)
    spec = latent_spec(
        _respelled(config),
        family="sarvam_mla",
        defaults=_SIZES,
        interleaved=config.get("rope_interleave", bool, True),
        context_length=context_length,
    )
    return with_experts(spec, sarvam_experts(config, per_token=8, size=2048))


def _respelled(config: Config) -> Config:
    """The configuration as DeepSeek V3's.

    Files name the width of a cached row as that of a head, for vLLM, and yarn as DeepSeek's own.
    """
    rank = config.get("kv_lora_rank", int, _SIZES.kv_rank)
    rotated = config.get("qk_rope_head_dim", int, _SIZES.rope_size)
    head = config.get("head_dim", int, rotated)
    if head not in (rotated, rank + rotated):
        raise CheckpointError(
            f"{config.path}: head_dim is {head}; it may be qk_rope_head_dim, {rotated}, or that "
            f"and kv_lora_rank, {rank + rotated}. Remove it."
        )
    scaling = dict(config.get("rope_scaling", dict, {}))
    if scaling.get("rope_type", scaling.get("type")) == _YARN:
        scaling = {key: one for key, one in scaling.items() if key != "type"}
        scaling["rope_type"] = "yarn"
    return config.replaced(head_dim=rotated, rope_scaling=scaling or None)


FAMILY: Final = Family(
    name="sarvam_mla",
    architecture="SarvamMLAForCausalLM",
    computed_by="DeepseekV3ForCausalLM",
    spec=read_spec,
    further_layers=FURTHER_LAYERS,
)
