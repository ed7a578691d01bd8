"""Granite 4: layers of state spaces between those of attention, and a layer beside experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.granite import EXPERT_NAMES, multiplied
from onnxport.exporter.spaceconfig import LAYER_KINDS, are_spaces, mamba_spec
from onnxport.graphs.spec import ArchSpec

_POSITIONS: Final = (None, "nope", "rope")  # what tells positions: nothing, but for the last


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Granite 4: without experts the layer beside them is the only one.

    Attention without RoPE sees no positions but through state spaces.
    """
    shared = config.get("shared_intermediate_size", int, 1024)
    count = config.get("num_local_experts", int, 8)
    spec = multiplied(config, family="granitemoehybrid", context_length=context_length)
    layers = _layers(config, spec.num_layers)
    if count:
        experts = experts_spec(
            config,
            count=8,
            per_token=2,
            size=spec.intermediate_size,
            normalized=True,
            shared_size=shared,
        )
        spec = replace(spec, experts=experts)
    else:
        config.ignore("num_experts_per_tok")
    positions = config.get("position_embedding_type", str, None)
    if positions not in _POSITIONS:
        raise UnsupportedModelError(
            f"{config.path}: position_embedding_type is {positions!r}; supported are "
            f"{', '.join(map(repr, _POSITIONS))}."
        )
    if (found := config.get("normalization_function", str, "rmsnorm")) != "rmsnorm":
        raise UnsupportedModelError(
            f"{config.path}: normalization_function is {found!r}; supported is 'rmsnorm', which "
            "is what transformers computes here."
        )
    config.ignore("init_method")  # of weights ahead of training
    try:
        return replace(
            spec,
            intermediate_size=spec.intermediate_size if count else shared,
            inner_norm_eps=config.require("rms_norm_eps", float),
            rotated_layers=None if positions == "rope" else (False,) * spec.num_layers,
            linear=mamba_spec(config, layers),
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers are state spaces: those that `layer_types` names, or all."""
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    if config.has("layers_block_type") and config.has("layer_types"):
        raise CheckpointError(
            f"{config.path} has layers_block_type and layer_types, which are names of one list; "
            "remove one."
        )
    types = config.get(key, list, ["mamba"] * num_layers)
    layers = are_spaces(types)
    if layers is None or len(layers) != num_layers:
        raise UnsupportedModelError(
            f"{config.path}: {key} is {types}; supported are {num_layers} entries (one a layer) "
            f"from {', '.join(map(repr, LAYER_KINDS))}."
        )
    return layers


FAMILY: Final = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    spec=read_spec,
    tensors=replace(
        EXPERT_NAMES, gate_up=EXPERT_NAMES.shared_gate_up, down=EXPERT_NAMES.shared_down
    ),
)
