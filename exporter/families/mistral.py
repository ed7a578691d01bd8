"""Mistral 7B and its kin: Llama with one sliding window for every layer.

And models that read images around it or around Ministral 3 or Mistral 4: Mistral Small 3.1 and 4,
Ministral 3.
"""

from __future__ import annotations

from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families import ministral3, mistral4
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.wrapped import wrapped
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Mistral: no biases; one `sliding_window` for all layers: 4096 where absent, none if null."""
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    expected = "full_attention" if window is None else "sliding_attention"
    types = config.get("layer_types", list, [expected] * num_layers)
    if types != [expected] * num_layers:
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {types}; a Mistral model with sliding_window = "
            f"{window} has {expected} in each of its {num_layers} layers."
        )
    return decoder_spec(
        config,
        family="mistral",
        num_kv_heads=8,
        sliding_window=(window,) * num_layers,
        context_length=context_length,
    )


FAMILY: Final = Family(name="mistral", architecture="MistralForCausalLM", spec=read_spec)
WITH_IMAGES: Final = wrapped(
    FAMILY,
    ministral3.FAMILY,
    mistral4.FAMILY,
    name="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    image_keys=(
        *("image_token_index", "multimodal_projector_bias", "projector_hidden_act"),
        *("spatial_merge_size", "vision_config", "vision_feature_layer"),
    ),
)
