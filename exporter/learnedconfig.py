"""Decoders with learned positions in place of RoPE, and keys with names of a family's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, check_heads
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec

# GPT-2's keys, and those of its like, for what others call so.
GPT_KEYS: Final[Mapping[str, str]] = {
    "hidden_act": "activation_function",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_NO_ROPE: Final[Mapping[str, Any]] = {"rope_type": "default", "rope_theta": 10_000.0}


def renamed(config: Config, keys: Mapping[str, str]) -> Config:
    """The configuration with common names beside a family's own.

    Args:
        config: The model's configuration.
        keys: A family's own name by the common one.

    Raises:
        CheckpointError: A file has both, and they differ.
    """
    found: dict[str, Any] = {}
    for common, own in keys.items():
        value, other = config.get(own, object, None), config.get(common, object, None)
        if value is not None and other not in (None, value):
            raise CheckpointError(
                f"{config.path}: {own} is {value!r} and {common} is {other!r}, and are names of "
                "one thing; remove the wrong one."
            )
        found[common] = other if value is None else value
    return config.replaced(**{name: one for name, one in found.items() if one is not None})


def gpt_config(config: Config) -> Config:
    """Likewise with GPT-2's keys; layers are four times as wide within where nothing is said.

    What is dropped in training, how sequences are summed up, and the length of a mask that older
    releases of transformers kept change no logit; nor do keys of older releases, which no class of
    today reads.
    """
    config.ignore(
        *("n_ctx", "embedding_dropout", "attention_softmax_in_fp32"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj"),
        *("_num_labels", "n_special", "output_past", "predict_special_tokens"),
    )
    found = renamed(config, GPT_KEYS)
    if not found.has("intermediate_size"):
        found = found.replaced(intermediate_size=4 * found.require("hidden_size", int))
    return found


def check_own_heads(config: Config, spec: ArchSpec) -> ArchSpec:
    """The spec, if each head has keys and values of its own and heads share a token's width.

    Raises UnsupportedModelError.
    """
    if spec.num_kv_heads != spec.num_heads:
        raise UnsupportedModelError(
            f"{config.path}: num_key_value_heads is {spec.num_kv_heads}; of {spec.family} each of "
            f"{spec.num_heads} heads has keys and values. Remove it."
        )
    return check_heads(config, spec)


def learned_spec(config: Config, **differences: Any) -> ArchSpec:
    """Read what `ungated_spec` reads of a decoder of LayerNorms and learned positions.

    Args:
        config: The model's configuration, with common names.
        differences: Keyword arguments of `ungated_spec`.

    Raises:
        CheckpointError: See `ungated_spec`.
        UnsupportedModelError: Likewise.
    """
    spec = check_heads(config, ungated_spec(config, rope=_NO_ROPE, tied=True, **differences))
    return replace(
        spec,
        layer_norms=True,
        norm_biases=True,
        rotated_layers=(False,) * spec.num_layers,
        learned_positions=config.require("max_position_embeddings", int),
    )
