"""Cohere 2 with experts, such as North Mini Code: Command R7B's layers, but for what is dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import (
    FURTHER_LAYERS,
    check_choice,
    experts_spec,
    layers_by_kind,
    with_experts,
)
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.cohere import parallel_spec
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_DENSE_PATTERN: Final = "prefix_dense_sliding_window_pattern"
_PATTERNS: Final = {_DENSE_PATTERN: 1, "sliding_window_pattern": 4}  # where they are absent
_SHARES: Final = {"average": 0.5, "sum": 1.0}
_SCORES: Final = ("softmax", "sigmoid")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Layers with a window rotate, and dense ones that see all may, too; heads have 128 channels.

    Norms are LayerNorms unless `rms_norm_eps` is there.
    """
    config.ignore(*FURTHER_LAYERS)
    check_choice(config, {"use_qk_norm": (False,)})
    num_layers = config.require("num_hidden_layers", int)
    size = config.get("intermediate_size", int, 22528)
    layers = layers_by_kind(config, num_layers, dense=0, reads_first=True)
    windows = windows_by_type(
        config,
        config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096),
        _kinds(config, num_layers),
    )
    has_layer_norms = not config.has("rms_norm_eps")
    if not has_layer_norms:
        config.ignore("layer_norm_eps")
    spec = parallel_spec(
        config.replaced(intermediate_size=config.get("prefix_dense_intermediate_size", int, size)),
        family="cohere2_moe",
        head_size=128,
        context_length=context_length,
        sliding_window=windows,
        epsilon="layer_norm_eps" if has_layer_norms else "rms_norm_eps",
    )
    spec = replace(spec, layer_norms=True if has_layer_norms else None)
    forced = config.get(_DENSE_PATTERN, int, 1) == 1
    rotated = tuple(
        window is not None or (forced and not sparse)
        for window, sparse in zip(windows, layers, strict=True)
    )
    if not all(rotated):
        spec = replace(spec, rotated_layers=rotated)
    return with_experts(spec, _experts(config, size, layers))


def _kinds(config: Config, num_layers: int) -> list[str]:
    """The layers' types where `layer_types` does not say; those of the first ones by themselves."""
    first = min(config.get("first_k_dense_replace", int, 0), num_layers)
    patterns = {key: _pattern(config, key, absent) for key, absent in _PATTERNS.items()}
    ahead, behind = patterns.values()
    return [
        *(_SLIDING if (layer + 1) % ahead else _FULL for layer in range(first)),
        *(_SLIDING if (layer + 1) % behind else _FULL for layer in range(num_layers - first)),
    ]


def _pattern(config: Config, key: str, absent: int) -> int:
    found = config.get(key, int, absent)
    if found < 1:
        raise CheckpointError(f"{config.path}: {key} is {found}; it must be above 0.")
    return found


def _experts(config: Config, size: int, layers: tuple[bool, ...]) -> ExpertsSpec:
    """The softmax is of those that were chosen; what is shared and the others may be averaged."""
    check_choice(config, {"expert_selection_fn": _SCORES})
    sigmoid = config.get("expert_selection_fn", str, _SCORES[0]) == "sigmoid"
    normalized = config.get("norm_topk_prob", bool, True)
    shared = config.get("num_shared_experts", int, 0)
    key = "shared_expert_combination_strategy"
    check_choice(config, {key: tuple(_SHARES)})
    share = _SHARES[config.get(key, str, "average")] if shared else 1.0
    return experts_spec(
        config,
        count=8,
        per_token=2,
        layers=layers,
        size=size,
        normalized=normalized or not sigmoid,
        sigmoid=sigmoid or None,
        scale=None if share == 1.0 else share,
        shared_size=size * shared or None,
        shared_scale=None if share == 1.0 else share,
    )


FAMILY: Final = Family(
    name="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    spec=read_spec,
    further_layers=FURTHER_LAYERS,
)
