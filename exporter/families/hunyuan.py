"""HunYuan, dense or with experts: Llama whose queries and keys are normalized behind RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import check_choice, experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.graphs.spec import ArchSpec

# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "norm_type": ("rms",),
    "use_cla": (False,),
    "use_mla": (False,),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}
_KNOWN_OF_EXPERTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "group_limited_greedy": (False,),
    "moe_layer_num_skipped": (0,),
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (1.0,),
    "use_mixed_mlp_moe": (True,),
}
# Tokens and pictures, classifiers, what layers would share, and how training dropped tokens.
_UNUSED: Final = (
    *("eod_token_id", "pad_id", "mask_init_id", "org_vocab_size", "image_token_id"),
    *("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"),
    *("add_classification_head", "class_num", "pool_type", "dense_list", "cla_share_factor"),
    *("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"),
)
_UNUSED_OF_ALPHA: Final = {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "alpha"}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """HunYuan, dense: optional biases on attention projections."""
    check_choice(config, {"num_experts": (1,)})
    return _attention(config, family="hunyuan_v1_dense", context_length=context_length)


def read_spec_with_experts(config: Config, context_length: int | None) -> ArchSpec:
    """HunYuan-A13B: a layer beside experts that has their size, in every layer of the model."""
    check_choice(config, _KNOWN_OF_EXPERTS)
    spec = _attention(config, family="hunyuan_v1_moe", context_length=context_length)
    size = spec.intermediate_size
    _check_uniform(config, "moe_intermediate_size", size)
    _check_uniform(config, "num_shared_expert", 1)
    per_token = _uniform(config, "moe_topk")
    if per_token is not None and config.get("num_experts_per_tok", int, per_token) != per_token:
        raise CheckpointError(
            f"{config.path}: moe_topk is {per_token}, and num_experts_per_tok says otherwise; "
            "these are names of one number. Remove the wrong one."
        )
    experts = experts_spec(
        config,
        count=1,
        per_token=1 if per_token is None else per_token,
        size=size,
        normalized=True,
        shared_size=size,
    )
    return replace(spec, experts=experts)


def _attention(config: Config, **differences: Any) -> ArchSpec:
    """What both share; `differences` are keyword arguments of `decoder_spec`."""
    check_choice(config, _KNOWN)
    config.ignore(*_UNUSED)
    biased = config.get("attention_bias", bool, False)
    spec = decoder_spec(
        config, qkv_bias=biased, o_bias=biased, qk_norm=True, rope=_rope(config), **differences
    )
    _check_uniform(config, "attention_head_dim", spec.head_size)
    return replace(spec, qk_norm_last=True)


def _rope(config: Config) -> dict[str, Any]:
    """RoPE keys, where `alpha` of a dynamic one makes it another base, whatever the length."""
    values = rope_parameters(config)
    kind = values.get("rope_type", values.get("type", "default"))
    alpha = values.get("alpha")
    if kind != "dynamic" or not alpha:
        return values
    theta, channels = values.get("rope_theta", 10_000.0), _head_size(config)
    if not _is_positive(alpha) or not _is_positive(theta) or channels <= 2:
        raise CheckpointError(
            f"{config.path}: the RoPE keys are {values} for heads of {channels} channels; alpha "
            "and rope_theta must be above 0, and heads have more than 2 channels."
        )
    kept = {key: one for key, one in values.items() if key not in _UNUSED_OF_ALPHA | {"type"}}
    theta *= alpha ** (channels / (channels - 2))
    return {**kept, "rope_type": "default", "rope_theta": theta}


def _head_size(config: Config) -> int:
    heads = config.require("num_attention_heads", int)
    return config.get("head_dim", int, config.require("hidden_size", int) // max(heads, 1))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _uniform(config: Config, key: str) -> int | None:
    """A number, or one for each layer, which are the same; None where absent."""
    found = config.get(key, object, None)
    numbers = found if isinstance(found, list) else [found]
    if not numbers or any(one != numbers[0] for one in numbers):
        raise UnsupportedModelError(
            f"{config.path}: {key} is {found}; supported is the same number for every layer."
        )
    if found is None:
        return None
    (number, *_) = numbers
    if not isinstance(number, int) or isinstance(number, bool):
        raise CheckpointError(f"{config.path}: {key} is {found!r}; expected are whole numbers.")
    return number


def _check_uniform(config: Config, key: str, expected: int) -> None:
    """Raise UnsupportedModelError for another number than transformers computes with."""
    found = _uniform(config, key)
    if found not in (None, expected):
        raise UnsupportedModelError(
            f"{config.path}: {key} is {found}; supported is {expected}, which is what transformers "
            "computes here."
        )


_NAMES: Final = TensorNames(
    q_norm="self_attn.query_layernorm.weight",
    k_norm="self_attn.key_layernorm.weight",
    router="mlp.gate.wg",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down=("mlp.shared_mlp.down_proj",),
)
FAMILY: Final = Family(
    name="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    spec=read_spec,
    tensors=_NAMES,
)
WITH_EXPERTS: Final = Family(
    name="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    spec=read_spec_with_experts,
    tensors=_NAMES,
)
