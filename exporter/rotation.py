"""What standard operators make of tokens' positions: RoPE, and queries that grow.

Attention operators rotate what they are given, and so at the end. Models that normalize queries and
keys behind RoPE have it here: the rows of the tables at the tokens' positions are gathered once,
and every layer rotates queries and keys by them together. Likewise the factors of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxport.exporter.graph_parts import activation_dtype
from onnxport.exporter.rope import growth_factors
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.passes.paged_plan import SCOPE
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import numpy_dtype

_ALL: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rows of cosines and sines, [..., 1, head_size] in the activations' type; all channels rotate.

    A channel of the first half is rotated with that of the second one: it is multiplied with the
    cosine, and what the other one is times the sine is added, or subtracted in the first half.
    """

    cos: str
    sin: str  # negative in the first half

    def apply(self, g: GraphBuilder, x: str) -> str:
        """Rotate heads, [..., heads, head_size]."""
        halves = g.node("Split", [x], outputs=2, name="rotary.halves", axis=-1, num_outputs=2)
        turned = g.node("Concat", [halves[1], halves[0]], name="rotary.turned", axis=-1)
        along = g.node("Mul", [x, self.cos], name="rotary.cos")
        across = g.node("Mul", [turned, self.sin], name="rotary.sin")
        return g.node("Add", [along, across], name="rotated")


@dataclass(frozen=True, slots=True)
class Positions:
    """What a graph makes of the tokens' positions, once for all layers."""

    rotation: Rotation | None = None  # of queries and keys ahead of their norms; None: no such
    growth: str = ""  # factors of queries, [..., 1], of the activations' type; empty: none


def positions_of_tokens(g: GraphBuilder, spec: ArchSpec, weights: StoredWeights) -> Positions:
    """What the paged graph needs of its tokens' positions."""
    if not spec.counts_positions:
        return Positions()
    with g.scope(SCOPE, root=True):
        return _made(g, spec, weights, _positions_of_tokens(g))


def positions_of_rows(
    g: GraphBuilder, spec: ArchSpec, weights: StoredWeights, less_one: str
) -> Positions:
    """Likewise the GQA graph; `less_one` is int32 [batch], see `ops.gqa_sequence_lengths`."""
    if not spec.counts_positions:
        return Positions()
    with g.scope(SCOPE, root=True):
        return _made(g, spec, weights, _positions_of_rows(g, less_one))


def _made(g: GraphBuilder, spec: ArchSpec, weights: StoredWeights, positions: str) -> Positions:
    growth = spec.query_growth
    return Positions(
        _rows(g, spec, weights, positions) if spec.qk_norm_last else None,
        "" if growth is None else _growth(g, growth, spec.context_length, positions, weights),
    )


