"""MiMo 7B: Qwen2, and a layer of multi-token prediction, which is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import FURTHER_LAYERS
from onnxport.exporter.families import qwen2
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.qwen3_next import check_said
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """MiMo: queries, keys and values have biases, as Qwen2's."""
    config.ignore(*FURTHER_LAYERS)
    check_said(config, {"attention_bias": (True,)})
    return replace(qwen2.read_spec(config, context_length), family="mimo")


FAMILY: Final = Family(
    name="mimo",
    architecture="MiMoForCausalLM",
    spec=read_spec,
    tensors=TensorNames(further=("model.mtp_layers.",)),
)
