"""StableLM 3B, and StableLM 2: LayerNorms, and a quarter of each head rotates."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config, check_heads, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """StableLM: optional biases and norms of queries and keys; all may be side by side."""
    has_norms = config.get("qk_layernorm", bool, False)
    spec = decoder_spec(
        config,
        family="stablelm",
        num_kv_heads=32,
        qkv_bias=config.get("use_qkv_bias", bool, False),
        context_length=context_length,
        partial_rotary_factor=0.25,
        qk_norm=has_norms,
        epsilon="layer_norm_eps",
    )
    config.ignore("hidden_dropout")
    parallel = config.get("use_parallel_residual", bool, False) or None
    return replace(
        check_heads(config, spec),
        layer_norms=True,
        norm_biases=True,
        parallel_layers=parallel,
        apart_qk_norm=has_norms or None,
    )


FAMILY: Final = Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        q_norm="self_attn.q_layernorm.norms.{}.weight",
        k_norm="self_attn.k_layernorm.norms.{}.weight",
    ),
)
