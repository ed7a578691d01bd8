"""Apertus: norms of queries and keys, and an activation that is trained, without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import check_choice
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ropeconfig import check_outer
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec

_THETA: Final = 12_000_000.0
_ROPE: Final[Mapping[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {"post_norm": (False,), "qk_norm": (True,)}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Apertus: biases of attention are optional; RoPE is Llama 3's unless told otherwise.

    `rope_theta` alone tells nothing: to transformers it goes with what is told.
    """
    check_choice(config, _KNOWN)
    config.ignore("hidden_dropout")
    biased = config.get("attention_bias", bool, False)
    told = config.has("rope_parameters") or bool(config.get("rope_scaling", dict, {}))
    if not told:
        check_outer(config, "rope_theta", _THETA)
    return ungated_spec(
        config,
        default="xielu",
        trained=True,
        family="apertus",
        qkv_bias=biased,
        o_bias=biased,
        qk_norm=True,
        context_length=context_length,
        theta=_THETA,
        rope=None if told else _ROPE,
    )


FAMILY: Final = Family(
    name="apertus",
    architecture="ApertusForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        input_norm="attention_layernorm.weight", post_norm="feedforward_layernorm.weight"
    ),
)
