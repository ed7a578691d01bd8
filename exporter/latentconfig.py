"""Multi-head latent attention from `config.json`, as DeepSeek V2 and those after it spell it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec

INNER_EPSILON = 1e-6  # of the norms of latents, whatever rms_norm_eps is
# What training, loading or transformers' own bookkeeping reads.
UNREAD = ("aux_loss_alpha", "ep_size", "qk_head_dim", "seq_aux")


def latent_spec(
    config: Config,
    *,
    family: str,
    defaults: LatentSpec,
    interleaved: bool,
    **differences: Any,
) -> ArchSpec:
    """Read the keys of a decoder with latent attention.

    Args:
        config: The model's configuration.
        family: The family's name.
        defaults: Sizes where the configuration does not give them.
        interleaved: Whether what rotates are pairs of neighbours.
        differences: What else `decoder_spec` is told, such as the context length.

    Raises:
        CheckpointError: A key is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: A value that is not supported.
    """
    config.ignore(*UNREAD)
    latent = _sizes(config, defaults)
    spec = decoder_spec(config, family=family, head_size=latent.rope_size, **differences)
    if spec.head_size != latent.rope_size:
        raise CheckpointError(
            f"{config.path}: head_dim is {spec.head_size} and qk_rope_head_dim "
            f"{latent.rope_size}; of these models they are names of one number. Remove the wrong "
            "one."
        )
    if spec.num_kv_heads != spec.num_heads:
        raise CheckpointError(
            f"{config.path}: num_key_value_heads is {spec.num_kv_heads} and num_attention_heads "
            f"{spec.num_heads}; keys of latents are made for each head, so both must be equal."
        )
    return replace(
        spec,
        num_kv_heads=1,
        head_size=latent.row_size,
        rope=replace(spec.rope, interleaved=interleaved),
        attention_scale=_scale(
            differences.get("rope") or rope_parameters(config), latent.query_size, spec.rope
        ),
        inner_norm_eps=INNER_EPSILON,
        latent=latent,
    )


def _sizes(config: Config, defaults: LatentSpec) -> LatentSpec:
    rank = None if config.is_null("q_lora_rank") else defaults.query_rank
    try:
        return LatentSpec(
            kv_rank=config.get("kv_lora_rank", int, defaults.kv_rank),
            nope_size=config.get("qk_nope_head_dim", int, defaults.nope_size),
            rope_size=config.get("qk_rope_head_dim", int, defaults.rope_size),
            value_size=config.get("v_head_dim", int, defaults.value_size),
            query_rank=config.get("q_lora_rank", int, rank),
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _scale(values: Mapping[str, Any], size: int, rope: RopeSpec) -> float:
    """What QK^T is multiplied with; yarn's mscale_all_dim is in it twice (DeepSeek V2's own code).

    Once for queries and once for keys, all of whose channels it would multiply.
    """
    weight = float(values.get("mscale_all_dim", 0.0))
    magnitude = 1.0
    if rope.factor is not None and rope.factor > 1:
        magnitude = 0.1 * weight * math.log(rope.factor) + 1.0
    return magnitude * magnitude / math.sqrt(size)
