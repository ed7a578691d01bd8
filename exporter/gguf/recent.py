"""GGUF's architectures of recent families; see `architectures`."""

from __future__ import annotations

from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.gguf.common import (
    LAYER_NORM,
    SIGMOID,
    SOFTMAX,
    Values,
    biases,
    common,
    experts,
    multiplied,
)
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.layouts import CORRECTION
from onnxport.exporter.gguf.ropes import rope_parameters

_WINDOW: Final = "attention.sliding_window"
_PATTERN: Final = "attention.sliding_window_pattern"
_ROTATED: Final = "attention.rope_pattern"
_KV_HEADS: Final = "attention.head_count_kv"
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_EVERY: Final = 4  # layers, of which the last one sees all, where a file does not say it


def afmoe(facts: Facts) -> Values:
    """AFMoE, whose embeddings llama.cpp scales whatever the file says."""
    meta = facts.metadata
    meta.expect("expert_weights_norm", True)
    meta.expect("expert_gating_func", SIGMOID)
    _expect_one_group(facts)
    return common(facts, "AfmoeForCausalLM") | {
        "sliding_window": meta.require(_WINDOW, int),
        "layer_types": kinds(facts),
        "mup_enabled": True,
        "num_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "num_shared_experts": meta.get("expert_shared_count", int, 0),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "num_dense_layers": meta.get("leading_dense_block_count", int, 0),
        "route_scale": scale(facts),
    }


def command_r(facts: Facts) -> Values:
    """Command R and R+, which has norms of queries and keys."""
    return _cohere(facts, "CohereForCausalLM") | {
        "use_qk_norm": facts.has("blk.0.attn_q_norm.weight"),
    }


def cohere2(facts: Facts) -> Values:
    """Command R7B and A."""
    return _cohere(facts, "Cohere2ForCausalLM") | {
        "sliding_window": facts.metadata.require(_WINDOW, int),
        "layer_types": kinds(facts),
    }


def _cohere(facts: Facts, model: str) -> Values:
    values = common(facts, model, norm=LAYER_NORM, epsilon="layer_norm_eps")
    return values | {
        "attention_bias": facts.has_qkv_bias(),
        "logit_scale": facts.metadata.require("logit_scale", float),
    }


