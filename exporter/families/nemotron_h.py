"""Nemotron-H: blocks of one part each, state spaces, attention, layers of ReLU's square or experts.

A state space, or attention, and the feed-forward block or the experts behind it are one layer
here, which gives the same: each block adds to the residual stream what it makes of a norm of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeVar

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import corrected_experts
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.spaceconfig import check_limits, check_plain, space_spec
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec

T = TypeVar("T")

_SPACE, _ATTENTION, _MLP, _EXPERTS = "M*-E"
# Blocks as patterns and lists name them.
_KINDS: Final = {
    "mamba": _SPACE,
    "linear_attention": _SPACE,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "mlp": _MLP,
    "moe": _EXPERTS,
}
# Keys of experts, where no block has some.
_OF_EXPERTS: Final = (
    *("n_routed_experts", "num_local_experts", "n_shared_experts", "moe_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size"),
    *("num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"),
)
# Keys of tokens behind the next one, of training, and of when a device computes what. Steps have no
# limits but `time_step_limit`: by the others weights are made before training.
_UNUSED: Final = (
    "moe_shared_expert_overlap",
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("time_step_min", "time_step_max", "time_step_floor", "hidden_dropout"),
    *("rescale_prenorm_residual", "num_logits_to_keep"),
    # How a sequence is cut, kept and added up by whoever computes it.
    *("mamba_chunk_size", "mamba_expand", "mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor"),
    *("chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype", "residual_in_fp32"),
    *("rope_theta", "rope_parameters", "partial_rotary_factor"),  # nothing rotates
)
# Older names, by which transformers reads first.
_OLDER: Final = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
}
# What there may be, of which transformers computes this alone, whatever the file says.
_SAID: Final = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "hidden_act": "silu"}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Nemotron-H; attention sees no positions but through state spaces."""
    layers = _layers(config)
    for key, allowed in _SAID.items():
        if (found := config.get(key, str, allowed)) != allowed:
            raise UnsupportedModelError(
                f"{config.path}: {key} is {found!r}; supported is {allowed!r}."
            )
    spec = decoder_spec(
        config,
        family="nemotron_h",
        num_layers=len(layers),
        head_size=128,
        num_kv_heads=8,
        mlp_bias=config.get("mlp_bias", bool, False),
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        context_length=context_length,
        epsilon="layer_norm_epsilon",
    )
    # Names that published files have besides for what transformers reads by others.
    for key, wanted in (
        ("rms_norm_eps", spec.rms_norm_eps),
        ("norm_eps", spec.rms_norm_eps),
        ("attention_head_dim", spec.head_size),
    ):
        if (given := config.get(key, float, wanted)) != wanted:
            raise CheckpointError(
                f"{config.path}: {key} is {given}, and what transformers reads for it is {wanted}; "
                "correct what the model was not trained with."
            )
    config.ignore(*_UNUSED)
    check_plain(config, "use_bias")
    check_plain(config, "mamba_proj_bias")
    check_limits(config, "mamba_dt_limit")
    spaces = tuple(mixer == _SPACE for mixer, _ in layers)
    has_experts = tuple(behind == _EXPERTS for _, behind in layers)
    fields = {
        "heads": config.get("mamba_num_heads", int, 128),
        "head_size": config.get("mamba_head_dim", int, 64),
        "groups": _by_either_name(config, "n_groups", int, 8),
        "state_size": config.get("ssm_state_size", int, 128),
        "kernel": _by_either_name(config, "conv_kernel", int, 4),
        "conv_bias": _by_either_name(config, "use_conv_bias", bool, True),
    }
    has_mlp = tuple(behind is not None for _, behind in layers)
    return replace(
        spec,
        linear=space_spec(config, spaces, fields),
        rotated_layers=(False,) * len(layers),
        hidden_act="relu2",
        ungated=True,
        mlp_layers=None if all(has_mlp) else has_mlp,
        experts=_experts(config, has_experts),
    )


def _by_either_name(config: Config, key: str, kind: type[T], default: T) -> T:
    """A value by its name or its older one, which may not differ."""
    found = config.get(key, kind, default)
    older = config.get(_OLDER[key], kind, found)
    if config.has(key) and older != found:
        raise CheckpointError(
            f"{config.path}: {key} is {found} and {_OLDER[key]} is {older}, and are names of one "
            "thing; remove the wrong one."
        )
    return older


