"""Llama 4: attention in chunks where layers rotate, experts whose inputs are weighed.

Of the multimodal checkpoints (Scout, Maverick) the text part. MobileLLM-R1 is of this family, too,
without experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.smollm3 import rotated_layers
from onnxport.exporter.families.wrapped import older_names, wrapped
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.spec import ArchSpec

logger = logging.getLogger(__name__)

_CHUNKED: Final = "chunked_attention"
_FULL: Final = "full_attention"
# How the reference code's weights were to be compressed; and experts' noise, which is of training.
_NOT_READ: Final = ("for_llm_compressor", "router_jitter_noise")
# What holds where keys are absent, as in transformers' Llama4TextConfig.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_size": 5120,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "rms_norm_eps": 1e-5,
    "vocab_size": 202_048,
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Llama 4: neighbours rotate, and are normalized behind that, but not in every fourth layer.

    A norm without weights and a rotation may change places, so attention itself rotates.
    """
    config.ignore(*_NOT_READ)
    defaults = {key: value for key, value in _DEFAULTS.items() if not config.has(key)}
    config = config.replaced(**defaults)
    rotated = _rotated_layers(config)
    biased = config.get("attention_bias", bool, False)
    normed = config.get("use_qk_norm", bool, True) and any(rotated)
    growth = _growth(config)
    size = config.get("intermediate_size", int, 8192)
    chunks = _chunks(config, rotated)
    spec = decoder_spec(
        config.replaced(intermediate_size=config.get("intermediate_size_mlp", int, 16_384)),
        family="llama4_text",
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=8,
        qkv_bias=biased,
        o_bias=biased,
        qk_norm=normed,
        context_length=_context_length(config, chunks, context_length),
        theta=500_000.0,
    )
    if normed and spec.rope.attention_factor != 1.0:
        raise UnsupportedModelError(
            f"{config.path}: the RoPE type {spec.rope.type!r} multiplies cos and sin with "
            f"{spec.rope.attention_factor}, which norms behind it (use_qk_norm) take back; "
            "supported are types without such a factor, such as 'llama3'."
        )
    is_longer = any(chunk is not None and chunk < spec.context_length for chunk in chunks)
    return replace(
        spec,
        sliding_window=chunks if is_longer else spec.sliding_window,
        chunked_windows=is_longer or None,
        rope=replace(spec.rope, interleaved=True),
        unweighted_qk_norm=normed or None,
        rotated_layers=None if all(rotated) else rotated,
        query_growth=None if all(rotated) else growth,
        experts=_experts(config, size),
    )


def _rotated_layers(config: Config) -> tuple[bool, ...]:
    """Which layers rotate; an empty list of transformers' means what its absence does."""
    if config.get("no_rope_layers", list, None) == []:
        config = config.replaced(no_rope_layers=None)
    return rotated_layers(config)


def _growth(config: Config) -> GrowthSpec | None:
    """How queries of layers that do not rotate grow, counted from position 1; None: not."""
    key = "attn_temperature_tuning"
    tuned = config.get(key, object, not config.is_null(key))
    strength = config.get("attn_scale", float, 0.1)
    interval = config.get("floor_scale", int, 8192)
    if not isinstance(tuned, bool | int):
        raise CheckpointError(f"{config.path}: {key} is {tuned!r}; it must be true or false.")
    if not tuned or not strength:
        return None
    try:
        return GrowthSpec(strength=strength, interval=interval, offset=1, without_rope=True)
    except ValueError as error:
        raise CheckpointError(
            f"{config.path}: attn_scale is {strength} and floor_scale {interval}: {error}."
        ) from error


