"""Nemotron 3 and 4, and Minitron: LayerNorms whose weights are stored less one, and no gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Nemotron: the square of what is positive; optional biases."""
    biased = config.get("attention_bias", bool, False)
    spec = ungated_spec(
        config,
        default="relu2",
        family="nemotron",
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
        partial_rotary_factor=0.5,
        epsilon="norm_eps",
    )
    return replace(spec, layer_norms=True, norm_biases=True)


FAMILY: Final = Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    spec=read_spec,
    tensors=TensorNames(norm_offset=1.0),
)
