"""What a LoRA adapter is: low-rank additions to the projections of a model.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021: a projection `y = x W^T`
becomes `y + (x A^T) B^T`, with the scaling of the adapter multiplied into B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.linear_spec import LinearAttentionSpec, StateSpaceSpec
from onnxport.graphs.spec import ArchSpec

OfMost = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The gate of attention; what delta nets and state spaces make of their input, as the roles of
# exporter.plan say; what these add beside attention; and the three parts that a short convolution
# makes of its input, in order.
OfSome = Literal[
    "attention_gate",
    "linear_qkv",
    "linear_z",
    "linear_b",
    "linear_a",
    "linear_mixed",
    "linear_dt",
    "linear_o",
    "conv_before",
    "conv_behind",
    "conv_values",
]
Projection = OfMost | OfSome
PROJECTIONS: Final[tuple[OfMost, ...]] = get_args(OfMost)  # that models without these have
OF_SOME: Final[tuple[OfSome, ...]] = get_args(OfSome)
OF_FEED_FORWARD: Final[frozenset[Projection]] = frozenset({"gate_proj", "up_proj", "down_proj"})

# A product of a paged graph, and the projections whose outputs it joins, in order.
Kind = Literal[
    "qkv",
    "o",
    "gate_up",
    "gate",
    "up",
    "down",
    "attention_gate",
    "linear.qkv",
    "linear.z",
    "linear.ba",
    "linear.mixed",
    "linear.dt",
    "linear.o",
    "linear.in",
    "linear.in.before",
    "linear.in.behind",
    "linear.in.values",
]
KINDS: Final[Mapping[Kind, tuple[Projection, ...]]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "gate": ("gate_proj",),
    "up": ("up_proj",),
    "down": ("down_proj",),
    "attention_gate": ("attention_gate",),
    "linear.qkv": ("linear_qkv",),
    "linear.z": ("linear_z",),
    "linear.ba": ("linear_b", "linear_a"),
    "linear.mixed": ("linear_mixed",),
    "linear.dt": ("linear_dt",),
    "linear.o": ("linear_o",),
    "linear.in": ("conv_before", "conv_behind", "conv_values"),
    "linear.in.before": ("conv_before",),
    "linear.in.behind": ("conv_behind",),
    "linear.in.values": ("conv_values",),
}
# What a product is where a pass has cut it in equal parts, in order.
CUT: Final[Mapping[Kind, tuple[Kind, ...]]] = {
    "gate_up": ("gate", "up"),
    "linear.in": ("linear.in.before", "linear.in.behind", "linear.in.values"),
}

# Inputs of a graph with LoRA; see graphs.passes.lora for who has which.
TOKEN_SLOTS: Final = "lora.token_slots"  # int32 [num_tokens], adapter slots; 0: none
RANKS: Final = "lora.ranks"  # int32 [max_adapters + 1, num_layers, len(projections_in(spec))]
WEIGHTS: Final = "lora.weights"  # [max_adapters, numbers of a slot], see `slot_layout`
# float32, the shape of RANKS and max_rank behind it: of integers what each row of B is times
SCALES: Final = "lora.scales"

# What adapters are kept in, in slots. Numbers of int4 lie two in a byte.
SlotDtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
INTEGERS: Final[tuple[SlotDtype, ...]] = ("int8", "int4")

PANEL: Final = 64  # numbers of a row that lie side by side in a slot; kLoraPanel in C++
INT4_ROWS: Final = 8  # rows of B in int4 whose numbers lie together; kLoraInt4Rows in C++
PRODUCT_PANEL: Final = 32  # outputs whose weights lie together; kPanel in C++
LINE: Final = 64  # bytes of a cache line


def owners_name(kind: Kind) -> str:
    """The adapter slot of each stacked row of a kind of product, int32 [rows]."""
    return f"lora.{kind}.owners"


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What is added to one projection."""

    a: NDArray[np.float32]  # [rank, in_features], host
    b: NDArray[np.float32]  # [out_features, rank], host; the scaling is in it

    @property
    def rank(self) -> int:
        """Columns of `b`."""
        return len(self.a)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter of one model: its shapes fit the model's projections."""

    deltas: Mapping[tuple[int, Projection], LoraDelta]  # by layer, from 0, and projection

    @property
    def rank(self) -> int:
        """The largest rank of all."""
        return max(self.ranks.values(), default=0)

    @property
    def ranks(self) -> dict[tuple[int, Projection], int]:
        """The rank of each delta."""
        return {key: delta.rank for key, delta in self.deltas.items()}


