"""InternLM2 and 2.5: Llama, with queries, keys and values of each key head side by side."""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """InternLM2: biases on attention projections unless `bias` is false, as published."""
    config.ignore("attn_implementation")
    biased = config.get("bias", bool, True)
    return decoder_spec(
        config,
        family="internlm2",
        qkv_bias=biased,
        o_bias=biased,
        context_length=context_length,
    )


FAMILY: Final = Family(
    name="internlm2",
    architecture="InternLM2ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        embedding="model.tok_embeddings.weight",
        head="output.weight",
        input_norm="attention_norm.weight",
        qkv=("attention.wqkv",),
        qkv_by_head=True,
        o=("attention.wo",),
        post_norm="ffn_norm.weight",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down=("feed_forward.w2",),
    ),
)
