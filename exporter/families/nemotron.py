"""Nemotron 3 and 4, and Minitron: LayerNorms whose weights are stored less one, and no gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec

# What published files call partial_rotary_factor besides; transformers does not read it.
_PARTS: Final = ("rope_percent", "rope_percentage")


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
    for name in _PARTS:
        part = config.get(name, float, None)
        if part is not None and int(spec.head_size * part) != spec.rope.rotary_dim:
            raise CheckpointError(
                f"{config.path}: {name} is {part}, and {spec.rope.rotary_dim} of "
                f"{spec.head_size} channels rotate; these contradict each other, unless "
                "partial_rotary_factor is the same number."
            )
    return replace(spec, layer_norms=True, norm_biases=True)


FAMILY: Final = Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    spec=read_spec,
    tensors=TensorNames(norm_offset=1.0),
)
