"""Gemma 3n in GGUF files."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.gguf.common import Values, common
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.gemma4 import shared_layers
from onnxport.exporter.gguf.layouts import layout

_WIDTH: Final = "feed_forward_length"
_SPARSITY: Final = "activation_sparsity_scale"
_DIGITS: Final = 7  # that a share has behind what float32 makes of it


def gemma3n(facts: Facts) -> Values:
    """Gemma 3n; of what a table of tokens' inputs lacks the converter has made zeros.

    Raises:
        CheckpointError: A key or tensor is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: A value that is not supported.
    """
    meta = facts.metadata
    names = layout(meta.architecture, joins_qkv=False)
    layers = facts.num_layers()
    values = common(facts, "Gemma3nForCausalLM", size=facts.by_layer(_WIDTH, layers)[0])
    return values | {
        "intermediate_size": facts.by_layer(_WIDTH, layers),
        "hidden_size_per_layer_input": meta.require("embedding_length_per_layer_input", int),
        "vocab_size_per_layer_input": _rows(facts, names.layer_inputs),
        "num_kv_shared_layers": shared_layers(facts, layers),
        "layer_types": [
            "sliding_attention" if one else "full_attention"
            for one in facts.by_layer("attention.sliding_window_pattern", layers)
        ],
        "sliding_window": meta.require("attention.sliding_window", int),
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_theta": meta.get("rope.freq_base_swa", float, 10_000.0)},
        },
        "final_logit_softcapping": meta.get("final_logit_softcapping", float, None),
        "altup_num_inputs": meta.require("altup.num_inputs", int),
        "altup_active_idx": meta.require("altup.active_idx", int),
        "laurel_rank": _rows(facts, f"{names.layer.format(0)}{names.laurel_left}.weight"),
        "activation_sparsity_pattern": _shares(facts, layers),
    }


def _rows(facts: Facts, tensor: str) -> int:
    """Rows of a matrix. Raises CheckpointError where it is not there."""
    shape = facts.shapes.get(tensor, ())
    if len(shape) != 2:
        raise CheckpointError(
            f"{facts.metadata.path} lacks {tensor}, a matrix that the model needs. Download it "
            "again."
        )
    return shape[0]


def _shares(facts: Facts, layers: int) -> list[float]:
    """What share of each gate is cut off, of which a file has the deviations above the mean.

    Raises:
        CheckpointError: A number of deviations is none.
    """
    meta, found = facts.metadata, facts.by_layer(_SPARSITY, layers)
    if any(not isinstance(one, float) or math.isnan(one) or one == math.inf for one in found):
        raise CheckpointError(
            f"{meta.path}: {meta.name(_SPARSITY)} is {found}; it must have a number of deviations "
            "for each layer. Download it again."
        )
    return [round(NormalDist().cdf(one), _DIGITS) for one in found]
