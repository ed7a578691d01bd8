"""GPT-J: attention and MLP side by side behind one LayerNorm, and neighbours that rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.gpt2 import NAMES
from onnxport.exporter.learnedconfig import check_own_heads, gpt_config
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GPT-J: 64 channels of each head rotate unless told otherwise; logits have biases."""
    config.ignore("rotary", "scale_attn_weights")  # which no class reads
    if config.get("tie_word_embeddings", bool, False):
        raise UnsupportedModelError(
            f"{config.path}: tie_word_embeddings is True; supported is False, for the head has a "
            "bias and the embedding none."
        )
    values = gpt_config(config)
    heads = max(values.require("num_attention_heads", int), 1)
    head = max(values.require("hidden_size", int) // heads, 1)
    size = config.get("rotary_dim", int, head if config.is_null("rotary_dim") else 64)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": size / head}
    spec = check_own_heads(
        config,
        ungated_spec(
            values,
            default="gelu_new",
            family="gptj",
            mlp_bias=True,
            context_length=context_length,
            rope=rope,
            epsilon="layer_norm_epsilon",
        ),
    )
    return replace(
        spec,
        rope=replace(spec.rope, interleaved=True),
        layer_norms=True,
        norm_biases=True,
        parallel_layers=True,
        head_bias=True,
    )


FAMILY: Final = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    spec=read_spec,
    tensors=replace(
        NAMES,
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        o=("attn.out_proj",),
        up="mlp.fc_in",
        down=("mlp.fc_out",),
    ),
)
