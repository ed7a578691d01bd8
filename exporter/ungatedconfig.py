"""Decoders whose feed-forward layers have no gate, and the names of activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.graphs.spec import ArchSpec

# Transformers' names, of which some are the same function.
_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
_TRAINED: Final = {"xielu": "xielu"}


def ungated_spec(
    config: Config, *, default: str, trained: bool = False, **differences: Any
) -> ArchSpec:
    """Read what `decoder_spec` reads of a decoder whose feed-forward layers have no gate.

    Args:
        config: The model's configuration.
        default: `hidden_act` where absent.
        trained: The activation may have numbers that are trained.
        differences: Keyword arguments of `decoder_spec`.

    Raises:
        CheckpointError: See `decoder_spec`.
        UnsupportedModelError: Likewise, or another activation.
    """
    known = _ACTIVATIONS | (_TRAINED if trained else {})
    found = config.get("hidden_act", str, default)
    if found not in known:
        raise UnsupportedModelError(
            f"{config.path}: hidden_act is {found!r}; supported are {', '.join(sorted(known))}."
        )
    spec = decoder_spec(config, hidden_act="silu", **differences)
    return replace(spec, ungated=True, hidden_act=known[found])
