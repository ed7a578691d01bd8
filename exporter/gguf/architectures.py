"""GGUF's architectures: what their metadata would be in a `config.json`. One function each.

Keys and what they mean: llama.cpp's `src/llama-model.cpp`. What llama.cpp computes of an
architecture without being told is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.gguf import dense, gemma3n, gemma4, mixtures, recent, reranker, states
from onnxport.exporter.gguf.common import (
    LAYER_NORM,
    RMS_NORM,
    SIGMOID,
    SPACE_SIZES,
    Values,
    biases,
    common,
    experts,
    multiplied,
)
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.ropes import ORIGINAL


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one of GGUF's architectures is read."""

    config: Callable[[Facts], Values]  # the keys of config.json, with transformers' class
    neighbours: bool = False  # rows of queries and keys: see `GgufCheckpoint`
    tiled: bool = False  # value heads of states: see `orders`


def read_config(facts: Facts) -> tuple[Architecture, Values]:
    """The architecture of a file, and the configuration of its model.

    Raises:
        CheckpointError: A key is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: An architecture, key or value that is not supported.
    """
    name = facts.metadata.architecture
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedModelError(
            f"{facts.metadata.path} is of the architecture {name!r}; of GGUF files read are "
            f"{', '.join(sorted(ARCHITECTURES))}. Other models are exported from their original "
            "checkpoint."
        )
    values = found.config(facts)
    facts.metadata.check_all_used()
    return found, values


def _llama(facts: Facts) -> Values:
    if not facts.metadata.get("expert_count", int, 0):
        return common(facts, "LlamaForCausalLM") | biases(facts)
    facts.metadata.expect("expert_weights_norm", True)
    values = common(facts, "MixtralForCausalLM") | experts(facts, "num_local_experts")
    facts.metadata.expect("expert_feed_forward_length", values["intermediate_size"])
    return values


def _with_layer_norms(facts: Facts, model: str, epsilon: str, *, partial: bool = False) -> Values:
    """What all share whose norms are LayerNorms; `epsilon` is what theirs is called."""
    return common(facts, model, norm=LAYER_NORM, epsilon=epsilon, partial=partial)


def _arcee(facts: Facts) -> Values:
    return common(facts, "ArceeForCausalLM") | biases(facts)


def _nemotron(facts: Facts) -> Values:
    """Nemotron, the weights of whose norms are stored whole.

    Their epsilon is called `norm_eps` in a checkpoint, so the converter writes it as that of an
    RMSNorm, too, which llama.cpp does not read here.
    """
    facts.metadata.get(RMS_NORM, float, None)
    return _with_layer_norms(facts, "NemotronForCausalLM", "norm_eps", partial=True) | biases(facts)


def _jais2(facts: Facts) -> Values:
    return _with_layer_norms(facts, "Jais2ForCausalLM", "layer_norm_eps") | biases(facts)


def _starcoder2(facts: Facts) -> Values:
    """StarCoder2: its window is not in the file, and llama.cpp has none."""
    values = _with_layer_norms(facts, "Starcoder2ForCausalLM", "norm_epsilon")
    return values | {"use_bias": facts.has_qkv_bias(), "sliding_window": None}


def _orion(facts: Facts) -> Values:
    """Orion, whose LayerNorms' epsilon is called as RMSNorms' are."""
    return _with_layer_norms(facts, "OrionForCausalLM", "rms_norm_eps")


def _phi2(facts: Facts) -> Values:
    return _with_layer_norms(facts, "PhiForCausalLM", "layer_norm_eps", partial=True)


def _gpt_neox(facts: Facts) -> Values:
    """GPT-NeoX, whose queries, keys and values are each in one place."""
    values = _with_layer_norms(facts, "GPTNeoXForCausalLM", "layer_norm_eps", partial=True)
    del values["num_key_value_heads"]
    return values | {
        "attention_bias": facts.has_qkv_bias(),
        "use_parallel_residual": facts.metadata.get("use_parallel_residual", bool, True),
    }


def _stablelm(facts: Facts) -> Values:
    """StableLM: all is side by side where there is no second norm, whatever the key says."""
    facts.metadata.get("use_parallel_residual", bool, True)
    return _with_layer_norms(facts, "StableLmForCausalLM", "layer_norm_eps", partial=True) | {
        "use_parallel_residual": not facts.has("blk.0.ffn_norm.weight"),
        "use_qkv_bias": facts.has_qkv_bias(),
        "qk_layernorm": facts.has("blk.0.attn_q_norm.weight"),
    }


