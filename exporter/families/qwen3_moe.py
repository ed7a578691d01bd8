"""Qwen3 with experts, such as 30B-A3B: Qwen3's attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import experts_spec, with_experts
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.qwen3 import qwen3_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Qwen3 MoE: experts in every `decoder_sparse_step`-th layer, but for `mlp_only_layers`."""
    _check_said(config)
    spec = qwen3_spec(
        config,
        family="qwen3_moe",
        num_kv_heads=4,
        sliding_window=_windows(config),
        context_length=context_length,
    )
    layers = sparse_layers(config, spec.num_layers)
    experts = experts_spec(
        config,
        count=128,
        per_token=8,
        size=config.get("moe_intermediate_size", int, 768),
        normalized=config.get("norm_topk_prob", bool, False),
        layers=layers,
    )
    return with_experts(spec, experts)


# What Qwen3-Coder says of its architecture, and what is so of every Qwen3 MoE.
_SAID: Final[Mapping[str, bool | int]] = {
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}


def _check_said(config: Config) -> None:
    for name, value in _SAID.items():
        if (found := config.get(name, type(value), value)) != value:
            raise UnsupportedModelError(
                f"{config.path}: {name} is {found!r}; of a Qwen3 MoE it is {value!r}, as "
                "transformers computes it. Correct it, or the architecture."
            )


def _windows(config: Config) -> tuple[int | None, ...]:
    """The window of all layers, if `use_sliding_window` says that there is one.

    transformers gives it to every layer, and reads neither `max_window_layers` nor `layer_types`,
    by which its Qwen3 leaves some out. So they may only say the same.
    """
    enabled = config.get("use_sliding_window", bool, False)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    window = window if enabled else None
    expected = "full_attention" if window is None else "sliding_attention"
    all_layers = [expected] * config.require("num_hidden_layers", int)
    first = config.get("max_window_layers", int, 0)
    types = config.get("layer_types", list, all_layers)
    if types != all_layers or (window is not None and first > 0):
        raise UnsupportedModelError(
            f"{config.path}: of a Qwen3 MoE each of the {len(all_layers)} layers has the window "
            f"{window}, as transformers computes it; layer_types = {types} and max_window_layers = "
            f"{first} say otherwise. Correct them, use_sliding_window or sliding_window."
        )
    return (window,) * len(all_layers)


def sparse_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts, as Qwen's keys say."""
    step = config.get("decoder_sparse_step", int, 1)
    if step < 1:
        raise CheckpointError(f"{config.path}: decoder_sparse_step is {step}; it must be above 0.")
    dense = config.get("mlp_only_layers", list, [])
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


FAMILY: Final = Family(name="qwen3_moe", architecture="Qwen3MoeForCausalLM", spec=read_spec)
