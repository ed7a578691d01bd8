"""Kimi Linear: three in four layers are Kimi Delta Attention; attention is of latents, unrotated.

Experts are DeepSeek V3's. What tells where tokens are is in states and convolutions alone, and so
nothing rotates, whatever a configuration says of RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import corrected_experts, layers_by_kind, with_experts
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.qwen3_next import check_said
from onnxport.exporter.latentconfig import INNER_EPSILON, latent_spec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec
from onnxport.graphs.spec import ArchSpec

_SIZES: Final = LatentSpec(
    kv_rank=512, nope_size=128, rope_size=64, value_size=128, query_rank=None
)
_LINEAR: Final = "linear_attention"
_FULL: Final = "full_attention"
# transformers' `attribute_map`: what published files call what others call otherwise.
_NAMES: Final[Mapping[str, str]] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# What is so in transformers whatever files say, and layers that guess further tokens, which it
# does not have.
_SAID: Final[Mapping[str, tuple[Any, ...]]] = {
    "mla_use_nope": (True,),
    "mla_use_output_gate": (False,),
    "moe_router_activation_func": ("sigmoid",),
    "use_grouped_topk": (True,),
    "num_nextn_predict_layers": (0,),
}
_OF_ROPE: Final = ("rope_theta", "rope_scaling", "rope_parameters")
# Keys of `linear_attn_config`, which published files have in place of others.
_CONFIG: Final = "linear_attn_config"
_LISTS: Final = {"kda_layers": _LINEAR, "full_attn_layers": _FULL}
_INNER: Final = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Kimi Linear: its own names of keys, or transformers'; nothing rotates."""
    check_said(config, _SAID)
    config.ignore(*_OF_ROPE)
    rope_size = config.get("qk_rope_head_dim", int, _SIZES.rope_size)
    # Published files say hidden_size / num_attention_heads there, which nothing reads.
    config = _renamed(config).replaced(head_dim=rope_size)
    spec = latent_spec(
        config,
        family="kimi_linear",
        defaults=_SIZES,
        interleaved=False,
        context_length=context_length,
        rope={"rope_type": "default"},
    )
    layers = layers_by_kind(config, spec.num_layers, dense=1, reads_first=True)
    experts = corrected_experts(
        config,
        count=256,
        per_token=8,
        size=1024,
        normalized=True,
        shared=1,
        layers=layers,
        scale=2.446,
        count_keys=("num_local_experts", "n_routed_experts"),
    )
    epsilon = config.get("latent_norm_eps", float, INNER_EPSILON)  # GGUF files have another one
    try:
        return replace(
            with_experts(spec, experts),
            linear=_linear(config, spec.num_layers),
            rotated_layers=(False,) * spec.num_layers,
            inner_norm_eps=epsilon,
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _renamed(config: Config) -> Config:
    """The configuration with the keys that other families have, where there are its own."""
    renamed: dict[str, Any] = {}
    for own, other in _NAMES.items():
        if not config.has(own):
            continue
        renamed[other] = value = config.require(own, object)
        if config.get(other, object, value) != value:
            raise CheckpointError(
                f"{config.path}: {own} is {value!r} and {other} is "
                f"{config.require(other, object)!r}, which are names of one number. Remove the "
                "wrong one."
            )
    return config.replaced(**renamed)


def _linear(config: Config, num_layers: int) -> LinearAttentionSpec:
    """The layers without attention."""
    found = config.get(_CONFIG, dict, {})
    if unknown := sorted(map(str, found.keys() - _LISTS.keys() - _INNER.keys())):
        raise UnsupportedModelError(
            f"{config.path}: {_CONFIG} has keys that are not understood, and that could change the "
            f"result: {', '.join(f'{key} = {found[key]!r}' for key in unknown)}. Supported are "
            f"{', '.join((*_LISTS, *_INNER))}."
        )
    inner = Config(found, config.path / _CONFIG)
    heads, size, kernel = (
        inner.get(key, int, config.get(other, int, default))
        for (key, other), default in zip(_INNER.items(), (32, 128, 4), strict=True)
    )
    layers = _layers(config, inner, num_layers)
    if len(set(layers)) < 2:
        raise UnsupportedModelError(
            f"{config.path}: all of the {num_layers} layers are {layers[0]!r}; supported is that "
            f"some are {_LINEAR!r} and some {_FULL!r}."
        )
    return LinearAttentionSpec(
        key_heads=heads,
        value_heads=heads,
        key_size=size,
        value_size=size,
        kernel=kernel,
        layers=tuple(kind == _LINEAR for kind in layers),
        gate_rank=size,
    )


def _layers(config: Config, inner: Config, num_layers: int) -> list[str]:
    """The kind of each layer: what `layer_types` or lists of numbers from 1 on say."""
    every = [_FULL if layer and layer % 4 == 0 else _LINEAR for layer in range(num_layers)]
    told = _listed(inner, num_layers) if any(map(inner.has, _LISTS)) else None
    types = config.get("layer_types", list, every if told is None else told)
    if len(types) != num_layers or not all(kind in (_LINEAR, _FULL) for kind in types):
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {types}; supported are {num_layers} entries (one a "
            f"layer) from {_FULL!r} and {_LINEAR!r}."
        )
    if told is not None and types != told:
        raise CheckpointError(
            f"{config.path}: layer_types is {types}, and {_CONFIG} says {told}; remove the one "
            "that the model was not trained with."
        )
    return types


def _listed(inner: Config, num_layers: int) -> list[str]:
    """What the two lists say, which have each layer once."""
    places = [(at, kind) for key, kind in _LISTS.items() for at in inner.require(key, list)]
    kinds = dict(places)
    if len(kinds) != len(places) or kinds.keys() != set(range(1, num_layers + 1)):
        raise CheckpointError(
            f"{inner.path}: {' and '.join(_LISTS)} are "
            f"{' and '.join(str(inner.require(key, list)) for key in _LISTS)}; together they must "
            f"have each number from 1 to {num_layers} once."
        )
    return [kinds[layer + 1] for layer in range(num_layers)]


_MOE: Final = "block_sparse_moe"
TENSORS: Final = TensorNames(
    router=f"{_MOE}.gate",
    expert_gate_up=(f"{_MOE}.experts.{{}}.w1", f"{_MOE}.experts.{{}}.w3"),
    expert_down=(f"{_MOE}.experts.{{}}.w2",),
    correction=f"{_MOE}.gate.e_score_correction_bias",
    shared_gate_up=(f"{_MOE}.shared_experts.gate_proj", f"{_MOE}.shared_experts.up_proj"),
    shared_down=(f"{_MOE}.shared_experts.down_proj",),
    linear_in=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    linear_conv_apart=(
        "self_attn.q_conv1d.weight",
        "self_attn.k_conv1d.weight",
        "self_attn.v_conv1d.weight",
    ),
    linear_a_log="self_attn.A_log",
    linear_dt_bias="self_attn.dt_bias",
    linear_norm="self_attn.o_norm.weight",
    linear_o=("self_attn.o_proj",),
    head_axes=(2, 1),
)
# As transformers writes a model that it has read: dense layers are called as experts are.
_WRITTEN: Final = replace(
    TENSORS, gate_up=(f"{_MOE}.gate_proj", f"{_MOE}.up_proj"), down=(f"{_MOE}.down_proj",)
)
FAMILY: Final = Family(
    name="kimi_linear",
    architecture="KimiLinearForCausalLM",
    spec=read_spec,
    tensors=TENSORS,
    other_layouts=(_WRITTEN,),
)
