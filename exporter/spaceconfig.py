"""State spaces from `config.json`, in the spelling that Bamba and Granite share."""

from __future__ import annotations

import math
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.graphs.linear_spec import StateSpaceSpec

UNBOUNDED: Final = [0.0, math.inf]  # the limits of steps, which are a softplus, that do nothing
# What files name the kinds of layers, and whether these are state spaces.
LAYER_KINDS: Final = {
    "mamba": True,
    "linear_attention": True,
    "attention": False,
    "full_attention": False,
}


def are_spaces(kinds: list[Any]) -> tuple[bool, ...] | None:
    """Which layers are state spaces, by the names of their kinds; None: one is not known."""
    if not all(str(kind) in LAYER_KINDS for kind in kinds):
        return None
    return tuple(LAYER_KINDS[kind] for kind in kinds)


def mamba_spec(
    config: Config, layers: tuple[bool, ...], width: int | None = None, **others: Any
) -> StateSpaceSpec | None:
    """Read the keys `mamba_…` of the layers that are such; None: no layer is.

    Args:
        config: The model's configuration.
        layers: Which layers are such.
        width: Of all heads; None: `mamba_expand` times that of a token.
        others: Fields of the spec that these keys do not say.

    Raises:
        CheckpointError: A key is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: A value that is not supported.
    """
    hidden = config.require("hidden_size", int)
    heads = config.get("mamba_n_heads", int, 128)
    what = "mamba_d_ssm"
    expanded = config.get("mamba_expand", int, 2) * hidden
    if width is None:
        width, what = expanded, "mamba_expand * hidden_size"
    head_size = config.get("mamba_d_head", object, "auto")
    if head_size == "auto":
        head_size = width // max(heads, 1)
    sizes = {
        "heads": heads,
        "head_size": head_size,
        "groups": config.get("mamba_n_groups", int, 1),
        "state_size": config.get("mamba_d_state", int, 256),
        "kernel": config.get("mamba_d_conv", int, 4),
        "conv_bias": config.get("mamba_conv_bias", bool, True),
    }
    config.ignore("mamba_chunk_size")  # how long sequences are cut for a scan
    check_plain(config, "mamba_proj_bias")
    if not any(layers):
        return None
    if type(head_size) is not int or head_size * heads != width:
        raise CheckpointError(
            f"{config.path} contradicts itself: {heads} heads (mamba_n_heads) of {head_size!r} "
            f"(mamba_d_head) are not {what} = {width}."
        )
    return space_spec(config, layers, sizes | others)


def space_spec(config: Config, layers: tuple[bool, ...], fields: dict[str, Any]) -> StateSpaceSpec:
    """The layers of state spaces, of which not all may be such.

    Raises:
        CheckpointError: `fields` contradict each other.
        UnsupportedModelError: No layer has attention.
    """
    if all(layers) and not fields.get("beside_attention"):
        raise UnsupportedModelError(
            f"{config.path}: none of the {len(layers)} layers has attention; supported is that "
            "some have, and the others are state spaces."
        )
    try:
        return StateSpaceSpec(layers=layers, **fields)
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def check_plain(config: Config, bias_key: str) -> None:
    """Refuse biases of products, and limits of steps.

    transformers applies limits where it reads a prompt, and none where it adds a token to it.

    Raises:
        UnsupportedModelError: There are some.
    """
    if config.get(bias_key, bool, False):
        raise UnsupportedModelError(
            f"{config.path}: {bias_key} is true; supported is false, which published models have."
        )
    check_limits(config, "time_step_limit")


def check_limits(config: Config, key: str) -> None:
    """Refuse limits of steps, likewise."""
    limits = config.get(key, list, UNBOUNDED)
    if [_number(one) for one in limits] != UNBOUNDED:
        raise UnsupportedModelError(
            f"{config.path}: {key} is {limits}; supported is {UNBOUNDED}, which limits "
            "nothing and is what published models have."
        )


def _number(value: Any) -> Any:
    """A number as transformers writes it, which is an object where JSON has none for it."""
    return math.inf if value == {"__float__": "Infinity"} else value
