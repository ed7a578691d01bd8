"""Qwen3-Next: three in four layers are gated delta nets, and attention has a gate; with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec, with_experts
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.mtp import FURTHER, beside_the_model
from onnxport.exporter.families.qwen3_moe import sparse_layers
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.graphs.linear_spec import LinearAttentionSpec
from onnxport.graphs.spec import ArchSpec

_LINEAR: Final = "linear_attention"
_FULL: Final = "full_attention"

# What published files say, and what is so in transformers whatever they say.
_SAID: Final[Mapping[str, tuple[Any, ...]]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),  # of the delta nets
    "mamba_ssm_dtype": ("float32",),  # of their states
}
# How positions of images would be told apart from those of text, which has one number for each.
_OF_IMAGES: Final = ("mrope_section", "mrope_interleaved")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Qwen3-Next: experts in every `decoder_sparse_step`-th layer, but for `mlp_only_layers`."""
    spec = hybrid_spec(
        config,
        family="qwen3_next",
        num_kv_heads=2,
        intermediate_size=5632,
        context_length=context_length,
    )
    layers = sparse_layers(config, spec.num_layers)
    experts = experts_spec(
        config,
        count=512,
        per_token=10,
        size=config.get("moe_intermediate_size", int, 512),
        normalized=config.get("norm_topk_prob", bool, True),
        layers=layers,
        shared_size=config.get("shared_expert_intermediate_size", int, 512),
        shared_gated=True,
    )
    return with_experts(spec, experts)


def hybrid_spec(config: Config, **differences: Any) -> ArchSpec:
    """What Qwen3-Next and Qwen3.5 share, but for feed-forward layers.

    `differences` are keyword arguments of `decoder_spec`.

    Raises:
        CheckpointError: A key is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: A value that is not supported.
    """
    check_said(config, _SAID)
    spec = decoder_spec(config, head_size=256, qk_norm=True, rope=_rope(config), **differences)
    try:
        return replace(spec, linear=_linear(config, spec.num_layers), attention_gate=True)
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def check_said(config: Config, said: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedModelError for keys that are there, and have other values than these."""
    for key, allowed in said.items():
        if (found := config.get(key, object, allowed[0])) not in allowed:
            raise UnsupportedModelError(
                f"{config.path}: {key} is {found!r}; supported is "
                f"{' or '.join(map(repr, allowed))}, which is what transformers computes here."
            )


def _rope(config: Config) -> dict[str, Any]:
    """The RoPE parameters: a quarter of each head rotates unless told otherwise."""
    values = {"partial_rotary_factor": 0.25, **rope_parameters(config)}
    section, interleaved = (values.pop(key, None) for key in _OF_IMAGES)
    is_section = isinstance(section, list) and all(type(one) is int for one in section)
    if not (section is None or is_section) or not isinstance(interleaved, bool | None):
        raise UnsupportedModelError(
            f"{config.path}: the RoPE keys mrope_section = {section!r} and mrope_interleaved = "
            f"{interleaved!r} are not understood; expected are a list of integers and a bool, of "
            "which nothing depends where there is only text."
        )
    return values


def _linear(config: Config, num_layers: int) -> LinearAttentionSpec | None:
    """The layers without attention, if there are some."""
    layers = _layers(config, num_layers)
    linear: dict[str, Any] = {
        "key_heads": config.get("linear_num_key_heads", int, 16),
        "value_heads": config.get("linear_num_value_heads", int, 32),
        "key_size": config.get("linear_key_head_dim", int, 128),
        "value_size": config.get("linear_value_head_dim", int, 128),
        "kernel": config.get("linear_conv_kernel_dim", int, 4),
    }
    if all(layers):
        raise UnsupportedModelError(
            f"{config.path}: none of the {num_layers} layers has attention; supported is that "
            "some have, and the others are gated delta nets."
        )
    return LinearAttentionSpec(layers=layers, **linear) if any(layers) else None


def _layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers have no attention: those that `layer_types` names, or all but every fourth."""
    interval = config.get("full_attention_interval", int, 4)
    if interval < 1:
        raise CheckpointError(
            f"{config.path}: full_attention_interval is {interval}; it must be above 0."
        )
    counted = [_LINEAR if (i + 1) % interval else _FULL for i in range(num_layers)]
    types = config.get("layer_types", list, counted)
    if len(types) != num_layers or not all(kind in (_LINEAR, _FULL) for kind in types):
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {types}; supported are {num_layers} entries (one a "
            f"layer) from {_FULL!r} and {_LINEAR!r}."
        )
    if config.has("full_attention_interval") and types != counted:
        raise CheckpointError(
            f"{config.path}: full_attention_interval is {interval} and layer_types is {types}, "
            "which differ; remove the one that the model was not trained with."
        )
    return tuple(kind == _LINEAR for kind in types)


TENSORS: Final = TensorNames(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down=("mlp.shared_expert.down_proj",),
    norm_offset=1.0,
    further=FURTHER,
)
FAMILY: Final = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    spec=read_spec,
    tensors=replace(TENSORS, linear_in=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
    mtp=beside_the_model,
)
