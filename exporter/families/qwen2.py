"""Qwen2 and Qwen2.5: biases on queries, keys and values; a window on the later layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, context_within, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.windows import layer_windows
from onnxport.graphs.spec import ArchSpec

_CHUNKS: Final = "dual_chunk_attention_config"


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Qwen2: always biased queries, keys and values, never an output or MLP bias."""
    if chunks := config.get(_CHUNKS, dict, None):
        end, what = _first_chunk(config, chunks), f"the first chunk of its {_CHUNKS}"
        beyond = "this model attends in chunks"
        context_length = context_within(config, end, context_length, what, beyond)
    return decoder_spec(
        config,
        family="qwen2",
        num_kv_heads=32,
        qkv_bias=True,
        sliding_window=layer_windows(config),
        context_length=context_length,
    )


def _first_chunk(config: Config, chunks: Mapping[str, Any]) -> int:
    """Tokens of the context in which dual chunk attention is plain attention.

    Within a chunk of `chunk_size - local_size` tokens relative positions stay as they are; those
    of tokens in other chunks are folded into what the model was trained with (arXiv:2402.17463,
    §3). Qwen2.5-1M has this, and transformers, which does not know it, computes plain attention.
    """
    size, local = chunks.get("chunk_size"), chunks.get("local_size")
    if type(size) is not int or type(local) is not int:
        raise CheckpointError(
            f"{config.path}: {_CHUNKS} is {dict(chunks)}; it needs the numbers chunk_size and "
            "local_size."
        )
    if size <= local:
        raise CheckpointError(
            f"{config.path}: {_CHUNKS} has a chunk_size of {size} and a local_size of {local}; "
            "the first must be larger."
        )
    return size - local


FAMILY: Final = Family(name="qwen2", architecture="Qwen2ForCausalLM", spec=read_spec)
