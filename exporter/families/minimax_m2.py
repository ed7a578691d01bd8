"""MiniMax M2 to 2.5: experts that sigmoids choose, and norms on all queries (keys) at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import check_choice, experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec

# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "layernorm_full_attention_beta": (1.0,),
    "layernorm_linear_attention_beta": (1.0,),
    "layernorm_mlp_beta": (1.0,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
_FURTHER_LAYERS: Final = ("num_mtp_modules",)
# Of layers that are not there: dense ones, shared ones, and those that guess further tokens.
_UNUSED: Final = (
    *("mlp_intermediate_size", "shared_moe_mode"),
    *("mtp_transformer_layers", "use_mtp", *_FURTHER_LAYERS),
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """MiniMax M2: heads of 128 unless given, whose first `rotary_dim` channels rotate."""
    check_choice(config, _KNOWN)
    config.ignore(*_UNUSED)
    _check_attention(config)
    head_size = config.get("head_dim", int, 128)
    rotary_dim = config.get("rotary_dim", int, head_size)
    spec = decoder_spec(
        config,
        family="minimax_m2",
        head_size=head_size,
        num_kv_heads=8,
        qk_norm=True,
        context_length=context_length,
        theta=5_000_000.0,
        partial_rotary_factor=rotary_dim / max(head_size, 1),
    )
    if config.has("rotary_dim") and spec.rope.rotary_dim != rotary_dim:
        raise CheckpointError(
            f"{config.path}: rotary_dim is {rotary_dim}, and partial_rotary_factor makes "
            f"{spec.rope.rotary_dim} of {head_size} channels rotate; remove the wrong one."
        )
    experts = experts_spec(
        config,
        count=256,
        per_token=8,
        size=spec.intermediate_size,
        normalized=True,
        sigmoid=True,
        corrected=True,
    )
    return replace(spec, whole_qk_norm=True, experts=experts)


def _check_attention(config: Config) -> None:
    """Raise UnsupportedModelError for layers whose attention is linear, as MiniMax 1 has them."""
    kinds = config.get("attn_type_list", list, None)
    if kinds is not None and kinds != [1] * config.require("num_hidden_layers", int):
        raise UnsupportedModelError(
            f"{config.path}: attn_type_list is {kinds}; supported is a 1 for each layer, which is "
            "attention by a softmax."
        )


FAMILY: Final = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down=("block_sparse_moe.experts.{}.w2",),
        correction="block_sparse_moe.e_score_correction_bias",
    ),
    further_layers=_FURTHER_LAYERS,
)
