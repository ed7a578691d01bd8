"""EXAONE 4, dense or with experts: norms behind layers; those that see all rotate nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import corrected_experts, with_experts
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_FURTHER_LAYERS: Final = ("num_nextn_predict_layers",)
_KINDS: Final = {"dense": False, "sparse": True}  # of feed-forward layers


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """EXAONE 4: no norms before layers, but on what they add."""
    spec = _hybrid(config, family="exaone4", context_length=context_length)
    return replace(spec, raw_inputs=True, output_norms=True)


def read_spec_with_experts(config: Config, context_length: int | None) -> ArchSpec:
    """K-EXAONE: norms before layers, and experts that sigmoids choose."""
    spec = _hybrid(config, family="exaone_moe", context_length=context_length)
    config.ignore(*_FURTHER_LAYERS)
    experts = corrected_experts(
        config,
        count=64,
        per_token=8,
        size=1024,
        normalized=True,
        shared=1,
        first_dense=1,
        layers=_sparse_layers(config, spec.num_layers),
        scale=2.5,
        count_keys=("num_experts",),
        shared_key="num_shared_experts",
    )
    return with_experts(spec, experts)


def _hybrid(config: Config, **differences: Any) -> ArchSpec:
    """The attention that both share; `differences` are keyword arguments of `decoder_spec`.

    Where a window is named, layers that have none rotate nothing, even if no layer has one.
    """
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    windows = windows_by_type(config, window, _kinds(config, window))
    spec = decoder_spec(
        config, num_kv_heads=32, qk_norm=True, sliding_window=windows, **differences
    )
    rotated = tuple(window is None or one is not None for one in windows)
    return spec if all(rotated) else replace(spec, rotated_layers=rotated)


def _kinds(config: Config, window: int | None) -> list[str]:
    """The layers' types where `layer_types` does not say: every so many sees all."""
    num_layers = config.require("num_hidden_layers", int)
    pattern = config.get("sliding_window_pattern", object, 4)
    if window is None or config.has("layer_types"):
        return [_FULL] * num_layers
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise UnsupportedModelError(
            f"{config.path}: sliding_window_pattern is {pattern!r}, and layer_types is left out; "
            "supported is a number above 0, or layer_types, which say it layer by layer."
        )
    return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]


def _sparse_layers(config: Config, num_layers: int) -> tuple[bool, ...] | None:
    """Which layers have experts, as `mlp_layer_types` says; None: the key is not there."""
    kinds = config.get("mlp_layer_types", list, None)
    if kinds is None:
        return None
    config.ignore("first_k_dense_replace")
    if len(kinds) != num_layers or not all(kind in _KINDS for kind in kinds):
        raise UnsupportedModelError(
            f"{config.path}: mlp_layer_types is {kinds}; supported is one of "
            f"{' and '.join(_KINDS)} for each of {num_layers} layers."
        )
    return tuple(_KINDS[kind] for kind in kinds)


FAMILY: Final = Family(name="exaone4", architecture="Exaone4ForCausalLM", spec=read_spec)
WITH_EXPERTS: Final = Family(
    name="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    spec=read_spec_with_experts,
    tensors=TensorNames(correction="mlp.e_score_correction_bias", further=("mtp.",)),
    further_layers=_FURTHER_LAYERS,
)
