"""Falcon: attention and MLP side by side, with one head of keys and values or one a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, check_heads
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.learnedconfig import renamed
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec

_KEYS: Final = {
    "hidden_act": "activation",
    "hidden_size": "n_embed",
    "intermediate_size": "ffn_hidden_size",
}
_ABSENT: Final[Mapping[str, Any]] = {"max_position_embeddings": 2048}
_NORMS: Final = "num_ln_in_parallel_attn"
_NAMES: Final = TensorNames(
    embedding="transformer.word_embeddings.weight",
    final_norm="transformer.ln_f.weight",
    layer="transformer.h.{}.",
    qkv=("self_attention.query_key_value",),
    qkv_by_head=True,
    o=("self_attention.dense",),
    up="mlp.dense_h_to_4h",
    down=("mlp.dense_4h_to_h",),
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Falcon: one head of keys and values unless told otherwise, and no biases but of norms."""
    config.ignore("ff_factor", "hidden_dropout", "n_layer", "n_head")
    for key, why in (
        ("alibi", "the distance of tokens is added to scores in place of RoPE"),
        ("apply_residual_connection_post_layernorm", "the norm of the stream is added to"),
    ):
        if config.get(key, bool, False):
            raise UnsupportedModelError(
                f"{config.path}: {key} is True, so that {why}, which is not supported."
            )
    values = renamed(config, _KEYS)
    values = values.replaced(
        **{key: one for key, one in _ABSENT.items() if not values.has(key)},
        num_key_value_heads=_kv_heads(config),
    )
    if not values.has("intermediate_size"):
        values = values.replaced(intermediate_size=4 * values.require("hidden_size", int))
    biased, (parallel, apart) = config.get("bias", bool, False), _norms(config)
    spec = ungated_spec(
        values,
        default="gelu",
        family="falcon",
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        context_length=context_length,
        tied=True,
        epsilon="layer_norm_epsilon",
    )
    return replace(
        check_heads(config, spec),
        layer_norms=True,
        norm_biases=True,
        parallel_layers=parallel or None,
        parallel_norms=apart or None,
    )


def _kv_heads(config: Config) -> int:
    """Heads of keys and values."""
    heads = config.require("num_attention_heads", int)
    told = config.get("num_kv_heads", int, heads)
    if config.get("new_decoder_architecture", bool, False):
        config.ignore("multi_query")
        return told
    if config.get("multi_query", bool, True):
        return 1
    if told != heads:
        raise UnsupportedModelError(
            f"{config.path}: num_kv_heads is {told} of {heads} heads; supported without "
            "new_decoder_architecture and multi_query is one each. Remove it."
        )
    return heads


def _norms(config: Config) -> tuple[bool, bool]:
    """Whether attention and MLP are side by side, and whether each has a norm of its own then."""
    parallel, is_new = (
        config.get(key, bool, default)
        for key, default in (("parallel_attn", True), ("new_decoder_architecture", False))
    )
    count = config.get(_NORMS, int, 2 if is_new else 1)
    if (is_new and not parallel) or count not in ((1, 2) if is_new else (1,)):
        raise UnsupportedModelError(
            f"{config.path}: new_decoder_architecture is {is_new}, parallel_attn {parallel} and "
            f"{_NORMS} {count}, which no model of transformers is. Supported are one norm, "
            "and two with new_decoder_architecture, which has parallel_attn."
        )
    return parallel, count == 2


FAMILY: Final = Family(
    name="falcon",
    architecture="FalconForCausalLM",
    spec=read_spec,
    tensors=_NAMES,
    other_layouts=(replace(_NAMES, input_norm="ln_attn.weight", post_norm="ln_mlp.weight"),),
)