def deepseek2(facts: Facts) -> Values:
    """DeepSeek V2 and V3, and what is built alike; the function of experts' scores tells which.

    Without experts it is a Youtu-LLM. Products of latents are of two tensors, as llama.cpp writes
    them since it caches latents.

    Raises:
        UnsupportedModelError: Groups of experts are not told, or products of latents are not apart,
            as by older files, or what yarn multiplies attention's scores with.
    """
    meta = facts.metadata
    if not meta.get("expert_count", int, 0):
        return _youtu(facts)
    _check_age(facts)
    sigmoid = _gating(facts) == SIGMOID
    groups, chosen = (facts.count(f"expert_group_{key}") for key in ("count", "used_count"))
    values = latents(facts, "DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM")
    values |= experts_beside_shared(facts) | {"n_group": groups, "topk_group": chosen}
    if not sigmoid:
        values["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return values


def _youtu(facts: Facts) -> Values:
    """Youtu-LLM, of which files tell sizes of experts that there are not."""
    _check_age(facts, keys=_AGES[:1])
    meta = facts.metadata
    meta.expect("expert_shared_count", 0)
    meta.ignore("expert_feed_forward_length", "leading_dense_block_count")
    return latents(facts, "YoutuForCausalLM")


def latents(facts: Facts, model: str) -> Values:
    """What all share that have attention of latents; `model` is transformers' class."""
    facts.metadata.expect(_KV_HEADS, 1)
    facts.metadata.expect("attention.value_length", facts.count("attention.kv_lora_rank"))
    return latents_in_some(facts, model)


def latents_in_some(facts: Facts, model: str) -> Values:
    """The same but for what is told of each layer, which may not have attention."""
    meta = facts.metadata
    heads, rank = facts.count("attention.head_count"), facts.count("attention.kv_lora_rank")
    rope_size = facts.count("rope.dimension_count")
    meta.expect("attention.key_length", rank + rope_size)
    further = facts.further_layers()
    return {
        "architectures": [model],
        "vocab_size": facts.vocab_size(),
        "hidden_size": facts.count("embedding_length"),
        "intermediate_size": meta.require("feed_forward_length", int),
        "num_hidden_layers": facts.num_layers() - further,
        "num_nextn_predict_layers": further or None,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": facts.count("context_length"),
        "rms_norm_eps": meta.require("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _yarn(facts, rope_parameters(facts, rope_size)),
        "tie_word_embeddings": not facts.has("output.weight"),
        "q_lora_rank": meta.get("attention.q_lora_rank", int, None),
        "kv_lora_rank": rank,
        "qk_nope_head_dim": facts.count("attention.key_length_mla") - rope_size,
        "qk_rope_head_dim": rope_size,
        "v_head_dim": facts.count("attention.value_length_mla"),
    }


def experts_beside_shared(facts: Facts) -> Values:
    """DeepSeek's experts, whatever makes scores of them."""
    meta = facts.metadata
    return {
        "n_routed_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "n_shared_experts": meta.get("expert_shared_count", int, 0),
        "first_k_dense_replace": meta.get("leading_dense_block_count", int, 0),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": scale(facts),
    }


_AGES: Final = (
    ("attention.key_length_mla", "cached latents"),
    ("expert_group_count", "told how experts are grouped"),
)


def _check_age(facts: Facts, keys: tuple[tuple[str, str], ...] = _AGES) -> None:
    """Refuse files from before llama.cpp wrote what is needed, which would be guessed."""
    meta = facts.metadata
    for key, what in keys:
        if meta.get(key, int, None) is None:
            raise UnsupportedModelError(
                f"{meta.path} lacks the key {meta.name(key)}, so it was made before llama.cpp "
                f"{what}. Give a newer file, convert the model again, or export the original "
                "checkpoint."
            )


def _gating(facts: Facts) -> int:
    """Where the file does not say, a softmax, but sigmoids where what they choose is corrected.

    Files of DeepSeek V2 and of GLM 4.7 Flash do not; llama.cpp knows the latter by its layers.
    """
    is_corrected = any(name.endswith(CORRECTION) for name in facts.shapes)
    found = facts.metadata.get("expert_gating_func", int, SIGMOID if is_corrected else SOFTMAX)
    if found not in (SOFTMAX, SIGMOID):
        facts.metadata.expect("expert_gating_func", SIGMOID)
    return found


def _yarn(facts: Facts, rope: Values) -> Values:
    """RoPE keys with DeepSeek's magnitudes, which files have a tenth of."""
    meta = facts.metadata
    given = meta.get("rope.scaling.yarn_log_multiplier", float, None)
    if rope.get("rope_type") != "yarn":
        return rope
    if given is None:
        raise UnsupportedModelError(
            f"{meta.path} lacks the key {meta.name('rope.scaling.yarn_log_multiplier')}, without "
            "which llama.cpp and transformers scale scores differently. Export the original "
            "checkpoint."
        )
    magnitude = round(10 * given, 6)
    return rope | {"mscale": magnitude, "mscale_all_dim": magnitude}


def ernie_moe(facts: Facts) -> Values:
    """ERNIE 4.5 with experts, whose weights add up to 1, as llama.cpp knows."""
    meta = facts.metadata
    meta.expect("expert_weights_norm", True)
    meta.expect("expert_gating_func", SOFTMAX)
    # Which is not what it says: the layer beside experts is as large as so many of them.
    meta.get("expert_shared_feed_forward_length", int, 0)
    return common(facts, "Ernie4_5_MoeForCausalLM") | {
        "use_bias": facts.has_qkv_bias(),
        "moe_num_experts": facts.num_experts(),
        "moe_k": meta.require("expert_used_count", int),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "moe_num_shared_experts": meta.get("expert_shared_count", int, 0),
        "moe_layer_start_index": meta.get("leading_dense_block_count", int, 0),
        "moe_layer_interval": facts.count("interleave_moe_layer_step", 1),
    }


def exaone4(facts: Facts) -> Values:
    """EXAONE 4; of the model of 32B llama.cpp knows the window where the file does not say it."""
    values = common(facts, "Exaone4ForCausalLM")
    known = 4096 if values["num_hidden_layers"] == 64 else 0
    window = facts.metadata.get(_WINDOW, int, known) or None
    return values | {
        "sliding_window": window,
        "layer_types": kinds(facts) if window else [_FULL] * values["num_hidden_layers"],
    }


def exaone_moe(facts: Facts) -> Values:
    """K-EXAONE: what guesses further tokens is in layers behind the last one."""
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    values = common(facts, "ExaoneMoeForCausalLM")
    further = facts.further_layers()
    layers = values["num_hidden_layers"] - further
    size, shared = expert_sizes(facts)
    return values | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": further or None,
        "sliding_window": meta.require(_WINDOW, int),
        "layer_types": kinds(facts, layers),
        "num_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "moe_intermediate_size": size,
        "num_shared_experts": shared,
        "first_k_dense_replace": meta.get("leading_dense_block_count", int, 0),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": scale(facts),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
    }


def hunyuan(facts: Facts) -> Values:
    """HunYuan, dense; `alpha` is in the base of its RoPE already.

    Published configurations tell of one expert, which is the feed-forward layer that there is.
    """
    for key in ("expert_count", "expert_used_count"):
        if facts.metadata.get(key, int, 0):
            facts.metadata.expect(key, 1)
    return common(facts, "HunYuanDenseV1ForCausalLM") | {
        "attention_bias": facts.has_qkv_bias(),
    }


def hunyuan_moe(facts: Facts) -> Values:
    """HunYuan-A13B: the layer beside experts is as large as one of them."""
    meta = facts.metadata
    meta.expect("expert_weights_norm", True)
    values = common(facts, "HunYuanMoEV1ForCausalLM") | experts(facts)
    size = values["intermediate_size"]
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        meta.expect(key, size)
    meta.expect("expert_shared_count", 1)
    per_token = values.pop("num_experts_per_tok")
    return values | {
        "moe_topk": per_token,
        "attention_bias": facts.has_qkv_bias(),
    }


def minimax_m2(facts: Facts) -> Values:
    """MiniMax M2: experts' weights add up to 1, which llama.cpp knows."""
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    meta.expect("expert_weights_norm", True)
    _expect_one_group(facts)
    values = common(facts, "MiniMaxM2ForCausalLM", partial=True)
    meta.expect("expert_feed_forward_length", values["intermediate_size"])
    return values | {
        "num_local_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
    }


def olmo2(facts: Facts) -> Values:
    """OLMo 2, and with windows OLMo 3, whose layers with one have RoPE as it is, unscaled."""
    values = common(facts, "Olmo2ForCausalLM")
    values["attention_bias"] = facts.has_qkv_bias()
    window = facts.metadata.get(_WINDOW, int, 0)
    if not window:
        return values
    rope = values["rope_parameters"]
    own = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return values | {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": kinds(facts),
        "rope_parameters": {_FULL: rope, _SLIDING: own},
    }


def expert_sizes(facts: Facts) -> tuple[int, int]:
    """The rows of an expert, and how many such every token is given to, which a file says twice."""
    meta = facts.metadata
    size = meta.require("expert_feed_forward_length", int)
    shared = meta.get("expert_shared_count", int, 0)
    meta.expect("expert_shared_feed_forward_length", size * shared)
    return size, shared


def scale(facts: Facts) -> float:
    """What experts' outputs are multiplied with; 0 means that nothing is."""
    return facts.metadata.get("expert_weights_scale", float, 0.0) or 1.0


def _expect_one_group(facts: Facts) -> None:
    for key in ("expert_group_count", "expert_group_used_count"):
        facts.metadata.expect(key, 1)


def granite_swa(facts: Facts) -> Values:
    """Granite with sliding windows; llama.cpp has one RoPE base, for the layers that rotate."""
    meta = facts.metadata
    has_experts = bool(meta.get("expert_count", int, 0))
    model = "GraniteMoeSWAForCausalLM" if has_experts else "GraniteSWAForCausalLM"
    values = multiplied(facts, model) | {"attention_bias": facts.has_qkv_bias()}
    layers = values["num_hidden_layers"]
    values |= {
        "sliding_window": meta.require(_WINDOW, int),
        "layer_types": [_SLIDING if one else _FULL for one in _slides(facts, layers)],
    }
    if meta.holds(_ROTATED, list):
        base = values["rope_parameters"]["rope_theta"]
        rotated = facts.by_layer(_ROTATED, layers)
        values["layer_rope_theta"] = [base if one else 0 for one in rotated]
    if not has_experts:
        return values | {"mlp_bias": biases(facts)["mlp_bias"]}
    shared = meta.get("expert_shared_feed_forward_length", int, 0)
    return values | experts(facts, "num_local_experts") | {"shared_intermediate_size": shared}


def _slides(facts: Facts, layers: int) -> list[bool]:
    """Which layers slide, as Granite's file must say layer by layer."""
    facts.metadata.require(_PATTERN, list)
    return [bool(one) for one in facts.by_layer(_PATTERN, layers)]


def kinds(
    facts: Facts,
    layers: int | None = None,
    *,
    own_base: bool = False,
    sees_first: bool = False,
) -> list[str]:
    """The layers' types: as a list says, or every so many sees all; of all of them, or so many.

    RoPE has one base for all, unless `own_base`. Of every so many the last sees all, or the first.
    """
    if layers is None:
        layers = facts.num_layers()
    meta = facts.metadata
    if not own_base:
        meta.expect("rope.freq_base_swa", meta.get("rope.freq_base", float, 10_000.0))
    if meta.holds(_PATTERN, list):
        slides = facts.by_layer(_PATTERN, layers)
    else:
        every = facts.count(_PATTERN, _EVERY)
        slides = [(layer + (not sees_first)) % every != 0 for layer in range(layers)]
    return [_SLIDING if one else _FULL for one in slides]
