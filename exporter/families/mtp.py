"""What checkpoints call their layers of multi-token prediction (arXiv:2412.19437)."""

from __future__ import annotations

from dataclasses import replace

from onnxport.exporter.families.base import TensorNames


def behind_the_last(names: TensorNames, num_layers: int) -> TensorNames:
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


def beside_the_model(names: TensorNames, num_layers: int) -> TensorNames:
    """The names of Qwen's: all of it is called `mtp`, and its layers are numbered from 0."""
    return replace(
        names,
        layer="mtp.layers.{}.",
        embedding="mtp.embed_tokens.weight",
        final_norm="mtp.norm.weight",
        head="mtp.lm_head.weight",
        features="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        state_norm="mtp.pre_fc_norm_hidden.weight",
    )
