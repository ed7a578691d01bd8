"""What modules of a trained model compute: the projections of its layers, by PEFT's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from onnxport.graphs.linear_spec import LinearAttentionSpec
from onnxport.graphs.lora import PROJECTIONS, Projection, projection_shapes
from onnxport.graphs.lora_module import Module, block_of
from onnxport.graphs.spec import ArchSpec

EXAONES: Final = "transformer.h"  # where published EXAONE 3 has its layers
# A module of a layer -> the projections that it computes, one below the other.
_Modules = Mapping[str, tuple[Projection, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What a family calls the modules of a layer."""

    attention: _Modules
    state: _Modules  # of a layer that keeps a state in place of keys and values
    feed_forward: _Modules

    def of_layer(self, base: ArchSpec, layer: int) -> _Modules:
        """Those that a layer has, experts aside."""
        mixer = {
            **(self.attention if base.has_attention(layer) else {}),
            **(self.state if base.is_linear(layer) else {}),
        }
        own = projection_shapes(base, layer).keys()
        return {
            name: projections
            for name, projections in {**mixer, **self.feed_forward}.items()
            if own >= set(projections)
        }


_Q, _K, _V, _O = PROJECTIONS[:4]
_ATTENTION: Final[_Modules] = {f"self_attn.{name}": (name,) for name in PROJECTIONS[:4]}
_GATED: Final[_Modules] = {**_ATTENTION, "self_attn.q_proj": (_Q, "attention_gate")}
_MLP: Final[_Modules] = {f"mlp.{name}": (name,) for name in PROJECTIONS[4:]}
_JOINED_MLP: Final[_Modules] = {
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
_SPACE: Final[_Modules] = {
    "mamba.in_proj": ("linear_z", "linear_mixed", "linear_dt"),
    "mamba.out_proj": (_O,),
}
_PLAIN: Final = _Names(attention=_ATTENTION, state={}, feed_forward=_MLP)
_GLM: Final = replace(_PLAIN, feed_forward=_JOINED_MLP)
_QWEN_3_5: Final = _Names(
    attention=_GATED,
    state={
        "linear_attn.in_proj_qkv": ("linear_qkv",),
        "linear_attn.in_proj_z": ("linear_z",),
        "linear_attn.in_proj_b": ("linear_b",),
        "linear_attn.in_proj_a": ("linear_a",),
        "linear_attn.out_proj": (_O,),
    },
    feed_forward=_MLP,
)
_LFM2: Final = _Names(
    attention={
        **{f"self_attn.{name}": (name,) for name in PROJECTIONS[:3]},
        "self_attn.out_proj": (_O,),
    },
    state={
        "conv.in_proj": ("conv_before", "conv_behind", "conv_values"),
        "conv.out_proj": (_O,),
    },
    feed_forward={
        "feed_forward.w1": ("gate_proj",),
        "feed_forward.w3": ("up_proj",),
        "feed_forward.w2": ("down_proj",),
    },
)
_WITH_GATES: Final[_Modules] = {**_ATTENTION, "self_attn.g_proj": ("attention_gate",)}
_LFM3: Final = replace(_LFM2, attention=_WITH_GATES)
_NEOX: Final = replace(
    _PLAIN,
    attention={"attention.query_key_value": (_Q, _K, _V), "attention.dense": (_O,)},
    feed_forward={"mlp.dense_h_to_4h": ("up_proj",), "mlp.dense_4h_to_h": ("down_proj",)},
)
_GPT2: Final = replace(
    _PLAIN,
    attention={"attn.c_attn": (_Q, _K, _V), "attn.c_proj": (_O,)},
    feed_forward={"mlp.c_fc": ("up_proj",), "mlp.c_proj": ("down_proj",)},
)
_EXAONE: Final = _Names(
    attention={
        **{f"attn.attention.{name}": (name,) for name in PROJECTIONS[:3]},
        "attn.attention.out_proj": (_O,),
    },
    state={},
    feed_forward={
        "mlp.c_fc_0": ("gate_proj",),
        "mlp.c_fc_1": ("up_proj",),
        "mlp.c_proj": ("down_proj",),
    },
)
_OTHERS: Final[Mapping[str, _Names]] = {  # by family
    "afmoe": replace(_PLAIN, attention={**_ATTENTION, "self_attn.gate_proj": ("attention_gate",)}),
    "bailing_moe": replace(
        _PLAIN,
        attention={"attention.query_key_value": (_Q, _K, _V), "attention.dense": (_O,)},
    ),
    "phi3": replace(
        _GLM,
        attention={"self_attn.qkv_proj": (_Q, _K, _V), "self_attn.o_proj": (_O,)},
    ),
    "glm": _GLM,
    "glm4": _GLM,
    "internlm2": replace(
        _LFM2, attention={"attention.wqkv": (_Q, _K, _V), "attention.wo": (_O,)}, state={}
    ),
    "phi": replace(
        _PLAIN,
        attention={
            **{f"self_attn.{name}": (name,) for name in PROJECTIONS[:3]},
            "self_attn.dense": (_O,),
        },
        feed_forward={"mlp.fc1": ("up_proj",), "mlp.fc2": ("down_proj",)},
    ),
    "starcoder2": replace(
        _PLAIN, feed_forward={"mlp.c_fc": ("up_proj",), "mlp.c_proj": ("down_proj",)}
    ),
    "opt": replace(
        _PLAIN,
        attention={
            **{f"self_attn.{name}": (name,) for name in PROJECTIONS[:3]},
            "self_attn.out_proj": (_O,),
        },
        feed_forward={"fc1": ("up_proj",), "fc2": ("down_proj",)},
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": replace(
        _PLAIN,
        attention={
            **{f"attn.{name}": (name,) for name in PROJECTIONS[:3]},
            "attn.out_proj": (_O,),
        },
        feed_forward={"mlp.fc_in": ("up_proj",), "mlp.fc_out": ("down_proj",)},
    ),
    "falcon": replace(
        _NEOX,
        attention={"self_attention.query_key_value": (_Q, _K, _V), "self_attention.dense": (_O,)},
    ),
    "gpt_neox": _NEOX,
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_5_moe_text": _QWEN_3_5,
    "qwen3_next": replace(
        _QWEN_3_5,
        state={
            "linear_attn.in_proj_qkvz": ("linear_qkv", "linear_z"),
            "linear_attn.in_proj_ba": ("linear_b", "linear_a"),
            "linear_attn.out_proj": (_O,),
        },
    ),
    "olmo_hybrid": replace(
        _PLAIN,
        state={
            **{f"linear_attn.{name}": ("linear_qkv",) for name in PROJECTIONS[:3]},
            "linear_attn.g_proj": ("linear_z",),
            "linear_attn.b_proj": ("linear_b",),
            "linear_attn.a_proj": ("linear_a",),
            "linear_attn.o_proj": (_O,),
        },
    ),
    "granitemoehybrid": _Names(
        attention=_ATTENTION,
        state=_SPACE,
        feed_forward={
            "shared_mlp.input_linear": ("gate_proj", "up_proj"),
            "shared_mlp.output_linear": ("down_proj",),
        },
    ),
    "bamba": _Names(
        attention=_ATTENTION,
        state=_SPACE,
        feed_forward={f"feed_forward.{name}": (name,) for name in PROJECTIONS[4:]},
    ),
    "falcon_h1": _Names(
        attention=_ATTENTION,
        state={**_SPACE, "mamba.out_proj": ("linear_o",)},
        feed_forward={f"feed_forward.{name}": (name,) for name in PROJECTIONS[4:]},
    ),
    "nanochat": replace(_PLAIN, feed_forward={"mlp.fc1": ("up_proj",), "mlp.fc2": ("down_proj",)}),
    "nemotron_h": _Names(
        attention={f"mixer.{name}": (name,) for name in PROJECTIONS[:4]},
        state={name.replace("mamba", "mixer"): one for name, one in _SPACE.items()},
        feed_forward={"mixer.up_proj": ("up_proj",), "mixer.down_proj": ("down_proj",)},
    ),
    "laguna": replace(_PLAIN, attention=_WITH_GATES),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": _LFM3,
    "llama4_text": replace(
        _PLAIN, feed_forward={f"feed_forward.{name}": (name,) for name in PROJECTIONS[4:]}
    ),
}
# Families whose queries, keys and values of each head of keys lie together.
_BY_HEAD: Final = frozenset({"falcon", "gpt_bigcode", "gpt_neox", "internlm2"})
# Modules that make one of queries, keys and values of delta nets; which one.
_OF_DELTA_NETS: Final = {f"linear_attn.{one}": at for at, one in enumerate(PROJECTIONS[:3])}
# Families whose feed-forward layers have the number behind that of what is ahead of them.
_OF_BLOCKS: Final = frozenset({"nemotron_h"})


def numbers_of(base: ArchSpec) -> int:
    """How many numbers names of modules have: of layers, or of the blocks that they are made of."""
    blocks = sum(map(base.has_mlp, range(base.num_layers))) if base.family in _OF_BLOCKS else 0
    return base.num_layers + blocks


def modules_of(base: ArchSpec, parent: str = "model.layers") -> dict[str, Module]:
    """Return what adapters may add to, by names such as `layers.0.self_attn.q_proj`.

    `parent` is what the layers are in, which of some families tells what their modules are called.
    """
    published = base.family == "exaone" and parent == EXAONES
    names = _EXAONE if published else _OTHERS.get(base.family, _PLAIN)
    found = {}
    for layer in range(base.num_layers):
        shapes = projection_shapes(base, layer)
        for name, projections in names.of_layer(base, layer).items():
            block = layer
            if base.family in _OF_BLOCKS:
                block = block_of(base, layer, projections[0])
            parts = [part for one in projections for part in _parts(base, one, shapes[one][0])]
            columns, heads = shapes[projections[0]][1], _heads(base, projections)
            module = Module(layer, tuple(parts), columns, heads)
            found[f"layers.{block}.{name}"] = _one_of_three(name, module)
    return found


def _parts(base: ArchSpec, projection: Projection, rows: int) -> list[tuple[Projection, int]]:
    """The parts of a projection: of delta nets' queries, keys and values each."""
    if projection != "linear_qkv":
        return [(projection, rows)]
    assert isinstance(base.linear, LinearAttentionSpec)
    sizes = (base.linear.key_width, base.linear.key_width, base.linear.value_width)
    return [(projection, size) for size in sizes]


def _one_of_three(name: str, module: Module) -> Module:
    """The module, whose rows may be those of delta nets' queries, keys or values alone."""
    place = _OF_DELTA_NETS.get(name)
    if place is None:
        return module
    rows = [count for _, count in module.parts]
    ahead, behind = sum(rows[:place]), sum(rows[place + 1 :])
    return replace(module, parts=(module.parts[place],), ahead=ahead, behind=behind)


def _heads(base: ArchSpec, projections: tuple[Projection, ...]) -> int:
    """By how many heads the rows of a module lie; 1: not by heads."""
    if "attention_gate" in projections and len(projections) > 1:
        return base.num_heads
    if base.family in _BY_HEAD and "q_proj" in projections:
        return base.num_kv_heads
    if base.family == "qwen3_next" and len(projections) > 1:  # of delta nets
        assert isinstance(base.linear, LinearAttentionSpec)
        return base.linear.key_heads
    return 1
