"""GGUF's architectures with layers that keep a state in place of keys and values."""

from __future__ import annotations

from typing import Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf.common import (
    LAYER_NORM,
    RMS_NORM,
    SIGMOID,
    Values,
    biases,
    common,
    experts,
    multiplied,
)
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.layouts import CORRECTION, SPACE_NORM
from onnxport.exporter.gguf.recent import experts_beside_shared, latents_in_some

_EVERY: Final = 4  # layers, of which the last one has attention, where a file does not say it
_FULL: Final = "full_attention"
_FEED_FORWARD: Final = "feed_forward_length"
_KV_HEADS: Final = "attention.head_count_kv"
_RECURRENT: Final = "attention.recurrent_layers"
# Multipliers of Granite, of which Bamba has none.
_MULTIPLIERS: Final = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")


def lfm2(facts: Facts) -> Values:
    """LFM2: layers without heads of keys are convolutions."""
    values = _short_convolutions(facts, "Lfm2ForCausalLM")
    return values | {"block_auto_adjust_ff_dim": False}


def lfm2_moe(facts: Facts) -> Values:
    """LFM2-MoE: experts' weights add up to 1, which llama.cpp knows."""
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    meta.expect("expert_weights_norm", True)
    values = _short_convolutions(facts, "Lfm2MoeForCausalLM")
    return values | {
        "num_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "num_dense_layers": meta.get("leading_dense_block_count", int, 0),
        "use_expert_bias": any(name.endswith(CORRECTION) for name in facts.shapes),
    }


def _short_convolutions(facts: Facts, model: str) -> Values:
    meta = facts.metadata
    layers = facts.num_layers()
    kv_heads = facts.where_any(_KV_HEADS, layers)
    values = common(facts, model, kv_heads=kv_heads, epsilon="norm_eps")
    return values | {
        "layer_types": [_FULL if one else "conv" for one in facts.by_layer(_KV_HEADS, layers)],
        "conv_L_cache": meta.require("shortconv.l_cache", int),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in facts.shapes),
    }


def qwen3_next(facts: Facts) -> Values:
    """Qwen3-Next: experts in each layer, and a shared one."""
    return _delta_nets(facts, "Qwen3NextForCausalLM") | _with_shared_expert(facts)


def qwen3_5(facts: Facts) -> Values:
    """Qwen3.5, dense."""
    return _delta_nets(facts, "Qwen3_5ForCausalLM")


def qwen3_5_moe(facts: Facts) -> Values:
    """Qwen3.5 with experts in each layer, and a shared one; no layer is dense."""
    values = _delta_nets(facts, "Qwen3_5MoeForCausalLM", size=1) | _with_shared_expert(facts)
    return {key: one for key, one in values.items() if key != "intermediate_size"}


def _with_shared_expert(facts: Facts) -> Values:
    """Qwen's experts, whose weights add up to 1, as llama.cpp knows."""
    meta = facts.metadata
    meta.expect("expert_weights_norm", True)
    return experts(facts) | {
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": meta.require("expert_shared_feed_forward_length", int),
        "norm_topk_prob": True,
    }


def _delta_nets(facts: Facts, model: str, size: int | None = None) -> Values:
    """Layers of gated delta nets: those that are told, or all but every so many.

    `size` is of dense layers, of which there are none; see `common`. What guesses further tokens is
    in layers behind the last one.
    """
    meta = facts.metadata
    values = common(facts, model, partial=True, size=size)
    meta.get("rope.dimension_sections", list, None)  # of positions in images; texts have one
    layers = values["num_hidden_layers"] - facts.further_layers()
    every = facts.count("full_attention_interval", _EVERY)
    recurrent = [(layer + 1) % every != 0 for layer in range(layers)]
    if meta.holds(_RECURRENT, list):
        recurrent = facts.by_layer(_RECURRENT, layers)
    rope = values["rope_parameters"]
    rope.setdefault("partial_rotary_factor", 1.0)  # which is not what absence means there
    return values | {
        "layer_types": ["linear_attention" if one else _FULL for one in recurrent],
        "linear_conv_kernel_dim": meta.require("ssm.conv_kernel", int),
        "linear_key_head_dim": meta.require("ssm.state_size", int),
        "linear_num_key_heads": meta.require("ssm.group_count", int),
        "linear_num_value_heads": facts.count("ssm.time_step_rank"),
        "linear_value_head_dim": _head_size(facts),
        "num_hidden_layers": layers,
    }