def _qwen2(facts: Facts) -> Values:
    return common(facts, "Qwen2ForCausalLM")


def _qwen2_moe(facts: Facts) -> Values:
    facts.metadata.expect("expert_weights_norm", False)
    values = common(facts, "Qwen2MoeForCausalLM") | experts(facts)
    meta, size = facts.metadata, values["intermediate_size"]
    return values | {
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length", int, size),
        "norm_topk_prob": False,
    }


def _qwen3(facts: Facts) -> Values:
    values = common(facts, "Qwen3ForCausalLM") | {"attention_bias": facts.has_qkv_bias()}
    return values | reranker.labels(facts) if reranker.is_reranker(facts) else values


def _qwen3_moe(facts: Facts) -> Values:
    facts.metadata.expect("expert_weights_norm", True)
    return (
        common(facts, "Qwen3MoeForCausalLM")
        | experts(facts)
        | {
            "attention_bias": facts.has_qkv_bias(),
            "moe_intermediate_size": facts.metadata.require("expert_feed_forward_length", int),
            "norm_topk_prob": True,
        }
    )


def _gemma(facts: Facts, model: str, largest: int, window: int | None = None) -> Values:
    """What Gemma 2 and 3 share; `window` is the one where the file does not say it.

    The scale of queries is not in the file; llama.cpp takes it from the size of a head but in the
    models of 27B, which it knows by their layers (`largest`), where it is from the width of all.
    """
    values = common(facts, model)
    scalar = values["head_dim"]
    if values["num_hidden_layers"] == largest:
        scalar = values["hidden_size"] // values["num_attention_heads"]
    return values | {
        "query_pre_attn_scalar": float(scalar),
        "sliding_window": facts.count("attention.sliding_window", window),
    }


def _gemma1(facts: Facts) -> Values:
    return common(facts, "GemmaForCausalLM")


def _gemma2(facts: Facts) -> Values:
    meta = facts.metadata
    meta.expect("attention.sliding_window_pattern", 2)
    return _gemma(facts, "Gemma2ForCausalLM", 46, window=4096) | {
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": meta.get("final_logit_softcapping", float, 30.0),
    }


def _gemma3(facts: Facts) -> Values:
    """Gemma 3, whose layers with a window have an unscaled RoPE of their own."""
    meta = facts.metadata
    values = _gemma(facts, "Gemma3ForCausalLM", 62)
    meta.expect("attention.sliding_window_pattern", 6)
    return values | {
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_theta": meta.get("rope.freq_base_swa", float, 10_000.0)},
        },
        "final_logit_softcapping": meta.get("final_logit_softcapping", float, None),
    }


def _phi3(facts: Facts) -> Values:
    meta = facts.metadata
    values = common(facts, "Phi3ForCausalLM", partial=True)
    return values | {
        "sliding_window": meta.get("attention.sliding_window", int, 0) or None,
        "original_max_position_embeddings": meta.get(
            ORIGINAL, int, values["max_position_embeddings"]
        ),
    }


def _expect_rotation(facts: Facts) -> None:
    """Refuse a Granite that rotates nothing, which llama.cpp tells by what others say of training.

    Raises:
        UnsupportedModelError: It is one.
    """
    facts.metadata.expect("rope.scaling.finetuned", True)


def _granite(facts: Facts) -> Values:
    """Granite, and Granite 4 none of whose layers is a state space.

    Files of the latter tell sizes of these all the same, and one of experts that there are not.
    """
    _expect_rotation(facts)
    facts.metadata.ignore(*SPACE_SIZES, "expert_shared_feed_forward_length")
    return multiplied(facts, "GraniteForCausalLM") | biases(facts)


def _minicpm(facts: Facts) -> Values:
    """MiniCPM of the first, second and fourth generation: Granite's layers and multipliers."""
    for key in ("embedding_scale", "residual_scale", "logit_scale"):  # which older files lack
        facts.metadata.require(key, float)
    return multiplied(facts, "GraniteForCausalLM")


