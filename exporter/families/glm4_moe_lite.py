"""GLM 4.7 Flash: DeepSeek V3's attention of latents and experts, by other defaults."""

from __future__ import annotations

from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import FURTHER_LAYERS, corrected_experts, with_experts
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.mtp import behind_the_last
from onnxport.exporter.latentconfig import latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(kv_rank=512, nope_size=192, rope_size=64, value_size=256, query_rank=768)
_KINDS: Final = {"dense": False, "sparse": True}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GLM 4.7 Flash: which layers have experts is in `mlp_layer_types`."""
    spec = latent_spec(
        config,
        family="glm4_moe_lite",
        defaults=_SIZES,
        interleaved=config.get("rope_interleave", bool, True),
        context_length=context_length,
    )
    config.ignore(*FURTHER_LAYERS)
    experts = corrected_experts(
        config,
        count=64,
        per_token=4,
        size=1536,
        normalized=True,
        shared=1,
        layers=_layers(config, spec.num_layers),
        scale=1.8,
    )
    return with_experts(spec, experts)


def _layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: all but the first unless told otherwise.

    `first_k_dense_replace` says it, too, and transformers does not read it.
    """
    default = ["dense", *["sparse"] * (num_layers - 1)]
    types = config.get("mlp_layer_types", list, default)
    if len(types) != num_layers or not all(kind in _KINDS for kind in types):
        raise UnsupportedModelError(
            f"{config.path}: mlp_layer_types is {types}; supported is one of "
            f"{' and '.join(_KINDS)} for each of {num_layers} layers."
        )
    layers = tuple(_KINDS[kind] for kind in types)
    first = config.get("first_k_dense_replace", int, None)
    if first is not None and layers != tuple(layer >= first for layer in range(num_layers)):
        raise CheckpointError(
            f"{config.path}: first_k_dense_replace is {first}, and mlp_layer_types "
            f"{'is' if config.has('mlp_layer_types') else 'is left out, which means'} {types}; "
            "they contradict each other. Remove the wrong one."
        )
    return layers


FAMILY: Final = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    spec=read_spec,
    further_layers=FURTHER_LAYERS,
    mtp=behind_the_last,
)
