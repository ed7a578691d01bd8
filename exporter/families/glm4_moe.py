"""GLM 4.5 to 4.7, and 4.5 Air: half of each head rotates; sigmoids choose experts."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import FURTHER_LAYERS, corrected_experts, with_experts
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.mtp import behind_the_last
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GLM 4.5: optional norms of queries and keys, and biases on them and on values."""
    spec = decoder_spec(
        config,
        family="glm4_moe",
        num_kv_heads=8,
        qkv_bias=config.get("attention_bias", bool, False),
        qk_norm=config.get("use_qk_norm", bool, False),
        context_length=context_length,
        partial_rotary_factor=0.5,
    )
    config.ignore(*FURTHER_LAYERS)
    experts = corrected_experts(
        config, count=128, per_token=8, size=1408, normalized=True, shared=1, first_dense=1
    )
    return with_experts(spec, experts)


FAMILY: Final = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    spec=read_spec,
    further_layers=FURTHER_LAYERS,
    mtp=behind_the_last,
)
