"""Phi 3.5 MoE: LayerNorms, and two experts a token, each weighed against those that come near it.

Experts are chosen by SparseMixer (arXiv:2409.12136): see `ExpertsSpec.jitter`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import check_choice, experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.graphs.spec import ArchSpec

_MAGNITUDES: Final = ("short_mscale", "long_mscale")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Phi 3.5 MoE: optional biases on attention's projections and on logits; one window for all."""
    config.ignore("input_jitter_noise", "original_max_position_embeddings")  # the first of training
    check_choice(config, {"num_experts_per_tok": (2,)})
    biased = config.get("attention_bias", bool, False)
    window = config.get("sliding_window", int, None)
    trained = config.require("max_position_embeddings", int)
    spec = decoder_spec(
        config,
        family="phimoe",
        num_kv_heads=8,
        qkv_bias=biased,
        o_bias=biased,
        sliding_window=(window,) * config.require("num_hidden_layers", int),
        context_length=context_length,
        rope=_rope(config, trained if context_length is None else context_length),
    )
    experts = experts_spec(
        config,
        count=16,
        per_token=2,
        size=spec.intermediate_size,
        normalized=False,
        jitter=config.get("router_jitter_noise", float, 0.01),
    )
    return replace(
        spec,
        layer_norms=True,
        norm_biases=True,
        head_bias=config.get("lm_head_bias", bool, False) or None,
        experts=experts,
    )


def _rope(config: Config, longest: int) -> dict[str, Any]:
    """RoPE keys; LongRoPE's magnitude is given by itself, for either of its factors."""
    rope: dict[str, Any] = {"rope_theta": 1_000_000.0, **rope_parameters(config)}
    given = {name: rope.pop(name, None) for name in _MAGNITUDES}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return rope
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(
                f"{config.path}: the RoPE key {name!r} is {value!r}; of the type {kind!r} Phi 3.5 "
                "MoE needs a number above 0."
            )
    original = rope.get("original_max_position_embeddings", longest)
    return {**rope, "attention_factor": given[_MAGNITUDES[longest > original]]}


FAMILY: Final = Family(
    name="phimoe",
    architecture="PhimoeForCausalLM",
    computed_by="PhiMoEForCausalLM",  # as published files, which came with it, call it
    spec=read_spec,
    tensors=TensorNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down=("block_sparse_moe.experts.{}.w2",),
    ),
)
