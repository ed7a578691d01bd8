"""What adapters in GGUF files add to: tensors of the model, by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.gguf.layouts import layout
from onnxport.graphs.linear_spec import LinearAttentionSpec, StateSpaceSpec
from onnxport.graphs.lora import KINDS, Projection, projection_shapes
from onnxport.graphs.lora_module import Module, block_of
from onnxport.graphs.spec import ArchSpec

# Families whose models are of an architecture in llama.cpp. Without those that no provider adapts:
# latent attention, and layers that differ in their heads.
FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "afmoe": ("afmoe",),
    "apertus": ("apertus",),
    "arcee": ("arcee",),
    "bailingmoe2": ("bailing_moe", "sarvam_moe"),
    "cohere2": ("cohere2",),
    "cohere2moe": ("cohere2_moe",),
    "command-r": ("cohere",),
    "dots1": ("dots1",),
    "ernie4_5": ("ernie4_5",),
    "ernie4_5-moe": ("ernie4_5_moe",),
    "exaone-moe": ("exaone_moe",),
    "exaone4": ("exaone4",),
    "falcon": ("falcon",),
    "falcon-h1": ("falcon_h1",),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3_text",),
    "glm4": ("glm4",),
    "glm4moe": ("glm4_moe", "solar_open"),
    "gpt-oss": ("gpt_oss",),
    "gpt2": ("gpt2",),
    "gptneox": ("gpt_neox",),
    "granite": ("granite", "granitemoehybrid"),
    "granite_swa": ("granite_swa", "granitemoe_swa"),
    "granitehybrid": ("bamba", "granitemoehybrid"),
    "granitemoe": ("granitemoe", "granitemoehybrid", "granitemoeshared"),
    "hunyuan-dense": ("hunyuan_v1_dense",),
    "hunyuan-moe": ("hunyuan_v1_moe",),
    "hy_v3": ("hy_v3",),
    "jais2": ("jais2",),
    "laguna": ("laguna",),
    "lfm2": ("lfm2",),
    "lfm2moe": ("lfm2_moe",),
    "llama": ("internlm3", "llama", "mistral", "mixtral"),
    "llama4": ("llama4_text",),
    "mellum": ("mellum",),
    "minimax-m2": ("minimax_m2",),
    "nemotron": ("nemotron",),
    "nemotron_h": ("nemotron_h",),
    "nemotron_h_moe": ("nemotron_h",),
    "olmo": ("olmo",),
    "olmo2": ("olmo2", "olmo3"),
    "olmoe": ("olmoe",),
    "orion": ("orion",),
    "phi2": ("phi",),
    "phi3": ("phi3",),
    "qwen2": ("qwen2",),
    "qwen2moe": ("qwen2_moe",),
    "qwen3": ("qwen3",),
    "qwen35": ("qwen3_5_text",),
    "qwen35moe": ("qwen3_5_moe_text",),
    "qwen3moe": ("qwen3_moe",),
    "qwen3next": ("qwen3_next",),
    "seed_oss": ("seed_oss",),
    "smollm3": ("smollm3",),
    "stablelm": ("stablelm",),
    "starcoder": ("gpt_bigcode",),
    "starcoder2": ("starcoder2",),
}

_Parts = tuple[Projection, ...]
_Q, _K, _V = KINDS["qkv"]


def modules_of(architecture: str, base: ArchSpec) -> dict[str, Module]:
    """Return what adapters may add to, by names such as `blk.0.attn_q.weight`."""
    names, found = layout(architecture, joins_qkv=False), {}
    for layer in range(base.num_layers):
        shapes = projection_shapes(base, layer)
        for name, projections, heads in _of_layer(base, layer, names):
            block = block_of(base, layer, projections[0]) if names.blocks else layer
            parts = tuple((one, shapes[one][0]) for one in projections)
            tensor = f"{names.layer.format(block)}{name}.weight"
            found[tensor] = Module(layer, parts, shapes[projections[0]][1], heads)
    return found


def num_blocks(architecture: str, base: ArchSpec) -> int:
    """How many blocks a file of the model has: its layers, or what these are made of."""
    parts = sum(map(base.has_mlp, range(base.num_layers)))
    return base.num_layers + parts * layout(architecture, joins_qkv=False).blocks


def _of_layer(base: ArchSpec, layer: int, names: TensorNames) -> Iterator[tuple[str, _Parts, int]]:
    """The tensors of a layer: what they compute, and by how many heads their rows lie."""
    if base.has_attention(layer):
        yield from _of_attention(base, names)
    if base.is_linear(layer):
        yield from _of_state(base, names)
    if base.experts_of(layer) is not None or not base.has_mlp(layer):
        return
    (down,) = names.down
    yield down, ("down_proj",), 1
    if base.ungated:
        yield names.up, ("up_proj",), 1
    elif len(names.gate_up) == 1:
        yield names.gate_up[0], ("gate_proj", "up_proj"), 1
    else:
        yield names.gate_up[0], ("gate_proj",), 1
        yield names.gate_up[1], ("up_proj",), 1


def _of_attention(base: ArchSpec, names: TensorNames) -> Iterator[tuple[str, _Parts, int]]:
    (o,) = names.o
    yield o, ("o_proj",), 1
    if len(names.qkv) == 1:
        yield names.qkv[0], (_Q, _K, _V), 1
        return
    q, k, v = names.qkv
    yield k, (_K,), 1
    yield v, (_V,), 1
    if not base.attention_gate:
        yield q, (_Q,), 1
    elif names.attention_gate is None:  # below each query
        yield q, (_Q, "attention_gate"), base.num_heads
    else:
        yield q, (_Q,), 1
        yield names.attention_gate, ("attention_gate",), 1


def _of_state(base: ArchSpec, names: TensorNames) -> Iterator[tuple[str, _Parts, int]]:
    if isinstance(base.linear, StateSpaceSpec):
        yield names.space_in, ("linear_z", "linear_mixed", "linear_dt"), 1
        yield names.space_o, ("linear_o" if base.has_both else "o_proj",), 1
        return
    (o,) = names.linear_o
    yield o, ("o_proj",), 1
    if not isinstance(base.linear, LinearAttentionSpec):
        yield names.linear_in[0], KINDS["linear.in"], 1
        return
    qkv, z, *gates = names.linear_in
    yield qkv, ("linear_qkv",), 1
    yield z, ("linear_z",), 1
    if len(gates) == 1:  # by key heads
        yield gates[0], KINDS["linear.ba"], base.linear.key_heads
    else:
        yield gates[0], ("linear_b",), 1
        yield gates[1], ("linear_a",), 1