def kimi_linear(facts: Facts) -> Values:
    """Kimi Linear: layers without heads of keys are delta nets, and nothing rotates.

    Experts' weights add up to 1, and norms of latents have the epsilon of others, which llama.cpp
    knows.
    """
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    meta.expect("expert_weights_norm", True)
    meta.ignore("attention.value_length")  # head_dim of its config.json, which nothing reads
    values = latents_in_some(facts, "KimiLinearForCausalLM")
    del values["rope_parameters"]
    layers = values["num_hidden_layers"]
    attention = facts.by_layer(_KV_HEADS, layers)
    size = facts.count("kda.head_dim")
    return (
        values
        | experts_beside_shared(facts)
        | {
            "layer_types": [_FULL if one else "linear_attention" for one in attention],
            "linear_num_heads": values["num_attention_heads"],
            "linear_head_dim": size,
            "linear_conv_kernel_dim": meta.require("ssm.conv_kernel", int),
            "n_group": facts.count("expert_group_count", 1),
            "topk_group": facts.count("expert_group_used_count", 1),
            "norm_topk_prob": True,
            "latent_norm_eps": values["rms_norm_eps"],
        }
    )


def granite_hybrid(facts: Facts) -> Values:
    """Granite 4, and Bamba, which rotates and has none of Granite's multipliers."""
    meta = facts.metadata
    layers = facts.num_layers()
    rotates = meta.get("rope.scaling.finetuned", bool, True)
    is_granite = not rotates or any(meta.holds(key, float) for key in _MULTIPLIERS)
    read = _granite_4 if is_granite else _bamba
    found = read(facts, facts.where_any(_KV_HEADS, layers), facts.by_layer(_KV_HEADS, layers))
    if is_granite:
        found["position_embedding_type"] = "rope" if rotates else "nope"
    has_bias = any(name.endswith("attn_q.bias") for name in facts.shapes)
    return found | _mamba(facts) | {"attention_bias": has_bias}


def _bamba(facts: Facts, kv_heads: int, by_layer: list[int]) -> Values:
    attention = [layer for layer, heads in enumerate(by_layer) if heads]
    values = common(facts, "BambaForCausalLM", kv_heads=kv_heads, partial=True)
    return values | biases(facts) | {"attn_layer_indices": attention}


def _granite_4(facts: Facts, kv_heads: int, by_layer: list[int]) -> Values:
    values = multiplied(facts, "GraniteMoeHybridForCausalLM", kv_heads=kv_heads)
    kinds = ["attention" if heads else "mamba" for heads in by_layer]
    return values | _granite_layers(facts, values) | {"layer_types": kinds}


def _granite_layers(facts: Facts, values: Values) -> Values:
    """Experts and the layer beside them, which is the only one of those without."""
    meta = facts.metadata
    beside = meta.get("expert_shared_feed_forward_length", int, 0)
    if not meta.get("expert_count", int, 0):
        meta.ignore("expert_used_count")
        return {"num_local_experts": 0, "shared_intermediate_size": values["intermediate_size"]}
    meta.expect("expert_weights_norm", True)
    return experts(facts, "num_local_experts") | {"shared_intermediate_size": beside}