def _growth(
    g: GraphBuilder, growth: GrowthSpec, length: int, positions: str, weights: StoredWeights
) -> str:
    """The factors of queries at these positions, of a table with one for each interval."""
    last = length - 1 + growth.offset
    steps = np.arange(last // growth.interval + 1) * growth.interval
    kind = numpy_dtype(activation_dtype(weights))
    table = growth_factors(growth, steps - growth.offset).astype(kind)
    if growth.offset:
        positions = g.node("Add", [positions, _int(g, growth.offset)], name="growth.counted")
    # Tokens that only fill up a step may be counted beyond the last one.
    inside = g.node("Min", [positions, _int(g, last)], name="growth.inside")
    interval = g.node("Div", [inside, _int(g, growth.interval)], name="growth.interval")
    found = g.node("Gather", [g.constant(table, "growth"), interval], name="growth", axis=0)
    return g.node("Unsqueeze", [found, _ints(g, -1)], name="growth.rows")


def _rows(g: GraphBuilder, spec: ArchSpec, weights: StoredWeights, positions: str) -> Rotation:
    """The tables' rows at these positions, int64 [...]."""
    dtype = activation_dtype(weights)
    cos, sin = (
        g.node("Gather", [g.weight(table), positions], name=f"rotary.{name}", axis=0)
        for table, name in zip(weights.ropes[spec.rope], ("cos", "sin"), strict=True)
    )
    less = g.node("Neg", [sin], name="rotary.less")
    found = []
    for name, halves in (("cos", [cos, cos]), ("sin", [less, sin])):
        joined = g.node("Concat", halves, name=f"rotary.{name}.joined", axis=-1)
        axes = g.constant(np.array([-2], np.int64), "axes")
        rows = g.node("Unsqueeze", [joined, axes], name=f"rotary.{name}.rows")
        is_wide = dtype == TensorProto.FLOAT
        found.append(rows if is_wide else ops.cast(g, rows, dtype, f"rotary.{name}.cast"))
    return Rotation(*found)


def _positions_of_tokens(g: GraphBuilder) -> str:
    """Each packed token's position in its sequence, int64 [num_tokens].

    Tokens behind the last sequence, which only padding has, count on from it.
    """
    ends_at, past = (
        ops.cast(g, name, TensorProto.INT64, "rotary.lengths")
        for name in (names.CUMULATIVE_SEQUENCE_LENGTHS, names.PAST_SEQUENCE_LENGTHS)
    )
    starts = g.node("Slice", [ends_at, _ints(g, 0), _ints(g, -1)], name="rotary.starts")
    ends = g.node("Slice", [ends_at, _ints(g, 1), _ints(g, _ALL)], name="rotary.ends")
    tokens = _range(g, names.INPUT_IDS, 0)
    column = g.node("Unsqueeze", [tokens, _ints(g, 1)], name="rotary.column")
    passed = g.node("LessOrEqual", [ends, column], name="rotary.passed")  # [num_tokens, batch]
    count = ops.cast(g, passed, TensorProto.INT64, "rotary.passed")
    owner = g.node("ReduceSum", [count, _ints(g, 1)], name="rotary.owner", keepdims=0)
    last = g.node("Sub", [_dim(g, names.PAST_SEQUENCE_LENGTHS, 0), _int(g, 1)], name="rotary.last")
    owner = g.node("Min", [owner, last], name="rotary.owner")
    ahead = g.node("Sub", [past, starts], name="rotary.ahead")
    own = g.node("Gather", [ahead, owner], name="rotary.own")
    return g.node("Add", [tokens, own], name="rotary.positions")


def _positions_of_rows(g: GraphBuilder, less_one: str) -> str:
    """Each token's position, int64 [batch, seq], as GroupQueryAttention counts them.

    Sequences of a batch end with it, but for those of a first step that are shorter than its
    longest one: they begin with it.
    """
    last = ops.cast(g, less_one, TensorProto.INT64, "rotary.lengths")
    new = g.node("Sub", [_dim(g, names.INPUT_IDS, 1), _int(g, 1)], name="rotary.new")
    past = g.node("Max", [g.node("Sub", [last, new], name="rotary.past"), _int(g, 0)])
    column = g.node("Unsqueeze", [past, _ints(g, 1)], name="rotary.column")
    return g.node("Add", [column, _range(g, names.INPUT_IDS, 1)], name="rotary.positions")


def _range(g: GraphBuilder, x: str, axis: int) -> str:
    """0, 1, … as many as `x` has places on an axis."""
    return g.node("Range", [_int(g, 0), _dim(g, x, axis), _int(g, 1)], name="rotary.range")


def _dim(g: GraphBuilder, x: str, axis: int) -> str:
    shape = g.node("Shape", [x], name="rotary.shape", start=axis, end=axis + 1)
    return g.node("Gather", [shape, _int(g, 0)], name="rotary.dim")


def _int(g: GraphBuilder, value: int) -> str:
    return g.constant(np.array(value, np.int64), "int")


def _ints(g: GraphBuilder, *values: int) -> str:
    return g.constant(np.array(values, np.int64), "ints")
