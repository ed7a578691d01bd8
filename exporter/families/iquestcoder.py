"""IQuest-Coder: Llama, whose class of transformers computes it."""

from __future__ import annotations

from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """IQuest-Coder: heads of 128 unless given; no bound on queries, keys and values."""
    if (bound := config.get("clip_qkv", float, None)) is not None:
        raise UnsupportedModelError(
            f"{config.path}: clip_qkv is {bound}, a bound on queries, keys and values; supported "
            "is null, as in transformers."
        )
    biased = config.get("attention_bias", bool, False)
    return decoder_spec(
        config,
        family="iquestcoder",
        head_size=None if config.is_null("head_dim") else 128,
        num_kv_heads=8,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
    )


FAMILY: Final = Family(
    name="iquestcoder",
    architecture="IQuestCoderForCausalLM",
    computed_by="LlamaForCausalLM",
    spec=read_spec,
)