def projection_shapes(spec: ArchSpec, layer: int) -> dict[Projection, tuple[int, int]]:
    """Return (out_features, in_features) of each projection of a layer that adapters may add to.

    These are not those of experts. A layer that keeps a state has `o_proj`, too: its last product,
    which is `linear_o` where the layer has attention besides.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[Projection, tuple[int, int]] = {}
    if spec.is_linear(layer):
        for name, rows in _state_rows(spec).items():
            shapes[name] = (rows, hidden)
        shapes["linear_o" if spec.has_both else "o_proj"] = (hidden, _state_width(spec))
    if spec.has_attention(layer):
        values = spec.num_kv_heads * (spec.value_size or spec.head_size)
        shapes["q_proj"] = (spec.query_heads(layer) * spec.head_size, hidden)
        shapes["k_proj"], shapes["v_proj"] = (spec.kv_size, hidden), (values, hidden)
        shapes["o_proj"] = (hidden, spec.query_heads(layer) * (spec.value_size or spec.head_size))
        if spec.attention_gate:
            shapes["attention_gate"] = (spec.gate_size(layer), hidden)
    if spec.experts_of(layer) is None and spec.has_mlp(layer):
        if not spec.ungated:
            shapes["gate_proj"] = (inner, hidden)
        shapes["up_proj"] = (inner, hidden)
        shapes["down_proj"] = (hidden, inner)
    return shapes


def _state_rows(spec: ArchSpec) -> dict[Projection, int]:
    """Output features of what reads the input of a layer that keeps a state."""
    linear = spec.linear
    assert linear is not None
    if isinstance(linear, LinearAttentionSpec):
        return {
            "linear_qkv": linear.channels,
            "linear_z": linear.value_width,
            "linear_b": linear.value_heads,
            "linear_a": linear.value_heads,
        }
    if isinstance(linear, StateSpaceSpec):
        return {
            "linear_z": linear.value_width,
            "linear_mixed": linear.channels,
            "linear_dt": linear.heads,
        }
    return dict.fromkeys(KINDS["linear.in"], linear.channels)


def _state_width(spec: ArchSpec) -> int:
    """Features that the last product of a layer that keeps a state reads."""
    linear = spec.linear
    assert linear is not None
    if isinstance(linear, LinearAttentionSpec | StateSpaceSpec):
        return linear.value_width
    return linear.channels


def projections_of(spec: ArchSpec, layer: int) -> tuple[Projection, ...]:
    """The projections of a layer that adapters may add to: not those of experts."""
    return tuple(projection_shapes(spec, layer))


def projections_in(spec: ArchSpec) -> tuple[Projection, ...]:
    """Those that a slot has ranks for in each layer, in order: the seven, and what is in some."""
    found = {name for layer in range(spec.num_layers) for name in projection_shapes(spec, layer)}
    return (*PROJECTIONS, *(name for name in OF_SOME if name in found))


@dataclass(frozen=True, slots=True)
class LoraProduct:
    """A product of a graph that adapters add to.

    Attributes:
        layer: from 0.
        kind: what it computes.
        bits: 4 or 8, of its weights, in whose order activations are quantized; 8 where these are
            floats.
        block_size: inputs that share a scale.
    """

    layer: int
    kind: Kind
    bits: int = 8
    block_size: int = 128

    @property
    def name(self) -> str:
        """Of the layer and the product in it."""
        return f"layers.{self.layer}.{self.kind}"

    @property
    def a(self) -> str:
        """The graph input with the stacked A of all projections, [rows, in_features]."""
        return f"lora.{self.name}.a"

    @property
    def b(self) -> str:
        """The graph input with the stacked B, [rows, out_features]; 0 where a row has no part."""
        return f"lora.{self.name}.b"

    def in_features(self, spec: ArchSpec) -> int:
        """Columns of its input."""
        return projection_shapes(spec, self.layer)[KINDS[self.kind][0]][1]

    def out_features(self, spec: ArchSpec) -> tuple[int, ...]:
        """Columns of its output, projection by projection."""
        shapes = projection_shapes(spec, self.layer)
        return tuple(shapes[projection][0] for projection in KINDS[self.kind])


def in_panels(features: int) -> int:
    """Numbers that a row of so many takes in a slot."""
    return -(-features // PANEL) * PANEL


def slot_layout(
    products: Iterable[LoraProduct], spec: ArchSpec, max_rank: int, dtype: SlotDtype
) -> tuple[dict[LoraProduct, int], int]:
    """Return where AddLora finds each product of an adapter, and the numbers of a slot.

    The place is counted in numbers, those of int4 in bytes, from the slot's start. From there on
    lie A and B of its first projection, of its second, and so on, without a gap, at the rank that
    each has. Both are cut into panels, so that they are read from one end to the other: A is
    [panels of in_features, rank, PANEL], B is [panels of out_features, rank, PANEL].

    In integers A is that of all projections together, ahead of the first B, as `a_bytes` many bytes
    that say what the weights of a product do (csrc/lora.h). B is the same in int8; a panel in int4
    is what csrc/kernels.h says of LoraExpand.
    """
    places, end = {}, 0
    for product in products:
        places[product] = end
        depth, columns = product.in_features(spec), product.out_features(spec)
        end += sum(b_numbers(count, max_rank, dtype) for count in columns)
        if dtype in INTEGERS:
            end += a_bytes(product, depth, len(columns) * max_rank, dtype)
        else:
            end += len(columns) * max_rank * in_panels(depth)
        end = -(-end // LINE) * LINE
    return places, end


def has_halves(product: LoraProduct, dtype: SlotDtype) -> bool:
    """Whether a row of A is two outputs: of int8 beside weights of 4 bits."""
    return dtype == "int8" and product.bits == 4


def a_panels(product: LoraProduct, rank: int, dtype: SlotDtype) -> tuple[int, int]:
    """Outputs of whole panels, and of half a one, that so many rows of A take in integers.

    Outputs lie in panels of PRODUCT_PANEL, the last ones in half a panel where that has room
    enough.
    """
    outputs = rank * (2 if has_halves(product, dtype) else 1)
    halves = -(-outputs // (PRODUCT_PANEL // 2))
    return halves // 2 * PRODUCT_PANEL, halves % 2 * PRODUCT_PANEL // 2


def a_bytes(product: LoraProduct, depth: int, rank: int, dtype: SlotDtype) -> int:
    """Bytes that so many rows of A, of all projections of a product, take in integers."""
    block = product.block_size * product.bits // 8 + np.dtype(np.float32).itemsize
    return sum(a_panels(product, rank, dtype)) * -(-depth // product.block_size) * block


def b_numbers(columns: int, rank: int, dtype: SlotDtype) -> int:
    """Numbers that so many rows of a projection's B take; in int4 bytes, scales among them."""
    if dtype != "int4":
        return rank * in_panels(columns)
    return in_panels(columns) * (1 + -(-rank // INT4_ROWS) * INT4_ROWS // 2)
