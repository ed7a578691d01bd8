"""Qwen3.5, dense and with experts, and the text part of the models that read images around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.mtp import FURTHER, beside_the_model
from onnxport.exporter.families.qwen3_next import TENSORS, check_said, hybrid_spec
from onnxport.exporter.families.wrapped import newer_names, wrapped
from onnxport.graphs.spec import ArchSpec

_OF_IMAGES: Final = ("visual.",)
# Of multi-token prediction, of which the tensors tell as much.
_OF_MTP: Final = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "unsloth_fixed_mtp")

# What files may say of experts, and what is so in transformers whatever they say.
_SAID_OF_EXPERTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "norm_topk_prob": (True,),
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Qwen3.5: as Qwen3-Next, with a dense feed-forward layer in each layer."""
    config.ignore(*_OF_MTP)
    check_said(config, {"mlp_only_layers": ([],)})
    return hybrid_spec(config, family="qwen3_5_text", num_kv_heads=4, context_length=context_length)


def read_spec_with_experts(config: Config, context_length: int | None) -> ArchSpec:
    """Qwen3.5 MoE: experts in each layer, and a shared one with a gate of its own."""
    config.ignore(*_OF_MTP)
    check_said(config, _SAID_OF_EXPERTS)
    size = config.get("moe_intermediate_size", int, 512)
    spec = hybrid_spec(
        config,
        family="qwen3_5_moe_text",
        num_kv_heads=2,
        intermediate_size=size,
        context_length=context_length,
    )
    experts = experts_spec(
        config,
        count=256,
        per_token=8,
        size=size,
        normalized=True,
        shared_size=config.get("shared_expert_intermediate_size", int, 512),
        shared_gated=True,
    )
    return replace(spec, experts=experts)


def _layouts(names: TensorNames) -> tuple[TensorNames, ...]:
    """As published around a model that reads images, and as transformers writes a text model."""
    return newer_names(names, _OF_IMAGES), names


_DENSE: Final = _layouts(TensorNames(norm_offset=1.0, further=FURTHER))
# Published files have one tensor of all experts, and transformers writes each for itself.
_WITH_EXPERTS: Final = (
    *_layouts(
        replace(
            TENSORS,
            expert_gate_up=("mlp.experts.gate_up_proj",),
            expert_down=("mlp.experts.down_proj",),
        )
    ),
    *_layouts(TENSORS),
)
_IMAGE_KEYS: Final = (
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("vision_config", "language_model_only"),
)

FAMILY: Final = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    spec=read_spec,
    tensors=_DENSE[-1],
    other_layouts=_DENSE[:-1],
    mtp=beside_the_model,
)
WITH_IMAGES: Final = wrapped(
    FAMILY,
    name="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    image_keys=_IMAGE_KEYS,
    layouts=_DENSE,
)
WITH_EXPERTS: Final = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    spec=read_spec_with_experts,
    tensors=_WITH_EXPERTS[0],
    other_layouts=_WITH_EXPERTS[1:],
    mtp=beside_the_model,
)
WITH_EXPERTS_AND_IMAGES: Final = wrapped(
    WITH_EXPERTS,
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    image_keys=_IMAGE_KEYS,
    layouts=_WITH_EXPERTS,
)
