"""GGUF's architectures of mixtures of experts of 2026; see `architectures`."""

from __future__ import annotations

from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.gguf.common import LAYER_NORM, RMS_NORM, SIGMOID, SOFTMAX, Values, common
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.layouts import GATE, ROUTER
from onnxport.exporter.gguf.recent import (
    expert_sizes,
    experts_beside_shared,
    kinds,
    latents,
    scale,
)
from onnxport.exporter.gguf.ropes import ORIGINAL

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_WINDOW: Final = "attention.sliding_window"
_CHUNK: Final = 8192  # of Llama 4's attention
_OF_MAVERICK: Final = 128  # experts
_GROWTH: Final = 0.1  # of Mistral Small 4's queries, which files may not tell


def mistral4(facts: Facts) -> Values:
    """Mistral Small 4, whose queries grow behind its original context.

    Files made of transformers' checkpoints do not say so. Their queries grow all the same, as those
    of the checkpoint do; llama.cpp's do not then.
    """
    meta = facts.metadata
    meta.expect("expert_gating_func", SOFTMAX)
    values = latents(facts, "Mistral4ForCausalLM") | experts_beside_shared(facts)
    values["n_group"] = facts.count("expert_group_count", 1)
    values["topk_group"] = facts.count("expert_group_used_count", 1)
    rope: dict[str, Any] = values["rope_parameters"]
    original = meta.get(ORIGINAL, int, values["max_position_embeddings"])
    meta.expect("attention.temperature_length", original)
    rope["original_max_position_embeddings"] = original
    rope["llama_4_scaling_beta"] = meta.get("attention.temperature_scale", float, _GROWTH)
    return values


def llama4(facts: Facts) -> Values:
    """Llama 4: its chunks, how its queries grow and where nothing rotates are not in the file.

    llama.cpp tells by the number of experts whether heads are normalized: those of Maverick's 128
    are not.
    """
    meta = facts.metadata
    meta.expect("expert_used_count", 1)
    meta.expect("expert_gating_func", SIGMOID)
    meta.expect(_WINDOW, _CHUNK)
    values = common(facts, "Llama4ForCausalLM")
    count = facts.num_experts()
    step = facts.count("interleave_moe_layer_step", 1)
    return values | {
        "attention_bias": facts.has_qkv_bias(),
        "intermediate_size_mlp": values["intermediate_size"],
        "intermediate_size": meta.require("expert_feed_forward_length", int),
        "interleave_moe_layer_step": step,
        "num_local_experts": count,
        "num_experts_per_tok": 1,
        "use_qk_norm": count != _OF_MAVERICK,
        "attention_chunk_size": _CHUNK,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    }


def hy_v3(facts: Facts) -> Values:
    """Hunyuan 3; which layers have experts their tensors tell."""
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    meta.expect("expert_weights_norm", True)
    values = common(facts, "HYV3ForCausalLM")
    further = facts.further_layers()
    layers = values["num_hidden_layers"] - further
    size = meta.require("expert_feed_forward_length", int)
    shared = meta.get("expert_shared_feed_forward_length", int, size)
    if shared % size:
        raise UnsupportedModelError(
            f"{meta.path}: {meta.name('expert_shared_feed_forward_length')} is {shared}; supported "
            f"is a multiple of {meta.name('expert_feed_forward_length')}, {size}."
        )
    meta.expect("expert_shared_count", shared // size)
    return values | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": further or None,
        "attention_bias": facts.has_qkv_bias(),
        "mlp_layer_types": _feed_forward_kinds(facts, layers),
        "num_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "num_shared_experts": shared // size,
        "moe_intermediate_size": size,
        "router_scaling_factor": scale(facts),
    }


def _feed_forward_kinds(facts: Facts, layers: int) -> list[str]:
    routed = (facts.has(f"blk.{layer}.{ROUTER}") for layer in range(layers))
    return ["sparse" if one else "dense" for one in routed]


def cohere2_moe(facts: Facts) -> Values:
    """Cohere 2 with experts: what is shared is averaged with them, as llama.cpp knows.

    Its first layers, which are dense, rotate whatever they see.
    """
    meta = facts.metadata
    epsilon = meta.get(RMS_NORM, float, None)
    names = (LAYER_NORM, "layer_norm_eps") if epsilon is None else (RMS_NORM, "rms_norm_eps")
    if epsilon is not None:
        meta.ignore(LAYER_NORM)  # which others than these norms would have
    values = common(facts, "Cohere2MoeForCausalLM", norm=names[0], epsilon=names[1])
    further = facts.further_layers()
    layers = values["num_hidden_layers"] - further
    sigmoid = meta.get("expert_gating_func", int, SIGMOID) == SIGMOID
    if not sigmoid:
        meta.expect("expert_gating_func", SOFTMAX)
        meta.expect("expert_weights_norm", True)
    if scale(facts) != 1.0:
        meta.expect("expert_weights_scale", 1.0)
    size, shared = expert_sizes(facts)
    return values | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": further or None,
        "attention_bias": facts.has_qkv_bias(),
        "logit_scale": meta.require("logit_scale", float),
        "sliding_window": meta.require(_WINDOW, int),
        "layer_types": kinds(facts, layers),
        "first_k_dense_replace": meta.get("leading_dense_block_count", int, 0),
        "prefix_dense_intermediate_size": values["intermediate_size"],
        "intermediate_size": size,
        "num_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "num_shared_experts": shared,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid" if sigmoid else "softmax",
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
    }


