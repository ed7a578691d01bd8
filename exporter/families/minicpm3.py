"""MiniCPM 3: attention of latents, without experts, and multipliers that go into weights.

What that does to the residual stream is said in `granite`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.granite import checked_multiplier
from onnxport.exporter.latentconfig import latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """MiniCPM 3: halves rotate; values are as wide as a head of the token unless told otherwise."""
    hidden = config.require("hidden_size", int)
    sizes = LatentSpec(
        kv_rank=256,
        nope_size=64,
        rope_size=32,
        value_size=hidden // max(config.require("num_attention_heads", int), 1),
        query_rank=768,
    )
    spec = latent_spec(
        config,
        family="minicpm3",
        defaults=sizes,
        interleaved=False,
        context_length=context_length,
        tied=True,
    )
    embedding = checked_multiplier(config, "scale_emb", config.get("scale_emb", float, 12.0))
    depth = _told(config, "scale_depth", 1.4, math.sqrt(spec.num_layers))
    base = _told(config, "dim_model_base", 256.0, float(hidden))
    return multiplied(spec, embedding, depth, base)


def multiplied(spec: ArchSpec, embedding: float, depth: float, base: float) -> ArchSpec:
    """The model with `scale_emb`, `scale_depth` and `dim_model_base`."""
    return replace(
        spec,
        rms_norm_eps=spec.rms_norm_eps / embedding**2,
        residual_scale=depth / math.sqrt(spec.num_layers) / embedding,
        stream_scale=embedding,
        logits_scale=base / spec.hidden_size,
    )


def _told(config: Config, key: str, absent: float, null: float) -> float:
    """What a key says, or means where it is absent, or null, when it scales nothing."""
    found = config.get(key, float, null if config.is_null(key) else absent)
    return checked_multiplier(config, key, found)


FAMILY: Final = Family(name="minicpm3", architecture="MiniCPM3ForCausalLM", spec=read_spec)
