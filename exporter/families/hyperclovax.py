"""HyperCLOVA X: Granite's multipliers, and norms on both sides of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.granite import multiplied, multiplier
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """HyperCLOVA X: logits are times `logits_scaling`, where Granite's are over it."""
    spec = multiplied(
        config,
        family="hyperclovax",
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
    )
    spec = replace(spec, logits_scale=multiplier(config, "logits_scaling"))
    if not config.has("attention_multiplier"):
        spec = replace(spec, attention_scale=None)
    if not config.get("use_post_norm", bool, True):
        return spec
    epsilon = config.require("rms_norm_eps", float)
    return replace(spec, output_norms=True, inner_norm_eps=epsilon)


FAMILY: Final = Family(
    name="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    spec=read_spec,
    tensors=TensorNames(o_norm="post_norm1.weight", down_norm="post_norm2.weight"),
)
