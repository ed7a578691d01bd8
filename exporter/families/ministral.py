"""Ministral 8B of 2024: Mistral, some of whose layers may see all."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Ministral: a window of 4096 where absent, none if null; in each layer unless told."""
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    return decoder_spec(
        config,
        family="ministral",
        num_kv_heads=8,
        sliding_window=windows_by_type(config, window, [kind] * num_layers),
        context_length=context_length,
    )


FAMILY: Final = Family(name="ministral", architecture="MinistralForCausalLM", spec=read_spec)
