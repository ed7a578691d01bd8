"""Cohere's Command R, R+ and R7B: attention and MLP side by side, behind one LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, check_heads, decoder_spec
from onnxport.exporter.expertsconfig import check_choice
from onnxport.exporter.families.base import Family
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_NORMS: Final = "use_qk_norm"
# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "use_parallel_embedding": (True, False),  # how a vocabulary is shared by devices
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """Command R and R+: every layer sees all, and rotates; R+ has norms of queries and keys."""
    config.ignore("model_max_length")  # of the tokenizer; positions end before
    spec = parallel_spec(
        config,
        family="cohere",
        qk_norm=config.get(_NORMS, bool, False),
        context_length=context_length,
        theta=500_000.0,
    )
    return check_heads(config, spec)


def read_spec_with_windows(config: Config, context_length: int | None) -> ArchSpec:
    """Command R7B and A: layers with a window rotate, and every fourth sees all and does not."""
    check_choice(config, {_NORMS: (False,)})
    windows = windows_by_type(
        config,
        config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096),
        _kinds(config),
    )
    spec = parallel_spec(
        config, family="cohere2", context_length=context_length, sliding_window=windows
    )
    rotated = tuple(window is not None for window in windows)
    spec = check_heads(config, spec)
    return spec if all(rotated) else replace(spec, rotated_layers=rotated)


def parallel_spec(config: Config, **differences: Any) -> ArchSpec:
    """What all share; `differences` are keyword arguments of `decoder_spec`."""
    check_choice(config, _KNOWN)
    biased = config.get("attention_bias", bool, False)
    epsilon = differences.pop("epsilon", "layer_norm_eps")
    spec = decoder_spec(
        config, qkv_bias=biased, o_bias=biased, tied=True, epsilon=epsilon, **differences
    )
    scale = config.get("logit_scale", float, 0.0625)
    if not 0 < scale < math.inf:
        raise CheckpointError(f"{config.path}: logit_scale is {scale}; it must be above 0.")
    return replace(
        spec,
        layer_norms=True,
        apart_qk_norm=spec.qk_norm or None,
        parallel_layers=True,
        logits_scale=scale,
        rope=replace(spec.rope, interleaved=True),
    )


def _kinds(config: Config) -> list[str]:
    """The layers' types where `layer_types` does not say: every so many sees all."""
    num_layers = config.require("num_hidden_layers", int)
    pattern = config.get("sliding_window_pattern", int, 4)
    if pattern < 1 or config.get("layer_switch", int, pattern) != pattern:
        raise CheckpointError(
            f"{config.path}: sliding_window_pattern is {pattern}; it must be above 0, and "
            "layer_switch, if it is there, is the same number."
        )
    return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]


FAMILY: Final = Family(name="cohere", architecture="CohereForCausalLM", spec=read_spec)
WITH_WINDOWS: Final = Family(
    name="cohere2", architecture="Cohere2ForCausalLM", spec=read_spec_with_windows
)