def _experts(config: Config, layers: tuple[bool, ...]) -> ExpertsSpec | None:
    """The experts of some layers, with transformers' defaults; None: no layer has some."""
    if not any(layers):
        config.ignore(*_OF_EXPERTS)
        return None
    latent = config.get("moe_latent_size", int, None)
    if latent is not None:
        raise UnsupportedModelError(
            f"{config.path}: moe_latent_size is {latent}, so that experts read a projection of the "
            "stream; supported is null, as in Nemotron 3 Nano."
        )
    shared = config.get("n_shared_experts", int, 1)
    if shared != 1:
        raise UnsupportedModelError(
            f"{config.path}: n_shared_experts is {shared}; supported is 1, which transformers "
            "computes whatever the file says."
        )
    experts = corrected_experts(
        config, count=8, per_token=2, normalized=True, shared=1, size=7688, layers=layers
    )
    size = config.get("moe_shared_expert_intermediate_size", int, 7688)
    if size < 1:
        raise CheckpointError(
            f"{config.path}: moe_shared_expert_intermediate_size is {size}; it must be above 0."
        )
    return replace(experts, shared_size=size)


def _layers(config: Config) -> list[tuple[str, str | None]]:
    """Of each layer what mixes positions, and what of feed-forward or experts is behind it."""
    blocks = _blocks(config)
    if _SPACE not in blocks:
        raise UnsupportedModelError(
            f"{config.path}: the blocks are {blocks}; supported is that some are M (state spaces)."
        )
    layers: list[tuple[str, str | None]] = []
    for block in blocks:
        if block not in (_MLP, _EXPERTS):
            layers.append((block, None))
        elif layers and layers[-1][1] is None:
            layers[-1] = (layers[-1][0], block)
        else:
            raise UnsupportedModelError(
                f"{config.path}: the blocks are {blocks}; supported is that each - (a feed-forward "
                "layer) and each E (experts) is behind an M (a state space) or a * (attention)."
            )
    return layers


def _blocks(config: Config) -> str:
    """The kinds of all blocks, from the pattern or one of the lists, which must agree."""
    found: dict[str, str] = {}
    if (pattern := config.get("hybrid_override_pattern", str, None)) is not None:
        found["hybrid_override_pattern"] = pattern
    for key in ("layers_block_type", "layer_types"):
        kinds: list[Any] | None = config.get(key, list, None)
        if kinds is not None:
            found[key] = "".join(_KINDS.get(str(kind), "?") for kind in kinds)
    count = config.get("num_hidden_layers", int, None)
    blocks = next(iter(found.values()), "")
    if not blocks or set(blocks) - set(_KINDS.values()):
        raise UnsupportedModelError(
            f"{config.path}: the blocks are {found or 'not named'}; supported is a "
            "hybrid_override_pattern of M, *, - and E, or layers_block_type with entries from "
            f"{', '.join(map(repr, _KINDS))}."
        )
    if len(set(found.values())) > 1 or count not in (None, len(blocks)):
        raise CheckpointError(
            f"{config.path} contradicts itself: blocks are {found}, and num_hidden_layers is "
            f"{count}; correct what the model was not trained with."
        )
    return blocks


_TENSORS: Final = TensorNames(
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f.weight",
    layer="backbone.layers.{}.",
    blocks=True,
    input_norm="norm.weight",
    post_norm="norm.weight",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o=("mixer.o_proj",),
    up="mixer.up_proj",
    down=("mixer.down_proj",),
    router="mixer.gate",
    expert_gate_up=("mixer.experts.{}.up_proj",),
    expert_down=("mixer.experts.{}.down_proj",),
    correction="mixer.gate.e_score_correction_bias",
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down=("mixer.shared_experts.down_proj",),
    space_in="mixer.in_proj",
    space_conv="mixer.conv1d.weight",
    space_conv_bias="mixer.conv1d.bias",
    space_a_log="mixer.A_log",
    space_dt_bias="mixer.dt_bias",
    space_skip="mixer.D",
    space_norm="mixer.norm.weight",
    space_o="mixer.out_proj",
    further=("mtp.",),
)
FAMILY: Final = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    spec=read_spec,
    tensors=_TENSORS,
    other_layouts=(
        replace(
            _TENSORS,
            embedding="model.embeddings.weight",
            final_norm="model.norm_f.weight",
            layer="model.layers.{}.",
        ),
    ),
)
