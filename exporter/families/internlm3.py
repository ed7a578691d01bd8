"""InternLM3: Llama by other names of its biases."""

from __future__ import annotations

from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec

_OF_ATTENTION: Final = ("qkv_bias", "attention_bias")  # names of one key
_OF_THE_REST: Final = ("bias", "mlp_bias")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """InternLM3: heads of 128 unless given; biases everywhere or nowhere."""
    names = (*_OF_ATTENTION, *_OF_THE_REST)
    told = {name: config.get(name, bool, False) for name in names if config.has(name)}
    biased = any(told.get(name) for name in _OF_ATTENTION)
    if biased != any(told.get(name) for name in _OF_THE_REST) or len({*told.values()}) > 1:
        raise UnsupportedModelError(
            f"{config.path}: biases are {told}; supported are all or none, which is what "
            "transformers takes."
        )
    return decoder_spec(
        config,
        family="internlm3",
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=2,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        context_length=context_length,
    )


FAMILY: Final = Family(
    name="internlm3",
    architecture="InternLM3ForCausalLM",
    computed_by="LlamaForCausalLM",
    spec=read_spec,
)
