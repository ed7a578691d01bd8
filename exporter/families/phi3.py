"""Phi-3, Phi-3.5 and Phi-4 mini: joined projections, a part of each head rotated, LongRoPE."""

from __future__ import annotations

from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec

_ORIGINAL: Final = "original_max_position_embeddings"


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Phi-3: no biases; one `sliding_window` for all layers, none where absent or null."""
    window = config.get("sliding_window", int, None)
    spec = decoder_spec(
        config,
        family="phi3",
        sliding_window=(window,) * config.require("num_hidden_layers", int),
        context_length=context_length,
    )
    rope, original = spec.rope, spec.rope.original_context_length
    if rope.type not in ("default", "longrope"):
        raise UnsupportedModelError(
            f"{config.path}: the RoPE type is {rope.type!r}; a Phi-3 model has default or longrope."
        )
    if rope.type == "longrope" and not config.has(_ORIGINAL) and original != 4096:
        raise UnsupportedModelError(
            f"{config.path}: {_ORIGINAL} is {original} among the RoPE parameters only, where "
            "transformers reads 4096 for this family. Put it at the top of the file."
        )
    return spec


FAMILY: Final = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
