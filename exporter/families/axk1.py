"""A.X K1: DeepSeek V3, with a norm of what experts and the shared layer add together."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import (
    FURTHER_LAYERS,
    corrected_experts,
    layers_by_kind,
    with_experts,
)
from onnxport.exporter.families.base import Family
from onnxport.exporter.latentconfig import latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(
    kv_rank=512, nope_size=128, rope_size=64, value_size=128, query_rank=1536
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """A.X K1: the first layer has no experts unless told otherwise; queries always have latents.

    Published files have no vector that corrects scores: `correction_tells`. What `topk_method` says
    of that transformers does not read.
    """
    config.ignore("topk_method", *FURTHER_LAYERS)
    if config.is_null("q_lora_rank"):
        raise UnsupportedModelError(
            f"{config.path}: q_lora_rank is null; supported is a number, for transformers makes "
            "queries of latents here."
        )
    spec = latent_spec(
        config,
        family="axk1",
        defaults=_SIZES,
        interleaved=config.get("rope_interleave", bool, True),
        context_length=context_length,
    )
    experts = corrected_experts(
        config.replaced(topk_method=None),
        count=192,
        per_token=8,
        size=2048,
        normalized=True,
        shared=1,
        layers=layers_by_kind(config, spec.num_layers, dense=1, reads_first=True),
        scale=2.5,
        groups=(8, 4),
    )
    return with_experts(spec, replace(experts, sum_normed=True))


FAMILY: Final = Family(
    name="axk1",
    architecture="AXK1ForCausalLM",
    spec=read_spec,
    further_layers=FURTHER_LAYERS,
    correction_tells=True,
)
