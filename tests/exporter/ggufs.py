"""GGUF files of the tiny checkpoints, as llama.cpp's converter writes them.

Names of tensors come from the package gguf, not from what is tested.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file

Array = NDArray[np.float32]
Pick = Callable[[str, Array], Kind]  # the type of a tensor, by its name in the file

ARCHITECTURES: Mapping[str, str] = {
    "afmoe": "afmoe",
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "exaone_moe": "exaone-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "granite_swa": "granite_swa",
    "granitemoe_swa": "granite_swa",
    "falcon": "falcon",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "jais2": "jais2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi": "phi2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
# Whose names an architecture has that the package gguf does not know yet, and its own.
NAMED_AS: Mapping[str, str] = {"granite_swa": "granite"}
GRANITE_SWA: Mapping[str, str] = {
    "self_attn.sinks": "attn_sinks",
    "block_sparse_moe.router.weight": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.input_linear.weight": "ffn_up_shexp",
    "shared_mlp.output_linear.weight": "ffn_down_shexp",
}
DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
NEIGHBOURS = (
    *("arcee", "llama", "mistral", "mixtral", "granite", "granitemoe", "granitemoeshared"),
    *("granite_swa", "granitemoe_swa", "olmo", "smollm3"),
)
PARTIAL = ("gptneox", "nemotron", "phi2", "stablelm")
LAYER_NORMS = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
# Keys that some families have for others.
SPELLED = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "ffn_hidden_size": "intermediate_size",
}
SINKS = "self_attn.sinks.weight"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_JOINED = {"input_linear": ("gate", "up"), "output_linear": ("down",)}


def write(
    folder: Path,
    path: Path,
    pick: Pick | Kind = Kind.F32,
    *,
    vocab: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    split: int = 0,
) -> Path:
    """Write the checkpoint in `folder` to the GGUF file `path`.

    Args:
        folder: With config.json and safetensors.
        path: The file.
        pick: The type of matrices, or of each; vectors and routers stay F32.
        vocab: Keys of the tokenizer; None: it has none.
        extra: Further keys, or other values of some; None takes one out.
        split: Tensors of a file; 0: one file has all. Returned is the first then.
    """
    config = _spelled(json.loads((folder / "config.json").read_text()))
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    own = metadata(config, architecture)
    keys = {key.replace("{arch}", architecture): value for key, value in own.items()}
    for key, value in {**keys, **(vocab or {}), **(extra or {})}.items():
        if value is not None:
            add(writer, key, value)
    for name, values in tensors(folder, config, architecture):
        kind = pick if isinstance(pick, Kind) else pick(name, values)
        if values.ndim == 1 or is_kept(name) or name.endswith(("ffn_gate_inp.weight", ".bias")):
            kind = Kind.F32
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=Kind.MXFP4)
        else:
            writer.add_tensor(name, quantized(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0] if split else path


def _spelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with names that most families have, too."""
    found = {**config, **{new: config[own] for own, new in SPELLED.items() if own in config}}
    if config["model_type"] in ("gpt2", "gpt_bigcode"):
        found["intermediate_size"] = config["n_inner"] or 4 * config["n_embd"]
    if config["model_type"] == "falcon":
        many = config["new_decoder_architecture"] or not config["multi_query"]
        found["num_key_value_heads"] = config["num_kv_heads"] if many else 1
        found["tensor_data_layout"] = "jploski"
    return found


