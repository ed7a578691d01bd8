"""What standard operators make of tokens' positions: RoPE, and queries that grow.

Attention operators rotate what they are given, and so at the end. Models that normalize queries and
keys behind RoPE have it here: the rows of the tables at the tokens' positions are gathered once,
and every layer rotates queries and keys by them together. Likewise the factors of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnxport.exporter.graph_parts import activation_dtype
from onnxport.exporter.positions import places_of_rows, places_of_tokens
from onnxport.exporter.rope import growth_factors
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.passes.paged_plan import SCOPE
from onnxport.graphs.spec import ArchSpec


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

    places: str = ""  # they themselves, int64 [...]; empty: nothing needs them
    rotation: Rotation | None = None  # of queries and keys ahead of their norms; None: no such
    growth: str = ""  # factors of queries, [..., 1], of the activations' type; empty: none


def positions_of_tokens(g: GraphBuilder, spec: ArchSpec, weights: StoredWeights) -> Positions:
    """What the paged graph needs of its tokens' positions."""
    if not spec.counts_positions:
        return Positions()
    with g.scope(SCOPE, root=True):
        return _made(g, spec, weights, places_of_tokens(g))


def positions_of_rows(
    g: GraphBuilder, spec: ArchSpec, weights: StoredWeights, less_one: str
) -> Positions:
    """Likewise the GQA graph; `less_one` is int32 [batch], of `gqa_sequence_lengths`."""
    if not spec.counts_positions:
        return Positions()
    with g.scope(SCOPE, root=True):
        return _made(g, spec, weights, places_of_rows(g, less_one))


def _made(g: GraphBuilder, spec: ArchSpec, weights: StoredWeights, places: str) -> Positions:
    growth = spec.query_growth
    return Positions(
        places,
        _rows(g, spec, weights, places) if spec.qk_norm_last else None,
        "" if growth is None else _growth(g, growth, spec.context_length, places, weights),
    )


def _growth(
    g: GraphBuilder, growth: GrowthSpec, length: int, places: str, weights: StoredWeights
) -> str:
    """The factors of queries at these positions, of a table with one for each interval.

    The table is float32, so that providers that compute in float32 have them unrounded.
    """
    last = length - 1 + growth.offset
    steps = np.arange(last // growth.interval + 1) * growth.interval
    table, dtype = growth_factors(growth, steps - growth.offset), activation_dtype(weights)
    offset, most, interval, axes = (
        g.constant(np.array(value, np.int64), "int")
        for value in (growth.offset, last, growth.interval, [-1])
    )
    if growth.offset:
        places = g.node("Add", [places, offset], name="growth.counted")
    # Tokens that only fill up a step may be counted beyond the last one.
    inside = g.node("Min", [places, most], name="growth.inside")
    number = g.node("Div", [inside, interval], name="growth.interval")
    found = g.node("Gather", [g.constant(table, "growth"), number], name="growth", axis=0)
    rows = g.node("Unsqueeze", [found, axes], name="growth.rows")
    return rows if dtype == TensorProto.FLOAT else ops.cast(g, rows, dtype, "growth.cast")


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
