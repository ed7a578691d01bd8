"""GPT-NeoX and Pythia: attention and MLP side by side, each behind a LayerNorm of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.learnedconfig import check_own_heads
from onnxport.exporter.ropeconfig import check_outer, inner_rope
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec

# Keys of GPT-NeoX's own for those of RoPE, and what holds where both are absent.
_ROPE: Final = (
    ("rotary_emb_base", "rope_theta", 10_000.0),
    ("rotary_pct", "partial_rotary_factor", 0.25),
)
# What GPT-NeoX-20B's file calls what is dropped in training.
_TRAINING: Final = ("attention_probs_dropout_prob", "hidden_dropout_prob")
_NAMES: Final = TensorNames(
    embedding="gpt_neox.embed_in.weight",
    final_norm="gpt_neox.final_layer_norm.weight",
    layer="gpt_neox.layers.{}.",
    qkv=("attention.query_key_value",),
    qkv_by_head=True,
    o=("attention.dense",),
    up="mlp.dense_h_to_4h",
    down=("mlp.dense_4h_to_h",),
    ignored=(".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GPT-NeoX: a quarter of each head rotates, and all is side by side, unless told otherwise."""
    biased = config.get("attention_bias", bool, True)
    theta, part = (_rope(config, *keys) for keys in _ROPE)
    spec = ungated_spec(
        config,
        default="gelu",
        family="gpt_neox",
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=True,
        context_length=context_length,
        theta=theta,
        partial_rotary_factor=part,
        epsilon="layer_norm_eps",
    )
    config.ignore("classifier_dropout", "hidden_dropout", *_TRAINING)
    parallel = config.get("use_parallel_residual", bool, True) or None
    return replace(
        check_own_heads(config, spec),
        layer_norms=True,
        norm_biases=True,
        parallel_layers=parallel,
        parallel_norms=parallel,
    )


def _rope(config: Config, own: str, common: str, default: float) -> float:
    """A number of RoPE, which `rope_parameters` may have by its common name.

    At the top transformers reads its own name alone.
    """
    found = config.get(own, float, default)
    inner = inner_rope(config, common)
    if config.has(own) and inner not in (None, found):
        raise CheckpointError(
            f"{config.path}: {own} is {found} and {common} is {inner}, and are names of one "
            "number; remove the wrong one."
        )
    check_outer(config, common, found if inner is None else inner)
    return found


FAMILY: Final = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    spec=read_spec,
    tensors=_NAMES,
    other_layouts=(replace(_NAMES, head="embed_out.weight"),),
)