def _mamba(facts: Facts) -> Values:
    """Sizes of state spaces, in the spelling that Bamba and Granite share."""
    meta = facts.metadata
    inner, hidden = facts.count("ssm.inner_size"), facts.count("embedding_length")
    if inner % hidden:
        raise UnsupportedModelError(
            f"{meta.path}: {meta.name('ssm.inner_size')} is {inner}; supported is a multiple of "
            f"{hidden}, the width of the model."
        )
    return _space_sizes(facts) | {"mamba_expand": inner // hidden}


def _space_sizes(facts: Facts) -> Values:
    return {
        "mamba_n_heads": facts.count("ssm.time_step_rank"),
        "mamba_d_head": _head_size(facts),
        "mamba_n_groups": facts.count("ssm.group_count"),
        "mamba_d_state": facts.count("ssm.state_size"),
        "mamba_d_conv": facts.count("ssm.conv_kernel"),
        "mamba_conv_bias": _has_conv_bias(facts),
    }


def falcon_h1(facts: Facts) -> Values:
    """Falcon-H1, whose multipliers are in weights; without an output the head is the embedding."""
    values = common(facts, "FalconH1ForCausalLM")
    inner = facts.count("ssm.inner_size")
    return (
        values
        | _space_sizes(facts)
        | {
            "mamba_d_ssm": inner,
            "mamba_rms_norm": any(name.endswith(SPACE_NORM) for name in facts.shapes),
            "mamba_norm_before_gate": False,
            "multipliers_in_weights": True,
        }
    )


def nemotron_h(facts: Facts) -> Values:
    """Nemotron-H and Nemotron 3, of blocks of one part each; nothing rotates.

    A block has heads of keys, features of a feed-forward layer, or neither: a state space.
    """
    meta = facts.metadata
    blocks = facts.num_layers() - facts.further_layers()
    kv_heads = facts.by_layer(_KV_HEADS, blocks)
    widths = facts.by_layer(_FEED_FORWARD, blocks)
    has_experts = meta.get("expert_count", int, 0) > 0
    behind = "E" if has_experts else "-"
    values = common(
        facts,
        "NemotronHForCausalLM",
        kv_heads=facts.where_any(_KV_HEADS, blocks),
        norm=LAYER_NORM,
        epsilon="layer_norm_epsilon",
        partial=True,
        size=facts.where_any(_FEED_FORWARD, blocks),
    )
    meta.expect(RMS_NORM, values["layer_norm_epsilon"])
    del values["rope_parameters"]
    values |= {
        "num_hidden_layers": blocks,
        "hybrid_override_pattern": "".join(
            behind if width else "*" if heads else "M"
            for heads, width in zip(kv_heads, widths, strict=True)
        ),
        "mamba_num_heads": facts.count("ssm.time_step_rank"),
        "mamba_head_dim": _head_size(facts),
        "n_groups": facts.count("ssm.group_count"),
        "ssm_state_size": facts.count("ssm.state_size"),
        "conv_kernel": facts.count("ssm.conv_kernel"),
        "use_conv_bias": _has_conv_bias(facts),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in facts.shapes),
    }
    return values | _nemotron_experts(facts) if has_experts else values


def _nemotron_experts(facts: Facts) -> Values:
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    return {
        "n_routed_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "moe_shared_expert_intermediate_size": meta.require(
            "expert_shared_feed_forward_length", int
        ),
        "moe_latent_size": meta.get("moe_latent_size", int, None),
        "n_shared_experts": meta.get("expert_shared_count", int, 1),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": meta.get("expert_weights_scale", float, 0.0) or 1.0,
    }


def _has_conv_bias(facts: Facts) -> bool:
    return any(name.endswith("ssm_conv1d.bias") for name in facts.shapes)


def _head_size(facts: Facts) -> int:
    """Channels of a head of states, of which all have as many.

    Raises:
        CheckpointError: They do not.
    """
    heads, inner = facts.count("ssm.time_step_rank"), facts.count("ssm.inner_size")
    if inner % heads:
        raise CheckpointError(
            f"{facts.metadata.path}: {facts.metadata.name('ssm.inner_size')} is {inner}, of "
            f"{heads} heads. Download it again."
        )
    return inner // heads
