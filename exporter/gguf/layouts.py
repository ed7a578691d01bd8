"""What GGUF files call the tensors of each family.

Names: llama.cpp's `src/llama-arch.cpp`. Experts of a layer are in one tensor for each product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.exporter import mxfp4
from onnxport.exporter.families.base import TensorNames

ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
GATE_BIAS: Final = "ffn_gate_exps.bias"
UP_BIAS: Final = "ffn_up_exps.bias"
GATE_UP_BIAS: Final = "ffn_gate_up_exps.bias"  # of these two, as no file has it
GATE_UP: Final = "ffn_gate_up_exps.weight"  # of gate and up of all experts
GATE: Final = "attn_gate"  # of attention
ROUTER: Final = "ffn_gate_inp.weight"
CORRECTION: Final = "exp_probs_b.bias"
SCORE_ROWS: Final = "cls.output.weight"  # of models that judge pairs
SECOND_NORM: Final = "attn_norm_2.weight"
QKV: Final = "attn_qkv"  # one product of queries, keys and values
DECAYS: Final = "ssm_a"  # of layers with a state: -exp of what other checkpoints have
SKIPS: Final = "ssm_d"
SPACE_NORM: Final = "ssm_norm.weight"

LAYOUT: Final = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    positions="position_embd.weight",
    layer="blk.{}.",
    input_norm="attn_norm.weight",
    qkv=("attn_q", "attn_k", "attn_v"),
    q_norm="attn_q_norm.weight",
    k_norm="attn_k_norm.weight",
    o=("attn_output",),
    post_norm="ffn_norm.weight",
    gate_up=("ffn_gate", "ffn_up"),
    down=("ffn_down",),
    up="ffn_up",
    router="ffn_gate_inp",
    expert_gate_up=("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    expert_down=("ffn_down_exps.weight",),
    correction=CORRECTION,
    shared_gate_up=("ffn_gate_shexp", "ffn_up_shexp"),
    shared_down=("ffn_down_shexp",),
    shared_gate="ffn_gate_inp_shexp",
    activation="xielu.",
    o_norm="post_attention_norm.weight",
    down_norm="post_ffw_norm.weight",
    # Of which tables of the RoPE are made, and a score head.
    ignored=(ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS, SCORE_ROWS),
)
_CONVOLUTIONS: Final[Mapping[str, Any]] = {
    "final_norm": "token_embd_norm.weight",
    "linear_in": ("shortconv.in_proj",),
    "linear_conv": "shortconv.conv.weight",
    "linear_o": ("shortconv.out_proj",),
    "conv_axes": (),
}
_DELTA_NETS: Final[Mapping[str, Any]] = {
    "post_norm": "post_attention_norm.weight",
    "linear_in": (QKV, "attn_gate", "ssm_beta", "ssm_alpha"),
    "linear_conv": "ssm_conv1d.weight",
    "linear_a_log": DECAYS,
    "linear_dt_bias": "ssm_dt.bias",
    "linear_norm": "ssm_norm.weight",
    "linear_o": ("ssm_out",),
    "conv_axes": (),
}
_SPACES: Final[Mapping[str, Any]] = {
    "space_in": "ssm_in",
    "space_conv": "ssm_conv1d.weight",
    "space_conv_bias": "ssm_conv1d.bias",
    "space_a_log": DECAYS,
    "space_dt_bias": "ssm_dt.bias",
    "space_skip": SKIPS,
    "space_norm": SPACE_NORM,
    "space_o": "ssm_out",
    "conv_axes": (),
}
_BLOCKS: Final[Mapping[str, Any]] = {
    **_SPACES,
    "blocks": True,
    "post_norm": "attn_norm.weight",
    "expert_gate_up": ("ffn_up_exps.weight",),
    "shared_gate_up": ("ffn_up_shexp",),
}
_LAYER_INPUTS: Final[Mapping[str, Any]] = {
    "layer_inputs": "per_layer_token_embd.weight",
    "layer_inputs_product": "per_layer_model_proj",
    "layer_inputs_norm": "per_layer_proj_norm.weight",
    "layer_input_gate": "inp_gate",
    "layer_input_out": "proj",
    "layer_input_norm": "post_norm.weight",
}
_GEMMA3N: Final[Mapping[str, Any]] = {
    **_LAYER_INPUTS,
    "altup_start": "altup_proj",
    "altup_merge": "altup_unembd_proj",
    "altup_router": "altup_router",
    "altup_router_norm": "altup_router_norm.weight",
    "altup_predict": "altup_predict_coef",
    "altup_correct": "altup_correct_coef",
    "altup_scale": "altup_correct_scale.weight",
    "laurel_left": "laurel_l",
    "laurel_right": "laurel_r",
    "laurel_norm": "laurel_post_norm.weight",
}
_GEMMA4: Final[Mapping[str, Any]] = {
    **_LAYER_INPUTS,
    "shared_gate_up": LAYOUT.gate_up,
    "shared_down": LAYOUT.down,
    "router_norm": "ffn_gate_inp.scale",
    "experts_norm": "pre_ffw_norm_2.weight",
    "experts_out_norm": "post_ffw_norm_2.weight",
    "shared_out_norm": "post_ffw_norm_1.weight",
    "expert_scales": "ffn_down_exps.scale",
    "layer_scale": "layer_output_scale.weight",
}
_LATENTS: Final[Mapping[str, Any]] = {
    "latent_q": "attn_q",
    "latent_q_a": "attn_q_a",
    "latent_q_norm": "attn_q_a_norm.weight",
    "latent_q_b": "attn_q_b",
    "latent_kv_a": "attn_kv_a_mqa",
    "latent_kv_norm": "attn_kv_a_norm.weight",
    "latent_apart": ("attn_k_b", "attn_v_b"),
}
_CONV: Final = "ssm_conv1d_{}.weight"
CONVS: Final = tuple(map(_CONV.format, "qkv"))  # of Kimi Delta Attention
_KIMI: Final[Mapping[str, Any]] = {
    **_LATENTS,
    "linear_in": LAYOUT.qkv,
    "linear_conv_apart": CONVS,
    "linear_a_log": DECAYS,
    "linear_dt_bias": "ssm_dt.bias",
    "linear_decay": ("ssm_f_a", "ssm_f_b"),
    "linear_gate": ("ssm_g_a", "ssm_g_b"),
    "linear_beta": "ssm_beta",
    "linear_norm": SPACE_NORM,
    "linear_o": LAYOUT.o,
    "conv_axes": (),
}
# What is called otherwise in some architectures.
_OTHERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "afmoe": {"attention_gate": GATE},
    **{name: {"gate_up": ("ffn_up",)} for name in ("chatglm", "glm4")},
    "deepseek2": _LATENTS,
    "falcon": {"qkv": (QKV,)},
    "falcon-h1": {**_SPACES, "post_norm": "ffn_norm"},
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "glm4moe": {"post_norm": "post_attention_norm.weight"},
    "gpt-oss": {
        "post_norm": "post_attention_norm.weight",
        "sinks": "attn_sinks.weight",
        "expert_blocks": (mxfp4.BLOCK_SIZE,),
        "expert_gate_up_bias": GATE_UP_BIAS,
        "expert_down_bias": "ffn_down_exps.bias",
    },
    **{name: {"qkv": (QKV,)} for name in ("gpt2", "gptneox", "starcoder")},
    "granite_swa": {"sinks": "attn_sinks.weight", "shared_gate_up": ("ffn_up_shexp",)},
    "granitehybrid": _SPACES,
    "hy_v3": {"correction": CORRECTION.removesuffix(".bias")},
    "kimi-linear": _KIMI,
    "laguna": {"attention_gate": GATE},
    "lfm2": _CONVOLUTIONS,
    "lfm2moe": _CONVOLUTIONS,
    "mimo2": {"sinks": "attn_sinks.weight"},
    "mistral4": _LATENTS,
    "nemotron_h": _BLOCKS,
    "nemotron_h_moe": _BLOCKS,
    "olmo": {"plain_norms": True},
    "phi3": {"qkv": ("attn_qkv",), "gate_up": ("ffn_up",)},
    "qwen35": _DELTA_NETS,
    "qwen35moe": _DELTA_NETS,
    "qwen3next": {**_DELTA_NETS, "linear_in": (QKV, "attn_gate", "ssm_ba")},
    "seed_oss": {"post_norm": "post_attention_norm.weight"},
}


def layout(architecture: str, *, joins_qkv: bool, has_second_norm: bool = False) -> TensorNames:
    """The names of an architecture's tensors; of a file whose first layer joins queries with keys.

    Where there is a second norm of what a layer reads, as of Falcon, it is attention's.
    Of architectures with delta nets those of attention never are: what is joined is others'.
    """
    names = replace(LAYOUT, **_OTHERS.get(architecture, {}))
    if has_second_norm:
        names = replace(names, input_norm=SECOND_NORM, post_norm=LAYOUT.input_norm)
    if joins_qkv and names.linear_in == LAYOUT.qkv:
        return replace(names, linear_in=(QKV,))
    return replace(names, qkv=(QKV,)) if joins_qkv and QKV not in names.linear_in else names
