"""Gemma 4 in GGUF files: layers of two kinds, which differ in heads, RoPE and window."""

from __future__ import annotations

from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf.common import RMS_NORM, Values
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.layouts import ROPE_FACTORS

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_FEED_FORWARD: Final = "feed_forward_length"
_STILL: Final = 1e30  # what the frequency of a pair that does not rotate is divided by


def gemma4(facts: Facts) -> Values:
    """Gemma 4, dense, told of tokens in each layer, or with experts.

    A layer that sees all whose keys are its values has no tensor of these.

    Raises:
        CheckpointError: A key is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: A value that is not supported.
    """
    meta = facts.metadata
    layers = facts.num_layers()
    slides = facts.by_layer("attention.sliding_window_pattern", layers)
    shared = shared_layers(facts, layers)
    own = [layer for layer in range(layers - shared) if not slides[layer]]
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size": facts.vocab_size(),
        "vocab_size_per_layer_input": facts.vocab_size(),
        "hidden_size": facts.count("embedding_length"),
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", int, 0),
        "num_hidden_layers": layers,
        "num_kv_shared_layers": shared,
        "layer_types": [_SLIDING if one else _FULL for one in slides],
        "sliding_window": meta.require("attention.sliding_window", int),
        "max_position_embeddings": facts.count("context_length"),
        "rms_norm_eps": meta.require(RMS_NORM, float),
        "tie_word_embeddings": not facts.has("output.weight"),
        "final_logit_softcapping": meta.get("final_logit_softcapping", float, None),
        "attention_k_eq_v": any(not facts.has(f"blk.{one}.attn_v.weight") for one in own),
        "rope_parameters": _ropes(facts),
        **_heads(facts, slides),
        **_widths(facts, layers, shared),
        **_experts(facts),
    }


def shared_layers(facts: Facts, layers: int) -> int:
    """The last layers, which have keys and values of others.

    Raises:
        CheckpointError: There are as many as layers, or fewer than none.
    """
    meta, key = facts.metadata, "attention.shared_kv_layers"
    told = meta.get(key, int, 0)
    if not 0 <= told < layers:
        raise CheckpointError(
            f"{meta.path}: {meta.name(key)} is {told}, of {layers} layers. Download it again."
        )
    return told


def _heads(facts: Facts, slides: list[bool]) -> Values:
    """Heads of layers with a window, and of those without."""
    meta = facts.metadata
    sizes = {}
    for kind, ending in ((_FULL, ""), (_SLIDING, "_swa")):
        sizes[kind] = size = facts.count(f"attention.key_length{ending}")
        for key in (f"attention.value_length{ending}", f"rope.dimension_count{ending}"):
            meta.expect(key, size)
    kv_heads = facts.by_layer("attention.head_count_kv", len(slides))
    by_kind = [
        sorted({heads for heads, one in zip(kv_heads, slides, strict=True) if bool(one) is kind})
        for kind in (True, False)
    ]
    if any(len(counts) > 1 for counts in by_kind):
        raise UnsupportedModelError(
            f"{meta.path}: {meta.name('attention.head_count_kv')} is {kv_heads}; supported is one "
            "number for layers with a window, and one for the others. Export the original "
            "checkpoint."
        )
    sliding, full = (counts[0] if counts else kv_heads[0] for counts in by_kind)
    return {
        "num_attention_heads": facts.count("attention.head_count"),
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": full,
        "head_dim": sizes[_SLIDING],
        "global_head_dim": sizes[_FULL],
    }


def _widths(facts: Facts, layers: int, shared: int) -> Values:
    """Features of feed-forward layers, of which the last ones may have twice as many."""
    meta = facts.metadata
    found = facts.by_layer(_FEED_FORWARD, layers)
    size, is_wide = found[0], found[-1] != found[0]
    if is_wide and found != [size] * (layers - shared) + [2 * size] * shared:
        raise UnsupportedModelError(
            f"{meta.path}: {meta.name(_FEED_FORWARD)} is {found}; supported is one number, or "
            f"twice as many features in the last {shared} layers. Export the original checkpoint."
        )
    return {"intermediate_size": size, "use_double_wide_mlp": is_wide}


def _ropes(facts: Facts) -> Values:
    """RoPE of both kinds; factors of frequencies tell which pairs of larger heads rotate.

    Raises:
        CheckpointError: The factors are missing.
        UnsupportedModelError: They scale frequencies.
    """
    meta = facts.metadata
    factors = facts.numbers(ROPE_FACTORS)
    if not factors:
        raise CheckpointError(
            f"{meta.path} lacks {ROPE_FACTORS}, which the model needs. Download it again."
        )
    turned = sum(one == 1 for one in factors)
    if (
        not turned
        or factors[:turned] != [1] * turned
        or min(factors[turned:], default=_STILL) < _STILL * 0.99
    ):
        raise UnsupportedModelError(
            f"{meta.path}: {ROPE_FACTORS} holds {factors[:8]} …; supported are ones, and then "
            f"numbers of {_STILL} for pairs that do not rotate. Export the original checkpoint."
        )
    return {
        _FULL: {
            "rope_type": "proportional",
            "rope_theta": meta.get("rope.freq_base", float, 10_000.0),
            "partial_rotary_factor": turned / len(factors),
        },
        _SLIDING: {
            "rope_type": "default",
            "rope_theta": meta.get("rope.freq_base_swa", float, 10_000.0),
        },
    }


def _experts(facts: Facts) -> Values:
    """Experts beside each feed-forward layer, if there are some."""
    meta = facts.metadata
    if not meta.get("expert_count", int, 0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": facts.num_experts(),
        "top_k_experts": meta.require("expert_used_count", int),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
    }
