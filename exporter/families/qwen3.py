"""Qwen3, dense: query and key heads are normalized; the head size is its own."""

from __future__ import annotations

from typing import Any, Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.windows import layer_windows
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Qwen3: heads of 128 unless given."""
    return qwen3_spec(
        config,
        family="qwen3",
        head_size=128,
        num_kv_heads=32,
        sliding_window=layer_windows(config),
        context_length=context_length,
    )


def qwen3_spec(config: Config, **differences: Any) -> ArchSpec:
    """What models with Qwen3's attention share: QK-norm, optional biases on its projections.

    `differences` are keyword arguments of `decoder_spec`.
    """
    attention_bias = config.get("attention_bias", bool, False)
    return decoder_spec(
        config,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        **differences,
    )


FAMILY: Final = Family(name="qwen3", architecture="Qwen3ForCausalLM", spec=read_spec)
