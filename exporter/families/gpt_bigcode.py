"""GPT BigCode, which StarCoder and SantaCoder are: GPT-2 with one head of keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.gpt2 import NAMES
from onnxport.exporter.learnedconfig import gpt_config, learned_spec
from onnxport.graphs.spec import ArchSpec

# How computations are laid out, and where numbers become float32.
_UNREAD: Final = (
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    *("inference_runner", "max_batch_size", "max_sequence_length", "pre_allocate_kv_cache"),
    *("validate_runner_input", "pad_key_length"),
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """GPT BigCode: one head of keys and values unless told otherwise."""
    config.ignore(*_UNREAD)
    values = gpt_config(config)
    heads = 1 if config.get("multi_query", bool, True) else None
    # transformers overwrites the key
    told = values.require("num_attention_heads", int) if heads is None else heads
    spec = learned_spec(
        values.replaced(num_key_value_heads=told),
        default="gelu_pytorch_tanh",
        family="gpt_bigcode",
        num_kv_heads=heads,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        context_length=context_length,
        epsilon="layer_norm_epsilon",
    )
    scaled = config.get("scale_attn_weights", bool, True)
    return replace(spec, attention_scale=None if scaled else 1.0)


FAMILY: Final = Family(
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    spec=read_spec,
    tensors=replace(NAMES, qkv_by_head=True),
)
