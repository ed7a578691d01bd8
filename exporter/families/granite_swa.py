"""Granite with sliding windows and sinks, dense or with experts, and a RoPE base by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families import granite
from onnxport.exporter.families.base import Family
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Granite with windows: optional biases on the MLP, and a tied head unless told otherwise."""
    return _with_windows(
        config,
        family="granite_swa",
        num_kv_heads=4,
        tied=True,
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
    )


def read_spec_with_experts(config: Config, context_length: int | None) -> ArchSpec:
    """Granite MoE with windows, and a layer beside its experts unless its size is 0."""
    spec = _with_windows(config, family="granitemoe_swa", context_length=context_length)
    return granite.with_granite_experts(
        config, spec, config.get("shared_intermediate_size", int, 0) or None
    )


def _with_windows(config: Config, **differences: Any) -> ArchSpec:
    """What both share: every fourth layer, from the first, sees all unless told otherwise.

    `differences` are keyword arguments of `decoder_spec`.
    """
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 128)
    types = ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)]
    windows = windows_by_type(config, window, types)
    spec = granite.multiplied(config, sliding_window=windows, **differences)
    return _with_bases(config, replace(spec, attention_sinks=True))


def _with_bases(config: Config, spec: ArchSpec) -> ArchSpec:
    """The model with RoPE's base of each layer, as `layer_rope_theta` says; 0: it rotates nothing.

    Raises:
        UnsupportedModelError: Layers that see as much as others have another base.
        CheckpointError: See `_bases`.
    """
    bases = _bases(config, spec)
    slides = [window is not None for window in spec.sliding_window]
    full, local = (
        {base for base, one in zip(bases, slides, strict=True) if base and one == kind}
        for kind in (False, True)
    )
    if max(len(full), len(local)) > 1:
        raise UnsupportedModelError(
            f"{config.path}: layer_rope_theta is {bases}; supported is, beside 0, one number for "
            f"layers with a sliding window ({sorted(local)}) and one for those without "
            f"({sorted(full)})."
        )
    ropes = [_based(spec.rope, one) for one in (full or local, local or full)]
    return replace(
        spec,
        rope=ropes[0],
        local_rope=None if ropes[1] == ropes[0] else ropes[1],
        rotated_layers=None if all(bases) else tuple(map(bool, bases)),
    )


def _based(rope: RopeSpec, bases: set[float]) -> RopeSpec:
    """The embedding with that base, if there is one."""
    return replace(rope, theta=max(bases)) if bases else rope


def _bases(config: Config, spec: ArchSpec) -> list[float]:
    """Each layer's base; all are RoPE's where `layer_rope_theta` does not say.

    Raises CheckpointError for what are no numbers, as many as layers, or contradict another key.
    """
    given = config.get("layer_rope_theta", list, [spec.rope.theta] * spec.num_layers)
    if len(given) != spec.num_layers or not all(
        isinstance(one, int | float) and not isinstance(one, bool) and one >= 0 for one in given
    ):
        raise CheckpointError(
            f"{config.path}: layer_rope_theta is {given}; it must be {spec.num_layers} numbers "
            "(one a layer), each above 0, or 0 for a layer that rotates nothing."
        )
    rotated = config.get("no_rope_layers", list, None)  # llama.cpp reads it; 0: it rotates nothing
    if rotated is not None and [bool(one) for one in rotated] != [bool(one) for one in given]:
        raise CheckpointError(
            f"{config.path}: no_rope_layers is {rotated} and the bases of layers are {given}, "
            "which differ in the layers that rotate nothing (0); remove the wrong one."
        )
    return [float(one) for one in given]


FAMILY: Final = Family(name="granite_swa", architecture="GraniteSWAForCausalLM", spec=read_spec)
_NAMES: Final = replace(
    granite.EXPERT_NAMES,
    router="block_sparse_moe.router",
    expert_gate_up=("block_sparse_moe.experts.gate_up_proj",),
    expert_down=("block_sparse_moe.experts.down_proj",),
)
WITH_EXPERTS: Final = Family(
    name="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    spec=read_spec_with_experts,
    tensors=_NAMES,
    other_layouts=(granite.EXPERT_NAMES,),  # as Granite MoE has them
)