def _granite_moe(facts: Facts) -> Values:
    if not facts.metadata.get("expert_count", int, 0):
        return _granite(facts)
    _expect_rotation(facts)
    facts.metadata.expect("expert_weights_norm", True)
    facts.metadata.ignore(*SPACE_SIZES)
    shared = facts.metadata.get("expert_shared_feed_forward_length", int, 0)
    model = "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"
    values = multiplied(facts, model) | experts(facts, "num_local_experts")
    if shared:
        values["shared_intermediate_size"] = shared
    return values | {"attention_bias": facts.has_qkv_bias()}


def _corrected(facts: Facts, model: str, *, partial: bool = False) -> Values:
    """What dots.llm1 and GLM 4.5 share: sigmoids choose experts, as DeepSeek V3 has it.

    Solar Open is a GLM 4.5 none of whose layers is dense, so that no key tells their size.
    """
    meta = facts.metadata
    dense = meta.get("leading_dense_block_count", int, 0)
    values = common(facts, model, partial=partial, size=None if dense else 1)
    further = facts.further_layers()
    return values | {
        "attention_bias": facts.has_qkv_bias(),
        "num_hidden_layers": values["num_hidden_layers"] - further,
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
        "num_nextn_predict_layers": further or None,
        "n_routed_experts": facts.num_experts(),
        "num_experts_per_tok": meta.require("expert_used_count", int),
        "moe_intermediate_size": meta.require("expert_feed_forward_length", int),
        "n_shared_experts": meta.get("expert_shared_count", int, 0),
        "first_k_dense_replace": dense,
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": meta.get("expert_weights_scale", float, 0.0) or 1.0,
    }


def _dots1(facts: Facts) -> Values:
    facts.metadata.expect("expert_gating_func", SIGMOID)
    return _corrected(facts, "Dots1ForCausalLM") | {"sliding_window": None}


def _ernie(facts: Facts) -> Values:
    return common(facts, "Ernie4_5ForCausalLM") | {"use_bias": facts.has_qkv_bias()}


def _glm4_moe(facts: Facts) -> Values:
    facts.metadata.expect("expert_gating_func", SIGMOID)
    return _corrected(facts, "Glm4MoeForCausalLM", partial=True) | {
        "use_qk_norm": facts.has("blk.0.attn_q_norm.weight"),
    }


def _bailing2(facts: Facts) -> Values:
    """Ling and Ring 2.0, and Sarvam 30B, which all of whose heads' channels rotate."""
    meta = facts.metadata
    meta.expect("expert_gating_func", SIGMOID)
    values = _corrected(facts, "BailingMoeV2ForCausalLM", partial=True)
    size = values["moe_intermediate_size"]
    return values | {
        "num_experts": values.pop("n_routed_experts"),
        "num_shared_experts": values.pop("n_shared_experts"),
        "moe_shared_expert_intermediate_size": meta.get(
            "expert_shared_feed_forward_length", int, size
        ),
        "use_qk_norm": facts.has("blk.0.attn_q_norm.weight"),
        "use_qkv_bias": values.pop("attention_bias"),
    }


def _gpt_oss(facts: Facts) -> Values:
    """gpt-oss: what bounds its activations, and how its RoPE is rounded, is not in the file."""
    values = common(facts, "GptOssForCausalLM") | experts(facts, "num_local_experts")
    size = facts.metadata.get("expert_feed_forward_length", int, values["intermediate_size"])
    rope = values["rope_parameters"]
    if rope.get("rope_type") == "yarn":
        rope["truncate"] = False
    return values | {
        "attention_bias": True,
        "intermediate_size": size,
        "sliding_window": facts.metadata.require("attention.sliding_window", int),
    }


def _olmo(facts: Facts) -> Values:
    bound = facts.metadata.get("attention.clamp_kqv", float, 0.0)
    values = _with_layer_norms(facts, "OlmoForCausalLM", "layer_norm_eps")
    return values | {"clip_qkv": bound or None, "attention_bias": facts.has_qkv_bias()}


def _olmoe(facts: Facts) -> Values:
    facts.metadata.expect("expert_weights_norm", False)
    values = common(facts, "OlmoeForCausalLM") | experts(facts)
    facts.metadata.expect("expert_feed_forward_length", values["intermediate_size"])
    return values | {"norm_topk_prob": False}


def _seed_oss(facts: Facts) -> Values:
    return common(facts, "SeedOssForCausalLM") | {
        "attention_bias": facts.has_qkv_bias(),
        "attention_out_bias": facts.has("blk.0.attn_output.bias"),
    }


