"""What GGUF's architectures share: metadata as `config.json` would have it."""

from __future__ import annotations

import math
from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.ropes import rope_parameters

Values = dict[str, Any]

RMS_NORM: Final = "attention.layer_norm_rms_epsilon"
LAYER_NORM: Final = "attention.layer_norm_epsilon"
SOFTMAX: Final = 1  # of `expert_gating_func`
SIGMOID: Final = 2
# Of state spaces.
SPACE_SIZES: Final = (
    *("ssm.conv_kernel", "ssm.group_count", "ssm.inner_size"),
    *("ssm.state_size", "ssm.time_step_rank"),
)


def common(
    facts: Facts,
    model: str,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    own_values: bool = False,
    norm: str = RMS_NORM,
    epsilon: str = "rms_norm_eps",
    partial: bool = False,
    size: int | None = None,
) -> Values:
    """What all architectures share.

    Args:
        facts: The file.
        model: Transformers' class.
        heads: Query heads where layers have others than others; None: the metadata say it, by one
            number.
        kv_heads: Heads of keys and values; None: the metadata say it, by one number.
        own_values: Values may have another size than keys, which `v_head_dim` then is.
        norm: The key of the norms' epsilon.
        epsilon: What that is called in `config.json`.
        partial: A part of each head may rotate.
        size: Features of a dense feed-forward layer where the file does not say it by one number;
            None: it must.
    """
    meta = facts.metadata
    hidden = facts.count("embedding_length")
    heads = heads or facts.count("attention.head_count")
    head = facts.count("attention.key_length", hidden // heads)
    values = meta.get("attention.value_length", int, head)
    if values != head and not own_values:
        raise UnsupportedModelError(
            f"{meta.path}: values have {values} channels a head and keys {head}; supported is one "
            "number."
        )
    if size is None or not meta.holds("feed_forward_length", list):
        size = facts.count("feed_forward_length", size)
    return {
        "architectures": [model],
        "vocab_size": facts.vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": size,
        "num_hidden_layers": facts.num_layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or facts.count("attention.head_count_kv", heads),
        "head_dim": head,
        **({"v_head_dim": values} if own_values else {}),
        "max_position_embeddings": facts.count("context_length"),
        epsilon: meta.require(norm, float),
        "rope_parameters": rope_parameters(facts, head, partial=partial),
        "tie_word_embeddings": not facts.has("output.weight"),
    }


def multiplied(facts: Facts, model: str, **differences: Any) -> Values:
    """Granite's multipliers; that of attention is the usual one where it is not told.

    `differences` are keyword arguments of `common`.
    """
    meta = facts.metadata
    values = common(facts, model, **differences)
    attention = meta.get("attention.scale", float, 0.0)
    return values | {
        "attention_multiplier": attention or 1 / math.sqrt(values["head_dim"]),
        "embedding_multiplier": meta.get("embedding_scale", float, 1.0),
        "residual_multiplier": meta.get("residual_scale", float, 1.0),
        "logits_scaling": meta.get("logit_scale", float, 1.0),
    }


def biases(facts: Facts) -> Values:
    """Which projections have biases, as tensors tell."""
    return {
        "attention_bias": facts.has_qkv_bias(),
        "mlp_bias": facts.has("blk.0.ffn_down.bias"),
    }


def experts(facts: Facts, count_key: str = "num_experts") -> Values:
    """How many experts there are; their scores are a softmax of logits."""
    facts.metadata.expect("expert_gating_func", SOFTMAX)
    return {
        count_key: facts.num_experts(),
        "num_experts_per_tok": facts.metadata.require("expert_used_count", int),
    }