def _chunks(config: Config, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The tokens of a chunk that a token sees its own of, layer by layer; None: it sees all."""
    key = "attention_chunk_size"
    chunk = config.get(key, int, None if config.is_null(key) else 8192)
    kinds = [_CHUNKED if turns and chunk is not None else _FULL for turns in rotated]
    kinds = config.get("layer_types", list, kinds)
    known = {_FULL: None} if chunk is None else {_FULL: None, _CHUNKED: chunk}
    if len(kinds) != len(rotated) or not all(kind in known for kind in kinds):
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {kinds} and {key} {chunk}; supported are "
            f"{len(rotated)} entries (one a layer) from {sorted(known)}, and {_CHUNKED} only with "
            f"an {key}."
        )
    if chunk is not None and chunk < 1:
        raise CheckpointError(f"{config.path}: {key} is {chunk}; it must be above 0, or null.")
    return tuple(known[kind] for kind in kinds)


def _context_length(
    config: Config, chunks: tuple[int | None, ...], asked: int | None
) -> int | None:
    """One chunk where no more was asked for, as far as all providers go; a warning says so."""
    chunk = max((one for one in chunks if one is not None), default=None)
    trained = config.require("max_position_embeddings", int)
    if asked is not None or chunk is None or trained <= chunk:
        return asked
    logger.warning(
        "the context is %d tokens, not %d: beyond its first chunk this model attends in chunks, "
        "which not all providers do (docs/export.md). Choose a longer one with --context-length.",
        *(chunk, trained),
    )
    return chunk


def _experts(config: Config, size: int) -> ExpertsSpec | None:
    """One expert a token, by the sigmoid of its logit, beside a shared one; None: there are none.

    Raises:
        CheckpointError: Layers that there are not have experts.
        UnsupportedModelError: A token is given to several experts.
    """
    num_layers = config.require("num_hidden_layers", int)
    sparse = _sparse_layers(config, num_layers)
    if not sparse:
        config.ignore("num_experts_per_tok", "num_local_experts")
        return None
    per_token = config.get("num_experts_per_tok", int, 1)
    if per_token != 1:
        raise UnsupportedModelError(
            f"{config.path}: num_experts_per_tok is {per_token}; supported is 1, as all published "
            "models of this family have it, for what experts read is weighed."
        )
    return experts_spec(
        config,
        count=16,
        per_token=1,
        count_keys=("num_local_experts",),
        layers=tuple(layer in sparse for layer in range(num_layers)),
        size=size,
        normalized=True,
        scaled_inputs=True,
        shared_size=size,
    )


def _sparse_layers(config: Config, num_layers: int) -> frozenset[int]:
    """The layers that have experts."""
    step = config.get("interleave_moe_layer_step", int, 1)
    listed = config.get("moe_layers", list, None)
    if listed is None and step < 1:
        raise CheckpointError(
            f"{config.path}: interleave_moe_layer_step is {step}, and there is no moe_layers; the "
            "first must be above 0, or the second list the layers that have experts."
        )
    found = list(range(step - 1, num_layers, step)) if listed is None else listed
    if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in found):
        raise CheckpointError(
            f"{config.path}: moe_layers is {found}; its entries must be from 0 to {num_layers - 1}."
        )
    return frozenset(found)


_TENSORS: Final = TensorNames(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down=("feed_forward.down_proj",),
    router="feed_forward.router",
    expert_gate_up=("feed_forward.experts.gate_up_proj",),
    expert_down=("feed_forward.experts.down_proj",),
    experts_transposed=True,
    shared_gate_up=(
        "feed_forward.shared_expert.gate_proj",
        "feed_forward.shared_expert.up_proj",
    ),
    shared_down=("feed_forward.shared_expert.down_proj",),
)
# As quantizers have them, which know products of one expert alone.
_APART: Final = replace(
    _TENSORS,
    expert_gate_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    expert_down=("feed_forward.experts.{}.down_proj",),
    experts_transposed=False,
)
_IMAGES: Final = ("vision_model.", "multi_modal_projector.")
FAMILY: Final = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    spec=read_spec,
    tensors=_TENSORS,
    other_layouts=(_APART,),
)
WITH_IMAGES: Final = wrapped(
    FAMILY,
    name="llama4",
    architecture="Llama4ForConditionalGeneration",
    image_keys=("boi_token_index", "eoi_token_index", "image_token_index", "vision_config"),
    layouts=(older_names(_TENSORS, _IMAGES), older_names(_APART, _IMAGES)),
)