def mellum(facts: Facts) -> Values:
    """Mellum 2, whose experts' weights add up to 1, as llama.cpp knows."""
    meta = facts.metadata
    meta.expect("expert_gating_func", SOFTMAX)
    meta.expect("expert_weights_norm", True)
    values = common(facts, "MellumForCausalLM")
    layers, window = values["num_hidden_layers"], meta.get(_WINDOW, int, 0)
    rope: dict[str, Any] = values["rope_parameters"]
    theta = meta.get("rope.freq_base_swa", float, rope["rope_theta"])
    types = kinds(facts, own_base=True) if window else [_FULL] * layers
    return values | {
        "attention_bias": facts.has_qkv_bias(),
        "sliding_window": window or None,
        "layer_types": types,
        "rope_parameters": {_FULL: rope, _SLIDING: {"rope_theta": theta}},
        "mlp_layer_types": _feed_forward_kinds(facts, layers),
        "num_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "norm_topk_prob": True,
    }


def laguna(facts: Facts) -> Values:
    """Laguna: query heads by layer, and gates that their tensors tell the kind of.

    Where a file does not say it, the first of every four layers sees all.
    """
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    meta.expect("expert_weights_norm", True)
    meta.expect("expert_shared_count", 1)
    layers = facts.num_layers()
    heads = facts.by_layer("attention.head_count", layers)
    values = common(facts, "LagunaForCausalLM", heads=max(heads), partial=True)
    size, window = meta.require("expert_feed_forward_length", int), meta.get(_WINDOW, int, 0)
    rope: dict[str, Any] = values["rope_parameters"]
    types = kinds(facts, own_base=True, sees_first=True) if window else [_FULL] * layers
    routed = _feed_forward_kinds(facts, layers)
    meta.expect("leading_dense_block_count", [*routed, "sparse"].index("sparse"))
    rows = {facts.shapes.get(f"blk.{layer}.{GATE}.weight", (0,))[0] for layer in range(layers)}
    return values | {
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if rows == set(heads) else "per-element",
        "sliding_window": window or None,
        "layer_types": types,
        "rope_parameters": {_FULL: rope, _SLIDING: _rope_of_windows(facts, values)},
        "mlp_layer_types": routed,
        "num_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length", int, size),
        "moe_routed_scaling_factor": scale(facts),
    }


def _rope_of_windows(facts: Facts, values: Values) -> Values:
    """RoPE of layers with a window, which is not scaled, and may be of another base and part."""
    meta, head = facts.metadata, values["head_dim"]
    rotated = meta.get("rope.dimension_count", int, head)
    theta = values["rope_parameters"]["rope_theta"]
    return {
        "rope_theta": meta.get("rope.freq_base_swa", float, theta),
        "partial_rotary_factor": meta.get("rope.dimension_count_swa", int, rotated) / head,
    }


def mimo2(facts: Facts) -> Values:
    """MiMo V2 Flash; layers behind the last one guess further tokens.

    A window is as many tokens as the file says, the query's own among them, as llama.cpp has it.
    """
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    meta.expect("expert_weights_norm", True)
    for key in ("expert_group_count", "expert_group_used_count"):
        meta.expect(key, 1)
    further = facts.further_layers()
    layers = facts.num_layers() - further
    types = kinds(facts, layers, own_base=True)
    found = dict(zip(types, facts.by_layer("attention.head_count_kv", layers), strict=True))
    first = _FULL if _FULL in found else _SLIDING
    values = common(
        facts, "MiMoV2FlashForCausalLM", kv_heads=found[first], own_values=True, partial=True
    )
    rope: dict[str, Any] = values["rope_parameters"]
    theta = meta.get("rope.freq_base_swa", float, rope["rope_theta"])
    return values | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": further or None,
        "swa_num_key_value_heads": found.get(_SLIDING),
        "attention_value_scale": meta.get("attention.value_scale", float, None),
        "sliding_window": meta.require(_WINDOW, int),
        "layer_types": types,
        "rope_parameters": {_FULL: rope, _SLIDING: rope | {"rope_theta": theta}},
        "mlp_layer_types": _feed_forward_kinds(facts, layers),
        "n_routed_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "routed_scaling_factor": scale(facts),
    }
