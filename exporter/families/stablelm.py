"""StableLM 3B, and StableLM 2: LayerNorms, and a quarter of each head rotates."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, check_heads, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """StableLM: optional biases on queries, keys and values; optionally all is side by side."""
    if config.get("qk_layernorm", bool, False):
        raise UnsupportedModelError(f"{config.path}: qk_layernorm")
    spec = decoder_spec(
        config,
        family="stablelm",
        num_kv_heads=32,
        qkv_bias=config.get("use_qkv_bias", bool, False),
        context_length=context_length,
        partial_rotary_factor=0.25,
        epsilon="layer_norm_eps",
    )
    config.ignore("hidden_dropout")
    parallel = config.get("use_parallel_residual", bool, False) or None
    spec = replace(spec, layer_norms=True, norm_biases=True, parallel_layers=parallel)
    return check_heads(config, spec)


FAMILY: Final = Family(name="stablelm", architecture="StableLmForCausalLM", spec=read_spec)
