"""Qwen2 and Qwen2.5: biases on queries, keys and values; a window on the later layers."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config, decoder_spec, layer_windows
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Qwen2: always biased queries, keys and values, never an output or MLP bias."""
    return decoder_spec(
        config,
        family="qwen2",
        num_kv_heads=32,
        qkv_bias=True,
        sliding_window=layer_windows(config),
        context_length=context_length,
    )


FAMILY: Final = Family(name="qwen2", architecture="Qwen2ForCausalLM", spec=read_spec)
