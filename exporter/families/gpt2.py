"""GPT-2: learned positions, and matrices that are stored the other way round."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.learnedconfig import check_own_heads, gpt_config, learned_spec
from onnxport.graphs.spec import ArchSpec

# Buffers of the causal mask, which older releases of transformers stored.
MASKS: Final = (".attn.bias", ".attn.masked_bias")
NAMES: Final = TensorNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.ln_f.weight",
    layer="transformer.h.{}.",
    input_norm="ln_1.weight",
    qkv=("attn.c_attn",),
    o=("attn.c_proj",),
    post_norm="ln_2.weight",
    up="mlp.c_fc",
    down=("mlp.c_proj",),
    ignored=MASKS,
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GPT-2: scores may be unscaled, or smaller in each layer.

    `reorder_and_upcast_attn` says when scores become float32, and changes nothing of what they are.
    """
    config.get("reorder_and_upcast_attn", bool, False)
    spec = learned_spec(
        gpt_config(config),
        default="gelu_new",
        family="gpt2",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        context_length=context_length,
        epsilon="layer_norm_epsilon",
    )
    return replace(
        check_own_heads(config, spec),
        attention_scale=None if config.get("scale_attn_weights", bool, True) else 1.0,
        inverse_layer_scale=config.get("scale_attn_by_inverse_layer_idx", bool, False) or None,
    )


FAMILY: Final = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    spec=read_spec,
    tensors=replace(NAMES, transposed=True),
)
