"""Gemma 3, text: Gemma 2 without caps, with QK-norm, and windows with a RoPE of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.gemma import TENSORS, gemma_spec
from onnxport.exporter.families.wrapped import wrapped
from onnxport.exporter.ropeconfig import rope_by_layer_type, rope_from
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_ROPE_TYPES: Final = ("default", "linear")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Gemma 3: where a RoPE is scaled, it is that of layers without a window."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := config.get(key, float, None)) is not None:
            raise UnsupportedModelError(
                f"{config.path}: {key} is {cap}; only null, which caps nothing, is supported for "
                "Gemma 3."
            )
    ropes = ropes_of(config)
    spec = gemma_spec(
        config,
        family="gemma3_text",
        qk_norm=True,
        sliding_window=_windows(config),
        context_length=context_length,
        rope=ropes[FULL],
    )
    return replace(spec, local_rope=local_rope(config, ropes[SLIDING], spec))


def _windows(config: Config) -> tuple[int | None, ...]:
    """Each layer's window, which counts the query's own token: every sixth layer has none."""
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    pattern = config.get("sliding_window_pattern", int, 6)
    noted = config.get("_sliding_window_pattern", int, pattern)  # by transformers, which ignores it
    if config.has("layer_types"):
        return windows_by_type(config, window, [FULL] * num_layers)
    if pattern < 1 or noted != pattern:
        raise CheckpointError(
            f"{config.path}: sliding_window_pattern is {pattern} and _sliding_window_pattern "
            f"{noted}; without layer_types they must be the same, and above 0."
        )
    types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    return windows_by_type(config, window, types)


def ropes_of(config: Config) -> dict[str, dict[str, Any]]:
    """What the configuration says of the rotary embeddings, by type of layer."""
    return rope_by_layer_type(
        config,
        {
            FULL: {"rope_theta": config.get("rope_theta", float, 1_000_000.0)},
            SLIDING: {"rope_theta": config.get("rope_local_base_freq", float, 10_000.0)},
        },
        scaled=FULL,
    )


def local_rope(
    config: Config, values: dict[str, Any], spec: ArchSpec, model: str = "Gemma 3"
) -> RopeSpec | None:
    """The rotary embedding of layers with a window, where it is another one.

    Raises UnsupportedModelError for one that rotates otherwise than `model`s do.
    """
    local, _ = rope_from(config, values, spec.head_size, spec.context_length)
    for layers, rope in ((FULL, spec.rope), (SLIDING, local)):
        if rope.type not in _ROPE_TYPES or rope.rotary_dim != spec.head_size:
            raise UnsupportedModelError(
                f"{config.path}: the RoPE of {layers} is of type {rope.type!r} and rotates "
                f"{rope.rotary_dim} of {spec.head_size} channels; supported are the types "
                f"{', '.join(_ROPE_TYPES)}, and all channels, for {model}."
            )
    return None if local == spec.rope or not any(spec.sliding_window) else local


FAMILY: Final = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    spec=read_spec,
    tensors=TENSORS,
)
WITH_IMAGES: Final = wrapped(
    FAMILY,
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    image_keys=(
        *("boi_token_index", "eoi_token_index", "image_token_index"),
        *("mm_tokens_per_image", "vision_config"),
    ),
    defaults={  # transformers' Gemma3TextConfig, which published files count on
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262_208,
    },
)