def _smollm3(facts: Facts) -> Values:
    """SmolLM3: every fourth layer rotates nothing, which is not in the file."""
    return common(facts, "SmolLM3ForCausalLM") | biases(facts) | {"no_rope_layer_interval": 4}


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "afmoe": Architecture(recent.afmoe),
    "apertus": Architecture(dense.apertus),
    "arcee": Architecture(_arcee, neighbours=True),
    "bailingmoe2": Architecture(_bailing2),
    "chatglm": Architecture(dense.chatglm),
    "cohere2": Architecture(recent.cohere2),
    "cohere2moe": Architecture(mixtures.cohere2_moe),
    "command-r": Architecture(recent.command_r),
    "deepseek2": Architecture(recent.deepseek2),
    "dots1": Architecture(_dots1),
    "ernie4_5": Architecture(_ernie),
    "ernie4_5-moe": Architecture(recent.ernie_moe),
    "exaone": Architecture(_llama),
    "exaone-moe": Architecture(recent.exaone_moe),
    "exaone4": Architecture(recent.exaone4),
    "falcon": Architecture(dense.falcon),
    "falcon-h1": Architecture(states.falcon_h1),
    "gemma": Architecture(_gemma1),
    "gemma2": Architecture(_gemma2),
    "gemma3": Architecture(_gemma3),
    "gemma3n": Architecture(gemma3n.gemma3n),
    "gemma4": Architecture(gemma4.gemma4),
    "glm4": Architecture(dense.glm4),
    "glm4moe": Architecture(_glm4_moe),
    "gpt-oss": Architecture(_gpt_oss),
    "gpt2": Architecture(dense.gpt2),
    "gptneox": Architecture(_gpt_neox),
    "granite": Architecture(_granite, neighbours=True),
    "granite_swa": Architecture(recent.granite_swa, neighbours=True),
    "granitehybrid": Architecture(states.granite_hybrid, neighbours=True),
    "granitemoe": Architecture(_granite_moe, neighbours=True),
    "hunyuan-dense": Architecture(recent.hunyuan),
    "hunyuan-moe": Architecture(recent.hunyuan_moe),
    "hy_v3": Architecture(mixtures.hy_v3),
    "internlm2": Architecture(_llama, neighbours=True),
    "jais2": Architecture(_jais2),
    "kimi-linear": Architecture(states.kimi_linear),
    "laguna": Architecture(mixtures.laguna),
    "lfm2": Architecture(states.lfm2),
    "lfm2moe": Architecture(states.lfm2_moe),
    "llama": Architecture(_llama, neighbours=True),
    "llama4": Architecture(mixtures.llama4),
    "mellum": Architecture(mixtures.mellum),
    "mimo2": Architecture(mixtures.mimo2),
    "minicpm": Architecture(_minicpm, neighbours=True),
    "minimax-m2": Architecture(recent.minimax_m2),
    "mistral3": Architecture(dense.mistral3, neighbours=True),
    "mistral4": Architecture(mixtures.mistral4),
    "nemotron": Architecture(_nemotron),
    "nemotron_h": Architecture(states.nemotron_h, neighbours=True),
    "nemotron_h_moe": Architecture(states.nemotron_h, neighbours=True),
    "olmo": Architecture(_olmo, neighbours=True),
    "olmo2": Architecture(recent.olmo2),
    "olmoe": Architecture(_olmoe),
    "orion": Architecture(_orion),
    "phi2": Architecture(_phi2),
    "phi3": Architecture(_phi3),
    "qwen2": Architecture(_qwen2),
    "qwen2moe": Architecture(_qwen2_moe),
    "qwen2vl": Architecture(dense.qwen2_vl),
    "qwen3": Architecture(_qwen3),
    "qwen3moe": Architecture(_qwen3_moe),
    "qwen35": Architecture(states.qwen3_5, tiled=True),
    "qwen35moe": Architecture(states.qwen3_5_moe, tiled=True),
    "qwen3next": Architecture(states.qwen3_next),
    "qwen3vl": Architecture(dense.qwen3_vl),
    "seed_oss": Architecture(_seed_oss),
    "smollm3": Architecture(_smollm3, neighbours=True),
    "stablelm": Architecture(_stablelm),
    "starcoder": Architecture(dense.starcoder),
    "starcoder2": Architecture(_starcoder2),
}
