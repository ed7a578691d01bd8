"""Gemma (1.0 and 1.1, and CodeGemma): a Llama with Gemma's norms, embedding and GELU."""

from __future__ import annotations

from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.gemma import GELU, scaled_down
from onnxport.graphs.spec import ArchSpec

# Published files say "gelu" and mean the approximation by tanh (transformers' GemmaConfig).
_ACTIVATIONS: Final = ("gelu", GELU)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Gemma: heads of 256 and a tied head unless told otherwise, and the GELU by tanh always."""
    for key in ("hidden_act", "hidden_activation"):
        if (found := config.get(key, str, GELU)) not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{config.path}: {key} is {found!r}; supported are {_ACTIVATIONS}, which both "
                "mean the latter."
            )
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config,
        family="gemma",
        context_length=context_length,
        head_size=256,
        num_kv_heads=16,
        qkv_bias=biased,
        o_bias=biased,
        hidden_act="gelu_tanh",
        tied=True,
    )
    return scaled_down(spec)


FAMILY: Final = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    spec=read_spec,
    tensors=TensorNames(norm_offset=1.0),
)
