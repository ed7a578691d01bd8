"""EAGLE-3 draft heads, as their authors publish them and as the library speculators does.

The first have the keys of a Llama, and of their own `draft_vocab_size` and `eagle_config`; the
others describe the layers in `transformer_layer_config`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.windows import layer_windows
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.spec import ArchSpec

logger = logging.getLogger(__name__)

FAMILY: Final = "eagle3"
ARCHITECTURES: Final = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
# Tensors that say which tokens have a logit.
OFFSETS: Final = "d2t"  # int64 [logits]: token minus logit
HAVE_LOGITS: Final = "t2d"  # bool [vocab]
# Keys of the library that tell who made the head, and for what model; or of training.
_BOOKKEEPING: Final = (
    "speculators_config",
    "speculators_version",
    "has_no_defaults_at_init",
    "embed_requires_grad",
)


def is_head(config: Config) -> bool:
    """Whether a checkpoint is a draft head, of this or another kind."""
    # The first heads name the class of their models, and have a key that no model has.
    told = config.has("speculators_model_type") or config.has("draft_vocab_size")
    return told or any(name in ARCHITECTURES for name in config.architectures)


def read_spec(config: Config, target: ArchSpec, context_length: int | None) -> ArchSpec:
    """Describe the head of a model.

    Args:
        config: The head's configuration.
        target: The model.
        context_length: The longest sequence in tokens; None: max_position_embeddings.

    Raises:
        CheckpointError: A key is missing, of a wrong type, or contradicts another or the model.
        UnsupportedModelError: A value that is not supported.
    """
    kind = config.get("speculators_model_type", str, FAMILY)
    if kind != FAMILY:
        raise UnsupportedModelError(
            f"{config.path}: speculators_model_type is {kind!r}; of draft heads those of "
            f"{FAMILY!r} are supported."
        )
    inner = config
    if config.has("transformer_layer_config"):
        values = config.require("transformer_layer_config", dict)
        inner = Config(values, config.path)
        if not config.has("norm_before_residual"):
            raise CheckpointError(
                f"{config.path} lacks the key 'norm_before_residual', whose default differs "
                "between the programs that run such heads. Add what the head was trained with."
            )
    spec = _layers(inner, context_length)
    if spec.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{config.path} says that its model has {spec.vocab_size} tokens, and the target has "
            f"{target.vocab_size}. Give the checkpoint that the head was trained for."
        )
    spec = replace(spec, draft=_draft(config, spec, target), tie_word_embeddings=False)
    config.ignore(*_BOOKKEEPING)
    config.check_all_used(FAMILY)
    if inner is not config:
        inner.check_all_used(FAMILY)
    return spec


def _layers(config: Config, context_length: int | None) -> ArchSpec:
    """The head's layers, as of a Llama or a Qwen3."""
    model_type = config.get("model_type", str, "llama")
    if model_type not in ("llama", "qwen3"):
        raise UnsupportedModelError(
            f"{config.path}: the layers of the head are those of {model_type!r}; supported are "
            "'llama' and 'qwen3'."
        )
    differences: dict[str, Any] = {}
    if model_type == "qwen3":
        differences = {"qk_norm": True, "head_size": 128, "num_kv_heads": 32}
        differences["sliding_window"] = layer_windows(config)
    elif config.get("use_sliding_window", bool, False):
        raise UnsupportedModelError(
            f"{config.path}: use_sliding_window is true, which the layers of a Llama do not know."
        )
    else:
        config.ignore("max_window_layers", "sliding_window")
    return decoder_spec(config, family=FAMILY, context_length=context_length, **differences)


def _draft(config: Config, spec: ArchSpec, target: ArchSpec) -> DraftSpec:
    """What only a head has."""
    nested = Config(config.get("eagle_config", dict, {}), config.path)
    if not nested.get("use_aux_hidden_state", bool, True):
        raise UnsupportedModelError(
            f"{config.path}: use_aux_hidden_state is false, which makes it a head of EAGLE's first "
            "kinds; supported are those of EAGLE-3."
        )
    count = target.num_layers
    layers = _layer_ids(config, nested, [2, count // 2, count - 3])
    nested_norm = nested.get("norm_before_fc", bool, False)
    nested.check_all_used(FAMILY)
    told = config.get("num_aux_hidden_states", int, len(layers))
    size = config.get("target_hidden_size", int, spec.hidden_size)
    for what, found, expected in (
        ("num_aux_hidden_states", told, len(layers)),
        ("target_hidden_size", size, target.hidden_size),
    ):
        if found != expected:
            raise CheckpointError(
                f"{config.path}: {what} is {found}, where the target and {LAYERS} make it "
                f"{expected}. Give the checkpoint that the head was trained for."
            )
    try:
        return DraftSpec(
            vocab_size=config.get("draft_vocab_size", int, spec.vocab_size),
            target_hidden_size=target.hidden_size,
            target_num_layers=count,
            target_layers=tuple(layers),
            norm_before_residual=config.get("norm_before_residual", bool, False),
            joint_norm=config.get("norm_before_fc", bool, nested_norm),
            apart_norm=config.get("fc_norm", bool, False),
            norm_output=config.get("norm_output", bool, False),
        )
    except ValueError as error:
        raise CheckpointError(
            f"{config.path} contradicts itself or the target: {error}. Where {LAYERS} is not "
            "given, layer 2, that of half their number and the third last are meant, from 0."
        ) from error


def _layer_ids(config: Config, nested: Config, default: list[int]) -> list[int]:
    """The layers of the model that the head reads, ascending."""
    outer, inner = config.get(LAYERS, list, None), nested.get(LAYERS, list, None)
    if None not in (outer, inner) and outer != inner:
        raise CheckpointError(f"{config.path} has two lists of {LAYERS}: {outer} and {inner}.")
    layers = next((one for one in (outer, inner) if one is not None), None)
    if layers is None:
        return default
    whole = all(type(layer) is int for layer in layers)
    if not whole or not layers or layers != sorted(layers):
        raise CheckpointError(
            f"{config.path}: {LAYERS} is {layers}; these must be whole numbers that ascend, for "
            "some programs sort them, and the head's first product depends on their order."
        )
    if layers[:1] == [1]:
        logger.warning(
            "%s: %s is %s, taken as the layers whose inputs the head reads. Some trainers, such as "
            "SpecForge, name the layers whose outputs it reads, by lists that mostly begin with 1 "
            "too. If few of its guesses come true, add one to each number and export it again.",
            config.path,
            LAYERS,
            layers,
        )
    return layers


def tensor_names(found: frozenset[str]) -> TensorNames:
    """The names of a head's tensors in a checkpoint that holds `found`."""
    stem = "model." if "model.fc.weight" in found else ""
    first = f"{stem}midlayer."
    layer = first if any(name.startswith(first) for name in found) else f"{stem}layers.{{}}."
    return TensorNames(
        embedding=f"{stem}embed_tokens.weight",
        final_norm=f"{stem}norm.weight",
        layer=layer,
        features=f"{stem}fc",
        joint_norm=f"{stem}input_norm.weight",
        apart_norm=f"{stem}fc_norm.{{}}.weight",
        ignored=(".rotary_emb.inv_freq", OFFSETS, HAVE_LOGITS),
    )
