"""Phi 1, 1.5 and 2: attention and MLP side by side behind one LayerNorm, biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Phi: half of each head rotates unless told otherwise; logits have biases, too."""
    if config.get("qk_layernorm", bool, False):
        raise UnsupportedModelError(
            f"{config.path}: qk_layernorm is True, LayerNorms with biases on queries and keys, "
            "which is not supported; Phi 1, 1.5 and 2 have none."
        )
    if config.get("tie_word_embeddings", bool, False):
        raise UnsupportedModelError(
            f"{config.path}: tie_word_embeddings is True; supported is False, for the head has a "
            "bias and the embedding none."
        )
    spec = ungated_spec(
        config,
        default="gelu_new",
        family="phi",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        context_length=context_length,
        partial_rotary_factor=0.5,
        epsilon="layer_norm_eps",
    )
    return replace(spec, layer_norms=True, norm_biases=True, parallel_layers=True, head_bias=True)


FAMILY: Final = Family(
    name="phi",
    architecture="PhiForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        final_norm="model.final_layernorm.weight",
        o=("self_attn.dense",),
        up="mlp.fc1",
        down=("mlp.fc2",),
    ),
)