def is_kept(name: str) -> bool:
    """Whether a tensor stays in F32 for another reason than its shape."""
    return "conv" in name and "proj" not in name


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a key as the type that llama.cpp's converter gives it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def quantized(values: Array, kind: Kind) -> NDArray[Any]:
    """A matrix in a type, by the package gguf, or where it cannot by random blocks."""
    try:
        found: NDArray[Any] = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        found = random_blocks(values.shape, kind)
    return found


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of a type in which no scale is large, and none no number."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = math.prod(shape[:-1])
    generator = np.random.default_rng([seed, int(kind)])
    found = generator.integers(0, 256, (rows, shape[-1] // size, num_bytes), np.uint8)
    for place in SCALES[kind]:
        scales = generator.uniform(0.001, 0.004, (rows, shape[-1] // size)).astype(np.float16)
        found[..., place : place + 2] = scales[..., None].view(np.uint8)
    if kind == Kind.IQ1_M:  # whose scale lies in the upper halves of four bytes
        found[..., 49::2] = found[..., 49::2] & 15 | np.array([0, 0, 0, 16], np.uint8)
    return found.reshape(*shape[:-1], -1)


# Where a block has its scales in float16.
SCALES: Mapping[Kind, tuple[int, ...]] = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,),
    Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,),
    Kind.IQ1_S: (0,),
    Kind.IQ4_NL: (0,),
    Kind.Q1_0: (0,),
    Kind.IQ4_XS: (0,),
    Kind.IQ1_M: (),
    Kind.NVFP4: (),  # scales of 8 bits, which are all numbers
}


def metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Keys of a model, `{arch}` where its architecture goes."""
    rope = config.get("rope_parameters") or {}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or hidden // heads
    epsilons = [(name, config.get(name)) for name in ("rms_norm_eps", "norm_eps", *LAYER_NORMS)]
    epsilons += [("norm_epsilon", 1e-5)]  # OLMo's, which its configuration does not say
    epsilon, eps = next((name, one) for name, one in epsilons if one)
    has_layer_norms = epsilon in LAYER_NORMS or architecture == "nemotron"
    norm = "layer_norm_epsilon" if has_layer_norms else "layer_norm_rms_epsilon"
    if isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    keys: dict[str, Any] = {
        "general.name": "tiny",
        "general.type": "model",
        "general.file_type": 0,
        "{arch}.block_count": config["num_hidden_layers"],
        "{arch}.context_length": config["max_position_embeddings"],
        "{arch}.embedding_length": hidden,
        "{arch}.feed_forward_length": config["intermediate_size"],
        "{arch}.attention.head_count": heads,
        "{arch}.attention.head_count_kv": config.get("num_key_value_heads", heads),
        "{arch}.attention." + norm: float(eps),
        "{arch}.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        "{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "none",
    }
    if "use_parallel_residual" in config:
        keys["{arch}.use_parallel_residual"] = config["use_parallel_residual"]
    if "tensor_data_layout" in config:
        keys["{arch}.tensor_data_layout"] = config["tensor_data_layout"]
    if config.get("head_dim"):
        keys |= {"{arch}.attention.key_length": head, "{arch}.attention.value_length": head}
    whole = (
        "llama",
        "phi3",
        "granite",
        "granite_swa",
        "granitemoe",
        "smollm3",
        "glm4moe",
        "arcee",
        "cohere2",
    )
    if architecture in (*whole, *PARTIAL):
        partial = rope.get("partial_rotary_factor", 1.0)
        keys["{arch}.rope.dimension_count"] = int(head * partial)
    keys |= _scaling(rope, config) | _experts(config)
    if "embedding_multiplier" in config:
        keys |= {
            "{arch}.attention.scale": float(config["attention_multiplier"]),
            "{arch}.embedding_scale": float(config["embedding_multiplier"]),
            "{arch}.residual_scale": float(config["residual_multiplier"]),
            "{arch}.logit_scale": float(config["logits_scaling"]),
        }
    if architecture in ("gemma2", "gemma3", "gpt-oss", "phi3"):
        keys["{arch}.attention.sliding_window"] = config.get("sliding_window") or 0
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(cap):
            keys["{arch}." + cap] = float(config[cap])
    return keys | recent(config, architecture, head)


def recent(config: Mapping[str, Any], architecture: str, head: int) -> dict[str, Any]:
    """Keys that are of one architecture, as llama.cpp's `conversion/` has them."""
    types = config.get("layer_types") or []
    keys: dict[str, Any] = {}
    if architecture in ("command-r", "cohere2"):
        keys["{arch}.logit_scale"] = float(config["logit_scale"])
        keys["{arch}.rope.scaling.type"] = "none"
    sliding = ("cohere2", "exaone4", "exaone-moe", "afmoe", "olmo2")
    if architecture in sliding and config.get("sliding_window"):
        keys["{arch}.attention.sliding_window"] = config["sliding_window"]
        if architecture != "cohere2":
            pattern = [kind == "sliding_attention" for kind in types]
            keys["{arch}.attention.sliding_window_pattern"] = pattern
    if architecture == "olmo" and config.get("clip_qkv"):
        keys["{arch}.attention.clamp_kqv"] = config["clip_qkv"]
    if architecture == "granite_swa":
        keys["{arch}.attention.sliding_window"] = config["sliding_window"]
        pattern = [kind == "sliding_attention" for kind in types]
        keys["{arch}.attention.sliding_window_pattern"] = pattern
        rotated = [bool(base) for base in config["layer_rope_theta"]]
        keys["{arch}.attention.rope_pattern"] = rotated
    if architecture == "ernie4_5-moe":
        shared = config["intermediate_size"] // config["num_key_value_heads"]  # as it is written
        keys["{arch}.expert_count"] = config["moe_num_experts"]
        keys["{arch}.expert_used_count"] = config["moe_k"]
        keys["{arch}.expert_feed_forward_length"] = config["moe_intermediate_size"]
        keys["{arch}.expert_shared_count"] = config["moe_num_shared_experts"]
        keys["{arch}.expert_shared_feed_forward_length"] = shared
        keys["{arch}.interleave_moe_layer_step"] = config["moe_layer_interval"]
        keys["{arch}.leading_dense_block_count"] = config["moe_layer_start_index"]
    if architecture == "minimax-m2":
        keys["{arch}.expert_feed_forward_length"] = config["intermediate_size"]
        keys["{arch}.rope.dimension_count"] = config.get("rotary_dim") or head
        keys["{arch}.expert_gating_func"] = 2
    if architecture in ("lfm2", "lfm2moe"):
        kv = config["num_key_value_heads"]
        keys["{arch}.attention.head_count_kv"] = [0 if kind == "conv" else kv for kind in types]
        keys["{arch}.shortconv.l_cache"] = config["conv_L_cache"]
    if architecture == "lfm2":
        adjusted = -(-(2 * config["intermediate_size"] // 3) // config["block_multiple_of"])
        size = adjusted * config["block_multiple_of"]
        if config["block_auto_adjust_ff_dim"]:
            keys["{arch}.feed_forward_length"] = size
    if architecture == "lfm2moe":
        keys["{arch}.leading_dense_block_count"] = config["num_dense_layers"]
        keys["{arch}.expert_gating_func"] = 2
    if architecture == "afmoe":
        keys["{arch}.expert_shared_count"] = config["num_shared_experts"]
        keys["{arch}.leading_dense_block_count"] = config["num_dense_layers"]
        keys["{arch}.expert_weights_norm"] = True
        keys["{arch}.expert_weights_scale"] = float(config["route_scale"])
        keys["{arch}.expert_gating_func"] = 2
    if architecture == "hunyuan-moe":
        size = config["intermediate_size"]
        keys["{arch}.expert_used_count"] = config["moe_topk"]
        keys["{arch}.expert_feed_forward_length"] = size
        keys["{arch}.expert_shared_feed_forward_length"] = size
        keys["{arch}.expert_shared_count"] = 1
    if architecture.startswith("hunyuan"):
        rope = config["rope_parameters"]
        if rope.get("alpha"):
            theta = rope["rope_theta"] * rope["alpha"] ** (head / (head - 2))
            keys["{arch}.rope.freq_base"] = float(theta)
            keys["{arch}.rope.scaling.type"] = "none"
            keys["{arch}.rope.scaling.factor"] = 1.0
            context = config["max_position_embeddings"]
            keys["{arch}.rope.scaling.original_context_length"] = context
    if architecture == "exaone-moe":
        size, shared = config["moe_intermediate_size"], config["num_shared_experts"]
        keys["{arch}.expert_shared_count"] = shared
        keys["{arch}.expert_shared_feed_forward_length"] = size * shared
        keys["{arch}.expert_weights_scale"] = float(config["routed_scaling_factor"])
        keys["{arch}.expert_weights_norm"] = config["norm_topk_prob"]
        keys["{arch}.leading_dense_block_count"] = 1
        keys["{arch}.rope.scaling.type"] = "none"
    if config.get("n_group") and architecture in ("exaone-moe", "deepseek2"):
        keys["{arch}.expert_group_count"] = config["n_group"]
        keys["{arch}.expert_group_used_count"] = config["topk_group"]
    if architecture == "deepseek2":
        keys |= _latent(config)
    if architecture in DELTA_NETS:
        heads = config["linear_num_value_heads"]
        keys["{arch}.ssm.conv_kernel"] = config["linear_conv_kernel_dim"]
        keys["{arch}.ssm.state_size"] = config["linear_key_head_dim"]
        keys["{arch}.ssm.group_count"] = config["linear_num_key_heads"]
        keys["{arch}.ssm.time_step_rank"] = heads
        keys["{arch}.ssm.inner_size"] = config["linear_value_head_dim"] * heads
        keys["{arch}.full_attention_interval"] = 4
        partial = config["rope_parameters"].get("partial_rotary_factor", 0.25)
        keys["{arch}.rope.dimension_count"] = int(head * partial)
    return keys


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of DeepSeek's attention: sizes of what is cached, and of heads."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    keys: dict[str, Any] = {
        "{arch}.attention.head_count_kv": 1,
        "{arch}.attention.kv_lora_rank": rank,
        "{arch}.attention.key_length": rank + rope,
        "{arch}.attention.value_length": rank,
        "{arch}.attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "{arch}.attention.value_length_mla": config["v_head_dim"],
        "{arch}.rope.dimension_count": rope,
    }
    if config.get("q_lora_rank"):
        keys["{arch}.attention.q_lora_rank"] = config["q_lora_rank"]
    magnitude = config["rope_parameters"].get("mscale_all_dim")
    if magnitude is not None:
        keys["{arch}.rope.scaling.yarn_log_multiplier"] = 0.1 * magnitude
    if config["model_type"] == "deepseek_v2":  # which says none of a function of scores
        keys["{arch}.expert_gating_func"] = 1
    return keys


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    kind, prefix = rope.get("rope_type", "default"), "{arch}.rope.scaling."
    original = rope.get("original_max_position_embeddings")
    if kind == "linear":
        return {prefix + "type": kind, prefix + "factor": float(rope["factor"])}
    if kind == "yarn":
        return {
            prefix + "type": kind,
            prefix + "factor": float(rope["factor"]),
            prefix + "original_context_length": original,
        }
    if kind == "longrope":
        scale = config["max_position_embeddings"] / original
        magnitude = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        return {
            prefix + "original_context_length": original,
            prefix + "attn_factor": magnitude,
        }
    assert kind in ("default", "llama3") or rope.get("alpha"), kind
    return {}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    routed = config.get("n_routed_experts")
    count = config.get("num_local_experts", config.get("num_experts", routed))
    if not count:
        return {}
    keys: dict[str, Any] = {}
    if routed:
        keys = {
            "{arch}.expert_gating_func": 2,
            "{arch}.expert_shared_count": config["n_shared_experts"],
            "{arch}.expert_weights_norm": config.get("norm_topk_prob", False),
            "{arch}.expert_weights_scale": float(config["routed_scaling_factor"]),
            "{arch}.leading_dense_block_count": config["first_k_dense_replace"],
        }
    keys |= {
        "{arch}.expert_count": count,
        "{arch}.expert_used_count": config.get("num_experts_per_tok", config.get("moe_topk")),
    }
    for key, name in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_intermediate_size"),
    ):
        if config.get(name):
            keys["{arch}." + key] = config[name]
    return keys


def tensors(
    folder: Path, config: Mapping[str, Any], architecture: str
) -> Iterator[tuple[str, Array]]:
    """Every tensor by its name in the file."""
    known = NAMED_AS.get(architecture, architecture)
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found = {
        name: tensor.numpy() if tensor.dtype == torch.uint8 else tensor.float().numpy()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    found = dict(_gpt_oss(found)) if architecture == "gpt-oss" else found
    found = _with_head_norms_joined(dict(_recent(found, config, architecture)))
    for name, values in _with_experts_joined(found, apart=architecture != "granite_swa").items():
        spelled = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if "feed_forward.experts" in spelled:
            spelled = spelled.removeprefix("model.")
        base, dot, suffix = spelled.rpartition(".")
        if name.endswith("A_log"):
            base, dot, suffix = name, "", ""
        if architecture == "granite_swa" and (own := _of_granite_swa(name)):
            yield own, values
            continue
        target = names.get_name(base)
        assert target is not None, name
        yield target + dot + suffix, _changed(name, values, config)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(rope, config)
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)


def _of_granite_swa(name: str) -> str | None:
    """What the package gguf has no name for yet; None: it has one."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    for end, new in GRANITE_SWA.items():
        if name.endswith(end):
            return f"blk.{layer}.{new}.weight"
    return None


def _recent(
    found: Mapping[str, Array], config: Mapping[str, Any], architecture: str
) -> Iterator[tuple[str, Array]]:
    """What the converter does with tensors of recent families, and what they are called then."""
    for name, values in found.items():
        if "conv" in name and values.ndim == 3:
            values = values[:, 0]
        if name.endswith("kv_b_proj.weight"):
            keys, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
            both = values.reshape(heads, -1, values.shape[-1])
            k, v = both[:, :keys].swapaxes(1, 2), both[:, keys:]
            yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(k)
            yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(v)
            continue
        if architecture in DELTA_NETS:
            if name.endswith("in_proj_qkvz.weight"):
                yield from _by_kind(name, values, config)
                continue
            if architecture != "qwen3next" and "linear_attn" in name:
                values = _tiled(name, values, config)
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                values = values + np.float32(1)
            if name.endswith("A_log"):
                values = -np.exp(values)
            name = name.replace("dt_bias", "dt_proj.bias")
        yield name.replace("expert_bias", "expert_bias.bias"), values


def _tiled(name: str, values: Array, config: Mapping[str, Any]) -> Array:
    """First value heads of all key heads ahead of second ones, as Qwen3.5's files have them."""
    key_heads, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    behind = 2 * key_heads * config["linear_key_head_dim"]

    def moved(rows: Array) -> Array:
        groups = rows.reshape(key_heads, config["linear_num_value_heads"] // key_heads, -1)
        return np.ascontiguousarray(groups.swapaxes(0, 1)).reshape(rows.shape)

    kind = name.partition("linear_attn.")[2].removesuffix(".weight")
    if kind == "out_proj":
        return np.ascontiguousarray(moved(np.ascontiguousarray(values.T)).T)
    if kind in ("in_proj_qkv", "conv1d"):
        assert len(values) == behind + config["linear_num_value_heads"] * size
        return np.concatenate([values[:behind], moved(values[behind:])])
    return values if kind == "norm" else moved(values)


def _by_kind(name: str, values: Array, config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Queries, keys and values of all heads behind each other, and gates."""
    heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    share = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    parts = np.split(
        values.reshape(heads, -1, values.shape[-1]), [size, 2 * size, 2 * size + share], 1
    )
    q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in parts)
    yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate([q, k, v])
    yield name.replace("in_proj_qkvz", "in_proj_z"), z


def _gpt_oss(found: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Experts in MXFP4 as ggml packs it, and gate and up, whose rows take turns, apart."""
    for name, values in found.items():
        if name.endswith("_scales"):
            continue
        if name.endswith("_blocks"):
            scales = found[name.removesuffix("_blocks") + "_scales"]
            numbers = np.stack([values & 15, values >> 4], axis=-1).reshape(*scales.shape, 2, 16)
            packed = numbers[..., 0, :] | numbers[..., 1, :] << 4
            values = np.concatenate([scales[..., None], packed], axis=-1)
            values = values.reshape(*scales.shape[:-1], -1)
            name = name.replace("_blocks", ".weight")
        name = name.replace("_proj_bias", "_proj.bias").replace("self_attn.sinks", SINKS)
        if "gate_up_proj" not in name:
            yield name, values
            continue
        for at, part in enumerate(("gate", "up")):
            yield name.replace("gate_up_proj", f"{part}_proj"), values[:, at::2].copy()


def _with_head_norms_joined(found: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Norms of a layer's heads in one tensor of queries, and one of keys: StableLM's."""
    kept = {name: values for name, values in found.items() if "_layernorm.norms." not in name}
    for name in found:
        prefix, apart, rest = name.partition(".norms.")
        if apart and rest == "0.weight":
            heads = sum(one.startswith(f"{prefix}{apart}") for one in found)
            parts = [found[f"{prefix}{apart}{head}.weight"] for head in range(heads)]
            kept[f"{prefix}.weight"] = np.stack(parts)
    return kept


def _with_experts_joined(found: Mapping[str, Array], *, apart: bool = True) -> dict[str, Array]:
    """Experts of a layer in one tensor a product; gate and up each in one, unless not `apart`."""
    parts: dict[str, list[Array]] = {}
    kept: dict[str, Array] = {}
    places = {name: int(match[2]) for name in found if (match := _EXPERT.fullmatch(name))}
    for name in sorted(places, key=places.__getitem__):
        match = _EXPERT.fullmatch(name)
        assert match is not None
        parts.setdefault(f"{match[1]}.{match[3]}.weight", []).append(found[name])
    for name, values in found.items():
        joined = next((one for one in _JOINED if name.endswith(f"{one}.weight")), None)
        joined = joined if apart else None
        if name in places:
            continue
        if joined is None:
            kept[name] = values
            continue
        pieces = np.split(values, len(_JOINED[joined]), axis=-2)
        for part, piece in zip(_JOINED[joined], pieces, strict=True):
            new = "mlp.shared_expert" if "shared_mlp" in name else "mlp.experts"
            prefix = name.partition(".shared_mlp" if "shared_mlp" in name else ".block_sparse")[0]
            kept[f"{prefix}.{new}.{part}_proj.weight"] = piece
    return kept | {name: np.stack(values) for name, values in parts.items()}


def _changed(name: str, values: Array, config: Mapping[str, Any]) -> Array:
    """What the converter does with a tensor's numbers."""
    family = config["model_type"]
    is_less_one = family.startswith("gemma") or family == "nemotron"
    if is_less_one and name.endswith("norm.weight"):
        return values + np.float32(1)
    if ".query_key_value." in name:  # of each head of keys its queries, key and value
        heads, groups = config["num_attention_heads"], config["num_attention_heads"]
        if family == "falcon":
            groups = config["num_key_value_heads"]
        size = config["hidden_size"] // heads
        parts = values.reshape(groups, (heads // groups + 2) * size, *values.shape[1:])
        kinds = np.split(parts, [heads // groups * size, (heads // groups + 1) * size], axis=1)
        return np.concatenate([one.reshape(-1, *values.shape[1:]) for one in kinds])
    if family == "gpt2" and values.ndim == 2 and ".c_" in name:  # [inputs, outputs]
        return np.ascontiguousarray(values.T)
    kind = name.rpartition("self_attn.")[2].partition("_proj")[0]
    if family in NEIGHBOURS and kind in ("q", "k"):
        heads = config["num_attention_heads" if kind == "q" else "num_key_value_heads"]
        split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
    return values[0] if name.endswith("shared_expert_gate.weight") else values


def llama3_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    """What Llama 3.1's scaling divides frequencies by."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies.tolist():
        length = 2 * math.pi / frequency
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
