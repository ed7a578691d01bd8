"""OPT: learned positions, and norms ahead of layers or, of 350M, of the stream behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.qwen3_next import check_said
from onnxport.exporter.learnedconfig import check_own_heads, learned_spec, renamed
from onnxport.graphs.spec import ArchSpec

_KEYS: Final = {"hidden_act": "activation_function", "intermediate_size": "ffn_dim"}
# What is dropped or drawn in training.
_TRAINING: Final = ("activation_dropout", "dropout", "init_std", "layerdrop")
# What Galactica's files say, which no class reads.
_SAID: Final = {"learned_embeddings": (True,), "scale_embeddings": (False,)}
_AFFINE: Final = "layer_norm_elementwise_affine"
_EPSILON: Final = "layer_norm_eps"  # which no file has
_NAMES: Final = TensorNames(
    embedding="model.decoder.embed_tokens.weight",
    final_norm="model.decoder.final_layer_norm.weight",
    positions="model.decoder.embed_positions.weight",
    positions_offset=2,
    token_in="model.decoder.project_in",
    token_out="model.decoder.project_out",
    layer="model.decoder.layers.{}.",
    input_norm="self_attn_layer_norm.weight",
    o=("self_attn.out_proj",),
    post_norm="final_layer_norm.weight",
    up="fc1",
    down=("fc2",),
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """OPT: a ReLU and biases unless told otherwise; the head is the embedding."""
    config.ignore(*_TRAINING)
    check_said(config, _SAID)
    if not config.get(_AFFINE, bool, True):
        raise UnsupportedModelError(
            f"{config.path}: {_AFFINE} is False, LayerNorms without weights, which is not "
            "supported; published models have True."
        )
    epsilon = config.get(_EPSILON, float, 1e-5)
    if epsilon != 1e-5:
        raise UnsupportedModelError(
            f"{config.path}: {_EPSILON} is {epsilon}; transformers does not read it, and computes "
            "with 1e-05. Remove it."
        )
    biased = config.get("enable_bias", bool, True)
    before = config.get("do_layer_norm_before", bool, True)
    # Fine-tuned models of before July 2022 lack the final norm, and say so.
    is_removed = config.get("_remove_final_layer_norm", bool, False)
    spec = learned_spec(
        renamed(config, _KEYS).replaced(**{_EPSILON: epsilon}),
        default="relu",
        family="opt",
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        context_length=context_length,
        epsilon=_EPSILON,
    )
    size = config.get("word_embed_proj_dim", int, spec.hidden_size)
    if size < 1:
        raise CheckpointError(f"{config.path}: word_embed_proj_dim is {size}; it must be above 0.")
    return replace(
        check_own_heads(config, spec),
        embedding_size=None if size == spec.hidden_size else size,
        stream_norms=None if before else True,
        no_final_norm=True if is_removed or not before else None,
    )


FAMILY: Final = Family(name="opt", architecture="OPTForCausalLM", spec=read_spec, tensors=_NAMES)
