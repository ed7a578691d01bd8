"""Qwen1.5 and Qwen2 with experts, such as Qwen1.5-MoE-A2.7B: a shared one has a gate of its own."""

from __future__ import annotations

from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec, with_experts
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.qwen3_moe import sparse_layers
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Qwen2 MoE: biased queries, keys and values unless told otherwise."""
    spec = decoder_spec(
        config,
        family="qwen2_moe",
        num_kv_heads=16,
        qkv_bias=config.get("qkv_bias", bool, True),
        sliding_window=_windows(config),
        context_length=context_length,
    )
    layers = sparse_layers(config, spec.num_layers)
    experts = experts_spec(
        config,
        count=60,
        per_token=4,
        size=config.get("moe_intermediate_size", int, 1408),
        normalized=config.get("norm_topk_prob", bool, False),
        layers=layers,
        shared_size=config.get("shared_expert_intermediate_size", int, 5632),
        shared_gated=True,
    )
    return with_experts(spec, experts)


def _windows(config: Config) -> tuple[int | None, ...]:
    """The window of each layer, where `layer_types` says which have one.

    Without it transformers gives one to every other of the first layers, and the models that
    these keys come from to the last ones; none that was published has windows.
    """
    enabled = config.get("use_sliding_window", bool, False)
    if enabled and not config.has("layer_types"):
        raise UnsupportedModelError(
            f"{config.path}: use_sliding_window is true, and which layers have a window is read in "
            "two ways; say so in layer_types."
        )
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    config.get("max_window_layers", int, 28)
    full = ["full_attention"] * config.require("num_hidden_layers", int)
    return windows_by_type(
        config,
        window if enabled else None,
        full,
        needs="use_sliding_window = true and a sliding_window",
    )


FAMILY: Final = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down=("mlp.shared_expert.down_proj",),
    ),
)
