"""GLM 4 of 2025 (GLM-4-0414, GLM-Z1): GLM with norms on what layers add."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.glm import glm_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GLM 4: see `glm_spec`."""
    spec = glm_spec(config, family="glm4", context_length=context_length)
    return replace(spec, output_norms=True)


FAMILY: Final = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        gate_up=("mlp.gate_up_proj",),
        o_norm="post_self_attn_layernorm.weight",
        down_norm="post_mlp_layernorm.weight",
    ),
)
