"""Mellum 2: Qwen3 MoE whose layers with a window have a RoPE of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import (
    FURTHER_LAYERS,
    check_choice,
    experts_spec,
    layers_by_kind,
    with_experts,
)
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.mtp import FURTHER
from onnxport.exporter.families.olmo3 import local_rope
from onnxport.exporter.families.qwen3 import qwen3_spec
from onnxport.exporter.ropeconfig import rope_by_layer_type
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_THETAS: Final = {_FULL: {"rope_theta": 500_000.0}, _SLIDING: {"rope_theta": 10_000.0}}
_UNUSED: Final = ("mtp_layer_types", "mtp_mlp_layer_types", *FURTHER_LAYERS)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Mellum: heads of 128 unless given; every layer sees all and has experts, likewise."""
    config.ignore(*_UNUSED)
    ropes = _ropes(config)
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 1024)
    windows = windows_by_type(config, window, [_FULL] * num_layers)
    # llama.cpp's converter reads it, transformers does not.
    if not config.get("use_sliding_window", bool, True) and any(windows):
        raise CheckpointError(
            f"{config.path}: use_sliding_window is false, and layer_types has {_SLIDING}; they "
            "contradict each other. Remove the wrong one."
        )
    spec = qwen3_spec(
        config,
        family="mellum",
        head_size=128,
        num_kv_heads=4,
        intermediate_size=7168,
        sliding_window=windows,
        context_length=context_length,
        rope=ropes[_FULL],
    )
    experts = experts_spec(
        config,
        count=64,
        per_token=8,
        layers=layers_by_kind(config, num_layers, dense=0),
        size=config.get("moe_intermediate_size", int, 896),
        normalized=config.get("norm_topk_prob", bool, True),
    )
    spec = replace(spec, local_rope=local_rope(config, ropes[_SLIDING], spec))
    return with_experts(spec, experts)


def _ropes(config: Config) -> dict[str, dict[str, Any]]:
    """RoPE keys by layer type, which `rope_parameters` alone tells."""
    check_choice(config, {"rope_scaling": (None,)})
    return rope_by_layer_type(config, _THETAS, scaled=_FULL)


FAMILY: Final = Family(
    name="mellum",
    architecture="MellumForCausalLM",
    spec=read_spec,
    tensors=TensorNames(further=FURTHER),
)
