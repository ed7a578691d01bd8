"""What checkpoints call their layers of multi-token prediction (arXiv:2412.19437)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.families.base import TensorNames

FURTHER: Final = ("mtp.", "model.mtp.")  # prefixes of Qwen's


def behind_the_last(names: TensorNames, num_layers: int, _found: frozenset[str]) -> TensorNames:
    """The names of DeepSeek's and GLM's: the layer has the number behind the model's last one.

    Published checkpoints repeat the model's embedding and head there.
    """
    prefix = names.layer.format(num_layers)
    return replace(
        names,
        layer=prefix,
        embedding=f"{prefix}embed_tokens.weight",
        final_norm=f"{prefix}shared_head.norm.weight",
        head=f"{prefix}shared_head.head.weight",
        features=f"{prefix}eh_proj",
        embedding_norm=f"{prefix}enorm.weight",
        state_norm=f"{prefix}hnorm.weight",
    )


def beside_the_model(names: TensorNames, _num_layers: int, found: frozenset[str]) -> TensorNames:
    """The names of Qwen's: all of it is called `mtp`, and its layers are numbered from 0.

    Some files have that within the model, as others than Qwen's authors save them.
    """
    beside, within = FURTHER
    prefix = within if f"{within}fc.weight" in found else beside
    return replace(
        names,
        layer=f"{prefix}layers.{{}}.",
        embedding=f"{prefix}embed_tokens.weight",
        final_norm=f"{prefix}norm.weight",
        head=f"{prefix}lm_head.weight",
        features=f"{prefix}fc",
        embedding_norm=f"{prefix}pre_fc_norm_embedding.weight",
        state_norm=f"{prefix}pre_fc_norm_hidden.weight",
    )
