"""GLM 4 and GLM-Edge: half of each head rotates, in neighbouring channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GLM: see `glm_spec`."""
    return glm_spec(config, family="glm", context_length=context_length)


def glm_spec(config: Config, **differences: Any) -> ArchSpec:
    """What GLM and GLM 4 share: biased queries, keys and values unless told otherwise.

    `differences` are keyword arguments of `decoder_spec`.
    """
    spec = decoder_spec(
        config,
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=2,
        qkv_bias=config.get("attention_bias", bool, True),
        partial_rotary_factor=0.5,
        **differences,
    )
    return replace(spec, rope=replace(spec.rope, interleaved=True))


FAMILY: Final = Family(
    name="glm",
    architecture="GlmForCausalLM",
    spec=read_spec,
    tensors=TensorNames(gate_up=("mlp.gate_up_proj",)),
)
