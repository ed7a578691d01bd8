"""Gemma 3, text: norms on both sides of each layer, GELU, and windows with a RoPE of their own.

Embeddings are multiplied with the square root of their size. As in Granite, that goes into weights
that are there anyway: what the layers read of the residual stream are norms of it, so it may be
that of Gemma over this number. Then embeddings stay as they are, the norms of what layers add are
over it, and the epsilon of the norms that read the stream is over the square of it. Besides, the
stream, whose numbers are large in these models, is that much farther from the end of float16.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec, windows_by_type
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.wrapped import wrapped
from onnxport.exporter.ropeconfig import rope_by_layer_type, rope_from
from onnxport.graphs.spec import ArchSpec, RopeSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_GELU: Final = "gelu_pytorch_tanh"
_ROPE_TYPES: Final = ("default", "linear")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Gemma 3: QK-norm; heads of 256 and a tied head unless told otherwise."""
    _check(config)
    biased = config.get("attention_bias", bool, False)
    ropes = rope_by_layer_type(
        config,
        {
            _FULL: {"rope_theta": config.get("rope_theta", float, 1_000_000.0)},
            _SLIDING: {"rope_theta": config.get("rope_local_base_freq", float, 10_000.0)},
        },
        scaled=_FULL,
    )
    spec = decoder_spec(
        config,
        family="gemma3_text",
        head_size=256,
        num_kv_heads=4,
        qkv_bias=biased,
        o_bias=biased,
        qk_norm=True,
        sliding_window=_windows(config),
        context_length=context_length,
        rope=ropes[_FULL],
        hidden_act="gelu_tanh",
        tied=True,
    )
    return replace(
        spec,
        rms_norm_eps=spec.rms_norm_eps / spec.hidden_size,
        inner_norm_eps=spec.rms_norm_eps,
        attention_scale=_query_scale(config),
        residual_scale=1 / math.sqrt(spec.hidden_size),
        output_norms=True,
        local_rope=_local_rope(config, ropes[_SLIDING], spec),
    )


def _check(config: Config) -> None:
    """Refuse what Gemma 3 may be told to do, and no published model of it does."""
    activation = config.get("hidden_activation", str, _GELU)
    if activation != _GELU:
        raise UnsupportedModelError(
            f"{config.path}: hidden_activation is {activation!r}; supported is {_GELU!r}."
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := config.get(key, float, None)) is not None:
            raise UnsupportedModelError(
                f"{config.path}: {key} is {cap}; only null, which caps nothing, is supported for "
                "Gemma 3."
            )
    if config.get("use_bidirectional_attention", bool, False):
        raise UnsupportedModelError(
            f"{config.path}: use_bidirectional_attention is true, as in models that embed text; "
            "supported is causal attention."
        )


def _query_scale(config: Config) -> float:
    scalar = config.get("query_pre_attn_scalar", float, 256.0)
    if not 0 < scalar < math.inf:
        raise CheckpointError(
            f"{config.path}: query_pre_attn_scalar is {scalar}; it must be above 0."
        )
    return 1 / math.sqrt(scalar)


def _windows(config: Config) -> tuple[int | None, ...]:
    """Each layer's window, which counts the query's own token: every sixth layer has none."""
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    pattern = config.get("sliding_window_pattern", int, 6)
    noted = config.get("_sliding_window_pattern", int, pattern)  # by transformers, which ignores it
    if config.has("layer_types"):
        return windows_by_type(config, window, [_FULL] * num_layers)
    if pattern < 1 or noted != pattern:
        raise CheckpointError(
            f"{config.path}: sliding_window_pattern is {pattern} and _sliding_window_pattern "
            f"{noted}; without layer_types they must be the same, and above 0."
        )
    types = [_SLIDING if (i + 1) % pattern else _FULL for i in range(num_layers)]
    return windows_by_type(config, window, types)


def _local_rope(config: Config, values: dict[str, Any], spec: ArchSpec) -> RopeSpec | None:
    """The rotary embedding of layers with a window, where it is another one."""
    local, _ = rope_from(config, values, spec.head_size, spec.context_length)
    for layers, rope in ((_FULL, spec.rope), (_SLIDING, local)):
        if rope.type not in _ROPE_TYPES or rope.rotary_dim != spec.head_size:
            raise UnsupportedModelError(
                f"{config.path}: the RoPE of {layers} is of type {rope.type!r} and rotates "
                f"{rope.rotary_dim} of {spec.head_size} channels; supported are the types "
                f"{', '.join(_ROPE_TYPES)}, and all channels, for Gemma 3."
            )
    return None if local == spec.rope or not any(spec.sliding_window) else local


FAMILY: Final = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        post_norm="pre_feedforward_layernorm.weight",
        o_norm="post_attention_layernorm.weight",
        down_norm="post_feedforward_layernorm.weight",
        norm_offset=1.0,
    ),
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
