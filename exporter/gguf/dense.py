"""GGUF's architectures of further dense families; see `architectures`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf.common import LAYER_NORM, Values, common
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.metadata import Metadata
from onnxport.exporter.gguf.ropes import ORIGINAL
from onnxport.exporter.plan_experts import XIELU

_SECTIONS: Final = "rope.dimension_sections"  # of positions in images; those of texts are one
_TEMPERATURE: Final = "attention.temperature_scale"
_MAGNITUDE: Final = "rope.scaling.yarn_log_multiplier"


def apertus(facts: Facts) -> Values:
    """Apertus, whose activations' numbers are in the metadata; see `activations`."""
    return common(facts, "ApertusForCausalLM") | {
        "attention_bias": facts.has_qkv_bias(),
        "hidden_act": "xielu",
    }


def activations(metadata: Metadata, layers: int, name: str) -> dict[str, NDArray[np.float32]]:
    """What other checkpoints have as tensors of trained activations.

    Args:
        metadata: The file's.
        layers: How many there are.
        name: What a layer's are called, with "{}" for the layer, ahead of what each is.

    Returns:
        Tensors by name, float32 [1] or []; none where the architecture has no such activations.

    Raises:
        CheckpointError: The metadata have no number for each layer.
    """
    found: dict[str, NDArray[np.float32]] = {}
    for one in XIELU if metadata.architecture == "apertus" else ():
        key = f"xielu.{one}"
        given = metadata.all.get(key)
        values = given if isinstance(given, list) else [given] * layers
        if len(values) != layers or not all(isinstance(value, float) for value in values):
            raise CheckpointError(
                f"{metadata.path}: {key} is {str(given)[:80]}, expected a number for each of "
                f"{layers} layers. Export the original checkpoint."
            )
        shape = (1,) if one.startswith("alpha") else ()
        for layer, value in enumerate(values):
            found[name.format(layer) + one] = np.full(shape, value, np.float32)
    return found


def gpt2(facts: Facts) -> Values:
    """GPT-2, whose scores are scaled as usual, for files say nothing of them."""
    values = _learned(facts, "GPT2LMHeadModel")
    del values["num_key_value_heads"]
    return values


def starcoder(facts: Facts) -> Values:
    """StarCoder and SantaCoder, with one head of keys and values."""
    values = _learned(facts, "GPTBigCodeForCausalLM")
    found = values.pop("num_key_value_heads")
    if found != 1:
        raise UnsupportedModelError(
            f"{facts.metadata.path}: {facts.metadata.name('attention.head_count_kv')} is {found}; "
            "supported is 1, as of all published files. Export the original checkpoint."
        )
    return values


def _learned(facts: Facts, model: str) -> Values:
    values = common(facts, model, norm=LAYER_NORM, epsilon="layer_norm_epsilon")
    del values["rope_parameters"]
    return values


def falcon(facts: Facts) -> Values:
    """Falcon; where attention has a norm of its own, it is 40B's kind.

    Queries of all heads lie together in a file, and so do keys and values.
    """
    facts.metadata.expect("tensor_data_layout", "jploski")
    values = common(facts, "FalconForCausalLM", norm=LAYER_NORM, epsilon="layer_norm_epsilon")
    return values | {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1 + facts.has_second_norm,
        "num_kv_heads": values.pop("num_key_value_heads"),
        "bias": facts.has_qkv_bias(),
    }


def chatglm(facts: Facts) -> Values:
    """GLM 4 of 2024 and GLM-Edge."""
    return _glm(facts, "GlmForCausalLM")


def glm4(facts: Facts) -> Values:
    """GLM 4 of 2025; what guesses further tokens is in layers behind the last one."""
    values = _glm(facts, "Glm4ForCausalLM")
    return values | {"num_hidden_layers": values["num_hidden_layers"] - facts.further_layers()}


def _glm(facts: Facts, model: str) -> Values:
    return common(facts, model, partial=True) | {"attention_bias": facts.has_qkv_bias()}


def mistral3(facts: Facts) -> Values:
    """Ministral 3, and Mistral Small 3.1 without what reads images.

    The first one's queries grow. Of yarn's magnitudes files have one;
    the other is 1.
    """
    meta = facts.metadata
    values = common(facts, "MistralForCausalLM") | {"sliding_window": None}
    growth = meta.get(_TEMPERATURE, float, 0.0)
    rope: dict[str, Any] = values["rope_parameters"]
    all_channels = meta.get(_MAGNITUDE, float, 0.0)
    if all_channels and rope.get("rope_type") == "yarn":
        rope |= {"mscale": 1.0, "mscale_all_dim": all_channels}
    if not growth:
        return values
    own: Mapping[str, Any] = {
        "original_max_position_embeddings": meta.require(ORIGINAL, int),
        "llama_4_scaling_beta": growth,
    }
    return values | {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {**rope, **own},
    }


def qwen2_vl(facts: Facts) -> Values:
    """Qwen2-VL and Qwen2.5-VL, of texts: what reads images is in another file."""
    facts.metadata.require(_SECTIONS, list)
    return common(facts, "Qwen2ForCausalLM")


def qwen3_vl(facts: Facts) -> Values:
    """Qwen3-VL, of texts: what reads images adds to the first layers, of images' tokens alone."""
    facts.metadata.require(_SECTIONS, list)
    facts.metadata.get("n_deepstack_layers", int, 0)
    return common(facts, "Qwen3ForCausalLM") | {"attention_bias": facts.has_qkv_bias()}
