"""Falcon-H1: attention and a state space side by side in every layer, and many multipliers.

That of the embedding is the size of the stream, and that of logits is in the final norm, as
Granite's are; all others are in the weights of products, see `MultipliersSpec`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.granite import checked_multiplier, multiplier
from onnxport.exporter.spaceconfig import check_plain, mamba_spec
from onnxport.graphs.linear_spec import StateSpaceSpec
from onnxport.graphs.multipliers_spec import MultipliersSpec
from onnxport.graphs.spec import ArchSpec

_KIND: Final = "hybrid"  # of every layer, where a file names kinds
# In training, or by when a device computes what. Steps have no limits but `time_step_limit`.
_UNUSED: Final = (
    *("mlp_expansion_factor", "num_logits_to_keep"),
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
)


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Falcon-H1: products have no biases, which published models lack."""
    _check(config)
    spec = decoder_spec(config, family="falcon_h1", num_kv_heads=8, context_length=context_length)
    embedding = multiplier(config, "embedding_multiplier")
    try:
        return replace(
            spec,
            rms_norm_eps=spec.rms_norm_eps / embedding**2,
            inner_norm_eps=spec.rms_norm_eps,
            residual_scale=1 / embedding,
            stream_scale=embedding,
            logits_scale=multiplier(config, "lm_head_multiplier"),
            linear=_spaces(config, spec.num_layers),
            multipliers=_multipliers(config),
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _check(config: Config) -> None:
    """Refuse what is not supported of all that a configuration may say."""
    config.ignore(*_UNUSED)
    check_plain(config, "projectors_bias")
    if not config.get("mamba_use_mlp", bool, True):
        raise UnsupportedModelError(
            f"{config.path}: mamba_use_mlp is false; supported is true, as transformers computes."
        )
    for key in ("layers_block_type", "layer_types"):
        kinds = config.get(key, list, [])
        if any(kind != _KIND for kind in kinds):
            raise UnsupportedModelError(
                f"{config.path}: {key} is {kinds}; supported is that each layer is {_KIND!r}."
            )


def _spaces(config: Config, num_layers: int) -> StateSpaceSpec | None:
    """The state space of every layer, whose width is `mamba_d_ssm` unless that is null."""
    has_norm = config.get("mamba_rms_norm", bool, False)
    key = "mamba_norm_before_gate"
    if config.get(key, bool, not config.is_null(key)) and has_norm:
        raise UnsupportedModelError(
            f"{config.path}: mamba_rms_norm and mamba_norm_before_gate are true (which the latter "
            "is where absent); supported is that what is gated is normalized, which is false in "
            "the second."
        )
    width = config.get("mamba_d_ssm", int, None if config.is_null("mamba_d_ssm") else 1024)
    return mamba_spec(
        config,
        (True,) * num_layers,
        width,
        beside_attention=True,
        without_norm=None if has_norm else True,
    )


def _multipliers(config: Config) -> MultipliersSpec | None:
    """What outputs of products are times, those of their inputs among them.

    None of a GGUF file, whose weights are times these, which are lost.
    """
    if config.get("multipliers_in_weights", bool, False):
        return None
    attention = multiplier(config, "attention_in_multiplier")
    space = multiplier(config, "ssm_in_multiplier")
    gate, down = _several(config, "mlp_multipliers", 2)
    z, values, given, taken, steps = (space * one for one in _several(config, "ssm_multipliers", 5))
    return MultipliersSpec(
        queries=attention,
        keys=attention * multiplier(config, "key_multiplier"),
        values=attention,
        attention=multiplier(config, "attention_out_multiplier"),
        gate=gate,
        down=down,
        space_gate=z,
        space_values=values,
        space_given=given,
        space_taken=taken,
        space_steps=steps,
        space=multiplier(config, "ssm_out_multiplier"),
    )


def _several(config: Config, key: str, count: int) -> list[float]:
    """A list of so many multipliers, each 1 where there is none.

    Raises CheckpointError for another number of them, or for one that is not above 0.
    """
    found = config.get(key, list, [1.0] * count)
    if len(found) != count or not all(type(one) in (int, float) for one in found):
        raise CheckpointError(f"{config.path}: {key} is {found}; it must have {count} numbers.")
    return [checked_multiplier(config, key, float(one)) for one in found]


FAMILY: Final = Family(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        final_norm="model.final_layernorm.weight",
        post_norm="pre_ff_layernorm.weight",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down=("feed_forward.down_proj",),
        ignored=(".rotary_emb.inv_freq", ".mamba.mup_vector"),
    ),
)
