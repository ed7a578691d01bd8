"""Gemma 3n, text: Gemma 4's inputs of layers and shared K/V, beside several residual streams.

Layers compute on one stream and foretell the others (AltUp), have a product of low rank beside
attention (LAuReL), and in the first ones gates are 0 but for the largest, by mean and deviation.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.gemma import GELU, TENSORS
from onnxport.exporter.families.gemma3 import FULL, SLIDING, local_rope, ropes_of
from onnxport.exporter.families.wrapped import newer_names, wrapped
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.altup_spec import AltUpSpec
from onnxport.graphs.spec import ArchSpec

_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # where a longer model does not say it
# In training; and what transformers does not read, for scores are not scaled.
_UNUSED: Final = ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Gemma 3n: norms' weights are stored as they are, and scores are not scaled."""
    activation = config.get("hidden_activation", str, GELU)
    if activation != GELU:
        raise UnsupportedModelError(
            f"{config.path}: hidden_activation is {activation!r}; supported is {GELU!r}."
        )
    config.ignore(*_UNUSED)
    ropes = ropes_of(config)
    spec = decoder_spec(
        config.replaced(intermediate_size=_one_size(config)),
        family="gemma3n_text",
        head_size=256,
        num_kv_heads=2,
        qk_norm=True,
        sliding_window=_windows(config),
        context_length=context_length,
        rope=ropes[FULL],
        hidden_act="gelu_tanh",
        tied=True,
    )
    size, rows = _layer_inputs(config, spec)
    try:
        return replace(
            spec,
            local_rope=local_rope(config, ropes[SLIDING], spec, "Gemma 3n"),
            rms_norm_eps=spec.rms_norm_eps / spec.hidden_size,
            inner_norm_eps=spec.rms_norm_eps,
            attention_scale=1.0,
            residual_scale=1 / math.sqrt(spec.hidden_size),
            stream_scale=math.sqrt(spec.hidden_size),
            output_norms=True,
            value_norm=True,
            shared_kv_layers=config.get("num_kv_shared_layers", int, 15) or None,
            logits_softcap=_cap(config),
            altup=_altup(config),
            gate_cutoffs=_cutoffs(config, spec.num_layers),
            layer_input_size=size,
            layer_input_rows=rows,
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _one_size(config: Config) -> int:
    """Features of all feed-forward layers, which a file may have one by one."""
    found: Any = config.get("intermediate_size", object, 16_384)
    sizes = found if isinstance(found, list) else [found]
    if not sizes or any(type(one) is not int for one in sizes):
        raise CheckpointError(
            f"{config.path}: intermediate_size is {found}; it must be a number of features, or one "
            "for each layer."
        )
    if len(set(sizes)) > 1:
        raise UnsupportedModelError(
            f"{config.path}: intermediate_size is {found}; supported is one number for all layers, "
            "as E2B and E4B have it, and no slices between these."
        )
    if len(sizes) not in (1, config.require("num_hidden_layers", int)):
        raise CheckpointError(
            f"{config.path}: intermediate_size has {len(sizes)} entries; it must have one for each "
            f"of the {config.require('num_hidden_layers', int)} layers."
        )
    return int(sizes[0])


def _windows(config: Config) -> tuple[int | None, ...]:
    """Each layer's window, which counts the query's own token: every fifth layer has none."""
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 512)
    types = [SLIDING if (i + 1) % 5 else FULL for i in range(num_layers)]
    return windows_by_type(config, window, types)


def _altup(config: Config) -> AltUpSpec:
    return AltUpSpec(
        streams=config.get("altup_num_inputs", int, 4),
        active=config.get("altup_active_idx", int, 0),
        scaled=config.get("altup_correct_scale", bool, True),
        laurel_rank=config.get("laurel_rank", int, 64),
    )


def _cutoffs(config: Config, num_layers: int) -> tuple[float | None, ...] | None:
    """How many deviations above its mean a gate begins in each layer; None: all of it counts.

    `activation_sparsity_pattern` says what share of normally distributed numbers is below.
    """
    key = "activation_sparsity_pattern"
    sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
    default = [_SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    found: Any = config.get(key, object, default)
    shares = found if isinstance(found, list) else [found] * num_layers
    if len(shares) != num_layers or not all(
        type(one) in (int, float) and 0 <= one < 1 for one in shares
    ):
        raise CheckpointError(
            f"{config.path}: {key} is {found}; it must have a number from 0 to below 1 for each of "
            f"the {num_layers} layers."
        )
    if not any(shares):
        return None
    return tuple(NormalDist().inv_cdf(one) if one else None for one in shares)


def _layer_inputs(config: Config, spec: ArchSpec) -> tuple[int, int | None]:
    """Channels of what layers are told of tokens, and rows of its table where some have none."""
    size = config.get("hidden_size_per_layer_input", int, 256)
    rows = config.get("vocab_size_per_layer_input", int, 262_144)
    if size < 1 or not 0 < rows <= spec.vocab_size:
        raise UnsupportedModelError(
            f"{config.path}: hidden_size_per_layer_input is {size} and vocab_size_per_layer_input "
            f"{rows}; supported are a size above 0, and up to {spec.vocab_size} (vocab_size) rows."
        )
    return size, None if rows == spec.vocab_size else rows


def _cap(config: Config) -> float | None:
    key = "final_logit_softcapping"
    found = config.get(key, float, None if config.is_null(key) else 30.0)
    if found is not None and not 0 < found < math.inf:
        raise CheckpointError(f"{config.path}: {key} is {found}; it must be above 0, or null.")
    return found


_TENSORS: Final = replace(TENSORS, norm_offset=0.0)

FAMILY: Final = Family(
    name="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    spec=read_spec,
    tensors=_TENSORS,
)
WITH_IMAGES: Final = wrapped(
    FAMILY,
    name="gemma3n",
    architecture="Gemma3nForConditionalGeneration",
    image_keys=(
        *("boi_token_id", "eoi_token_id", "image_token_id", "vision_config"),
        *("boa_token_id", "eoa_token_id", "audio_token_id", "audio_config"),
        *("audio_soft_tokens_per_image", "vision_soft_tokens_per_image"),
    ),
    defaults={  # transformers' Gemma3nTextConfig
        "hidden_size": 2048,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262_400,
    },
    layouts=(
        newer_names(_TENSORS, ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")),
    ),
)
