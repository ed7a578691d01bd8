"""dots.llm1: Qwen3's attention, and experts that sigmoids choose."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import corrected_experts, with_experts
from onnxport.exporter.families.base import Family
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """dots.llm1: optional biases on attention projections; a window on the last layers."""
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config,
        family="dots1",
        num_kv_heads=32,
        qkv_bias=biased,
        o_bias=biased,
        qk_norm=True,
        sliding_window=_windows(config),
        context_length=context_length,
    )
    experts = corrected_experts(
        config, count=None, per_token=None, size=1408, normalized=False, shared=None, first_dense=0
    )
    return with_experts(spec, experts)


def _windows(config: Config) -> tuple[int | None, ...]:
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    first = config.get("max_window_layers", int, 62)
    slides = [window is not None and i >= first for i in range(num_layers)]
    types = ["sliding_attention" if one else "full_attention" for one in slides]
    return windows_by_type(config, window, types)


FAMILY: Final = Family(name="dots1", architecture="Dots1ForCausalLM", spec=read_spec)
