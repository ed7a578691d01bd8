"""Gemma 2: every other layer has a window, and attention's scores and the logits are capped."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.gemma import GELU, TENSORS, gemma_spec
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Gemma 2: the first layer has a window; caps of 50 and 30 where absent, none if null."""
    spec = gemma_spec(
        config, family="gemma2", sliding_window=_windows(config), context_length=context_length
    )
    _check_copies(config)
    return replace(
        spec,
        attention_softcap=_cap(config, "attn_logit_softcapping", 50.0),
        logits_softcap=_cap(config, "final_logit_softcapping", 30.0),
    )


def _check_copies(config: Config) -> None:
    """Refuse old names of keys, which transformers does not read, where they say another thing."""
    for key, value in (
        ("hidden_act", config.get("hidden_activation", str, GELU)),
        ("sliding_window_size", config.get("sliding_window", int, 4096)),
    ):
        if (found := config.get(key, type(value), value)) != value:
            raise UnsupportedModelError(
                f"{config.path}: {key} is {found!r}, and the key that is read instead says "
                f"{value!r}; remove {key}, or correct it."
            )


def _cap(config: Config, key: str, default: float) -> float | None:
    found = config.get(key, float, None if config.is_null(key) else default)
    if found is not None and not 0 < found < math.inf:
        raise CheckpointError(f"{config.path}: {key} is {found}; it must be above 0, or null.")
    return found


def _windows(config: Config) -> tuple[int | None, ...]:
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    return windows_by_type(config, window, types)


FAMILY: Final = Family(
    name="gemma2", architecture="Gemma2ForCausalLM", spec=read_spec, tensors=TENSORS
)
