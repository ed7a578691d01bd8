"""Mixtral 8x7B and 8x22B: Mistral with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Mixtral: no biases; a `sliding_window` for all layers, if there is one; two of 8 experts."""
    window = config.get("sliding_window", int, None)
    spec = decoder_spec(
        config,
        family="mixtral",
        num_kv_heads=8,
        sliding_window=(window,) * config.require("num_hidden_layers", int),
        context_length=context_length,
        theta=1_000_000.0,
    )
    experts = experts_spec(
        config,
        count=8,
        per_token=2,
        size=spec.intermediate_size,
        normalized=True,
    )
    return replace(spec, experts=experts)


FAMILY: Final = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down=("block_sparse_moe.experts.{}.w2",),
    ),
)
