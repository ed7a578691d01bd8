"""Bamba: Llama, of whose layers most are state spaces in place of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ropeconfig import check_outer, inner_rope, rope_parameters
from onnxport.exporter.spaceconfig import are_spaces, mamba_spec
from onnxport.graphs.spec import ArchSpec

_PART: Final = 0.5  # of each head rotates, unless rope_parameters say otherwise


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Bamba: `attn_layer_indices` are the layers with attention; half of each head rotates."""
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config,
        family="bamba",
        num_kv_heads=8,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=config.get("mlp_bias", bool, False),
        rope=_rope(config),
        context_length=context_length,
    )
    rotary = config.get("attn_rotary_emb", int, spec.rope.rotary_dim)
    if rotary != spec.rope.rotary_dim:
        raise CheckpointError(
            f"{config.path}: attn_rotary_emb is {rotary}, and transformers rotates "
            f"{spec.rope.rotary_dim} channels of each head whatever it says; correct it."
        )
    # In training alone, or of which logits are made.
    config.ignore("z_loss_coefficient", "num_logits_to_keep")
    return replace(spec, linear=mamba_spec(config, _layers(config, spec.num_layers)))


def _rope(config: Config) -> dict[str, Any]:
    inner = inner_rope(config, "partial_rotary_factor")
    check_outer(config, "partial_rotary_factor", _PART if inner is None else inner)
    return {"partial_rotary_factor": _PART, **rope_parameters(config)}


def _layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers are state spaces: all that `attn_layer_indices` does not name."""
    found = config.get("attn_layer_indices", list, [])
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in found):
        raise CheckpointError(
            f"{config.path}: attn_layer_indices is {found}; it must have numbers of the "
            f"{num_layers} layers, from 0."
        )
    layers = tuple(layer not in found for layer in range(num_layers))
    named = config.get("layer_types", list, None) or config.get("layers_block_type", list, None)
    if named is not None and are_spaces(named) != layers:
        raise CheckpointError(
            f"{config.path}: attn_layer_indices is {found} and the types of layers are {named}, "
            "which differ; remove the one that the model was not trained with."
        )
    return layers


FAMILY: Final = Family(
    name="bamba",
    architecture="BambaForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        final_norm="model.final_layernorm.weight",
        post_norm="pre_ff_layernorm.weight",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down=("feed_forward.down_proj",),
    ),
)
