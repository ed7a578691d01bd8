"""Sarvam 30B: GLM 4.5's layers, all of whose heads rotate, with Bailing's names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import (
    FURTHER_LAYERS,
    check_choice,
    corrected_experts,
    number_of,
    with_experts,
)
from onnxport.exporter.families.bailing_moe import NAMES
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec

# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "moe_router_enable_expert_bias": (True,),
    "norm_head": (False,),
    "score_function": ("sigmoid",),
    "use_bias": (False,),
    "use_rmsnorm": (True,),
}
_DROPPED: Final = (
    *("embedding_dropout", "output_dropout", "max_window_layers", "router_dtype"),
    *FURTHER_LAYERS,
)
_SHARED: Final = "moe_shared_expert_intermediate_size"


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Sarvam: heads of 64, and norms of queries and keys, unless told otherwise."""
    config.ignore(*_DROPPED)
    biased = config.get("use_qkv_bias", bool, config.get("attention_bias", bool, False))
    check_choice(config, {"attention_bias": (biased,)})
    spec = decoder_spec(
        config,
        family="sarvam_moe",
        head_size=64,
        num_kv_heads=4,
        qkv_bias=biased,
        qk_norm=config.get("use_qk_norm", bool, True),
        context_length=context_length,
        theta=8_000_000.0,
    )
    return with_experts(spec, sarvam_experts(config, per_token=6, size=1024))


def sarvam_experts(config: Config, *, per_token: int, size: int) -> ExpertsSpec:
    """The experts of both Sarvams, in either spelling; all but those of the first layer."""
    check_choice(config, _KNOWN)
    shared = number_of(config, ("n_shared_experts", "num_shared_experts"), 1)
    size = config.get("moe_intermediate_size", int, size)
    check_choice(config, {_SHARED: (size * shared,)})
    return corrected_experts(
        config.replaced(n_shared_experts=shared),
        count=128,
        per_token=per_token,
        size=size,
        normalized=True,
        shared=shared,
        first_dense=1,
        scale=2.5,
        count_keys=("n_routed_experts", "num_local_experts", "num_experts"),
    )


FAMILY: Final = Family(
    name="sarvam_moe",
    architecture="SarvamMoEForCausalLM",
    computed_by="Glm4MoeForCausalLM",
    spec=read_spec,
    tensors=NAMES,
    other_layouts=(TensorNames(),),  # as transformers' own modules are called
    further_layers=FURTHER_LAYERS,
)
