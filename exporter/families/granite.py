"""Granite 3, dense or with experts: Llama with four multipliers, which go into weights as they are.

What the layers read of the residual stream are norms of it, so it may be any number of times as
large: here it is that of Granite over `embedding_multiplier`. So embeddings stay as they are, what
layers add is `residual_multiplier / embedding_multiplier` times what their weights say, and the
norms' epsilon is over the square of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Granite: optional biases on the MLP."""
    biased = config.get("mlp_bias", bool, False)
    return multiplied(config, family="granite", mlp_bias=biased, context_length=context_length)


def read_spec_with_experts(config: Config, context_length: int | None) -> ArchSpec:
    """Granite MoE: weights of the experts that are chosen are a softmax of their logits alone."""
    return _with_experts(config, family="granitemoe", context_length=context_length)


def read_spec_with_shared_experts(config: Config, context_length: int | None) -> ArchSpec:
    """Granite MoE with a layer beside its experts, unless its size is 0."""
    shared = config.get("shared_intermediate_size", int, 0)
    return _with_experts(
        config, shared or None, family="granitemoeshared", context_length=context_length
    )


def _with_experts(config: Config, shared_size: int | None = None, **differences: Any) -> ArchSpec:
    """What both share; `differences` are keyword arguments of `decoder_spec`."""
    return with_granite_experts(config, multiplied(config, **differences), shared_size)


def with_granite_experts(config: Config, spec: ArchSpec, shared_size: int | None) -> ArchSpec:
    """The model with experts in each layer, and, with a size, a layer beside them."""
    experts = experts_spec(
        config,
        count=8,
        per_token=2,
        size=spec.intermediate_size,
        normalized=True,
        shared_size=shared_size,
    )
    return replace(spec, experts=experts)


def multiplied(config: Config, **differences: Any) -> ArchSpec:
    """What all share: optional biases on attention; every multiplier is 1 where absent.

    `differences` are keyword arguments of `decoder_spec`.
    """
    attention_bias = config.get("attention_bias", bool, False)
    spec = decoder_spec(config, qkv_bias=attention_bias, o_bias=attention_bias, **differences)
    embedding = multiplier(config, "embedding_multiplier")
    return replace(
        spec,
        rms_norm_eps=spec.rms_norm_eps / embedding**2,
        attention_scale=multiplier(config, "attention_multiplier"),
        residual_scale=multiplier(config, "residual_multiplier") / embedding,
        stream_scale=embedding,
        logits_scale=1 / multiplier(config, "logits_scaling"),
    )


def multiplier(config: Config, key: str) -> float:
    """The value of a key, 1 where it is absent. Raises CheckpointError unless it is above 0."""
    return checked_multiplier(config, key, config.get(key, float, 1.0))


def checked_multiplier(config: Config, key: str, found: float) -> float:
    """What a key says, or a list there. Raises CheckpointError unless it is above 0."""
    if not _LEAST <= found <= _MOST:
        raise CheckpointError(
            f"{config.path}: {key} is {found}; it must be above 0, and a float32 have room for it."
        )
    return found


FAMILY: Final = Family(name="granite", architecture="GraniteForCausalLM", spec=read_spec)
EXPERT_NAMES: Final = TensorNames(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.weight",),
    expert_down=("block_sparse_moe.output_linear.weight",),
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down=("shared_mlp.output_linear",),
)
WITH_EXPERTS: Final = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    spec=read_spec_with_experts,
    tensors=EXPERT_NAMES,
)
WITH_SHARED_EXPERTS: Final = Family(
    name="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    spec=read_spec_with_shared_experts,
    tensors=EXPERT_NAMES,
)
