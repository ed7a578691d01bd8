"""CWM, Meta's code world model: Llama 3 with a sliding window in three of four layers."""

from __future__ import annotations

from typing import Any, Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.ropeconfig import check_outer, rope_parameters
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec

_THETA: Final = 1_000_000.0
_ROPE: Final = {  # where the configuration has no RoPE parameters
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """CWM: every fourth layer, from the first, sees all unless told otherwise."""
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 8192)
    types = ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)]
    return decoder_spec(
        config,
        family="cwm",
        head_size=128,
        num_kv_heads=8,
        mlp_bias=config.get("mlp_bias", bool, False),
        sliding_window=windows_by_type(config, window or None, types),
        context_length=context_length,
        rope=_rope(config),
    )


def _rope(config: Config) -> dict[str, Any]:
    """The RoPE parameters: Llama 3's as published unless told otherwise."""
    if config.has("rope_parameters") or config.has("rope_scaling"):
        return {"rope_theta": _THETA, **rope_parameters(config)}
    check_outer(config, "rope_theta", _THETA)
    return {"rope_theta": _THETA, **_ROPE}


FAMILY: Final = Family(name="cwm", architecture="CwmForCausalLM", spec=read_spec)
