"""ERNIE 4.5, dense or with experts: Llama that rotates neighbouring channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec, with_experts
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec

_LEAST_SUM: Final = 1e-12
# How training chose and balanced experts, and a part that guesses a further token.
_NOT_READ: Final = ("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """ERNIE: heads of 128 unless given."""
    head_size = None if config.is_null("head_dim") else 128
    return _rotated(
        config,
        family="ernie4_5",
        head_size=head_size,
        num_kv_heads=2,
        context_length=context_length,
    )


def read_spec_with_experts(config: Config, context_length: int | None) -> ArchSpec:
    """ERNIE with experts, such as 21B-A3B: a softmax, corrected where it chooses."""
    spec = _rotated(config, family="ernie4_5_moe", num_kv_heads=4, context_length=context_length)
    layers = _layers(config, spec.num_layers)
    size = config.get("moe_intermediate_size", int, 1536)
    shared = config.get("moe_num_shared_experts", int, 2)
    least = config.get("moe_norm_min", float, _LEAST_SUM)
    if least > _LEAST_SUM:
        raise UnsupportedModelError(
            f"{config.path}: moe_norm_min is {least}; supported is up to {_LEAST_SUM}, below what "
            "the chosen experts' weights add up to."
        )
    experts = experts_spec(
        config,
        count=64,
        per_token=6,
        count_keys=("moe_num_experts", "num_experts"),
        per_token_keys=("moe_k", "num_experts_per_tok"),
        layers=layers,
        size=size,
        normalized=True,
        corrected=True,
        shared_size=size * shared or None,
    )
    config.ignore(*_NOT_READ)
    return with_experts(spec, experts)


def _rotated(config: Config, **differences: Any) -> ArchSpec:
    """What both share: biases everywhere or nowhere.

    `differences` are keyword arguments of `decoder_spec`.
    """
    biased = config.get("use_bias", bool, False)
    spec = decoder_spec(
        config,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        theta=500_000.0,
        tied=True,
        **differences,
    )
    return replace(spec, rope=replace(spec.rope, interleaved=True))


def _layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    first = config.get("moe_layer_start_index", int, 1)
    last = config.get("moe_layer_end_index", int, -1)
    interval = config.get("moe_layer_interval", int, 1)
    if interval < 1:
        raise CheckpointError(
            f"{config.path}: moe_layer_interval is {interval}; it must be above 0."
        )
    last = num_layers - 1 if last == -1 else last
    return tuple(first <= i <= last and (i + 1) % interval == 0 for i in range(num_layers))


FAMILY: Final = Family(name="ernie4_5", architecture="Ernie4_5ForCausalLM", spec=read_spec)
WITH_EXPERTS: Final = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    spec=read_spec_with_experts,
    tensors=TensorNames(
        correction="mlp.moe_statics.e_score_correction_bias",
        correction_axes=(1,),
        further=("model.mtp_",),
    ),
)
