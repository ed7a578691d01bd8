"""nanochat: norms without weights, one of embeddings too, and heads normalized behind RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """nanochat: the square of what is positive; RoPE turns the other way; logits are capped."""
    biased = config.get("attention_bias", bool, False)
    cap = config.get("final_logit_softcapping", float, _cap_where_absent(config))
    if cap is not None and not cap > 0:
        raise CheckpointError(
            f"{config.path}: final_logit_softcapping is {cap}; it must be above 0, or null."
        )
    spec = ungated_spec(
        config,
        default="relu2",
        family="nanochat",
        qk_norm=True,
        qkv_bias=biased,
        o_bias=biased,
        context_length=context_length,
    )
    return replace(
        spec,
        qk_norm_last=True,
        embedding_norm=True,
        logits_softcap=cap,
        rope=replace(spec.rope, turns_back=True),
    )


def _cap_where_absent(config: Config) -> float | None:
    return None if config.is_null("final_logit_softcapping") else 15.0


FAMILY: Final = Family(
    name="nanochat",
    architecture="NanoChatForCausalLM",
    spec=read_spec,
    tensors=TensorNames(plain_norms=True, up="mlp.fc1", down=("mlp.fc2",)),
)
