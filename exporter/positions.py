"""Positions of tokens in both graphs, and tables that have a row of each: GPT-2, OPT.

Rows are added to the embedding. Positions count from 0 in each sequence, whatever of it is cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from onnx import TensorProto

from onnxport.exporter.plan import POSITIONS, TOKEN_IN
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.passes.paged_plan import SCOPE

if TYPE_CHECKING:
    from onnxport.exporter.decoder import Decoder

_ALL: Final = np.iinfo(np.int64).max


def stream(d: Decoder) -> str:
    """What the first layer reads: the embedding, made as wide as layers are, and positions."""
    g, rows = d.g, d.spec.learned_positions
    hidden = d.embed()
    if d.spec.embedding_size is not None:
        hidden = d.linear(TOKEN_IN, hidden)
    if rows is None:
        return hidden
    with g.scope(SCOPE, root=True):
        # What pads a step may be behind the table, which has rows for all that is asked for.
        inside = [d.positions.places, _int(g, rows - 1)]
        place = g.node("Min", inside, name="positions.within")
    with g.scope(POSITIONS):
        learned = d.embed(POSITIONS, place)
        return g.node("Add", [hidden, learned], name="added")


def places_of_tokens(g: GraphBuilder) -> str:
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


def places_of_rows(g: GraphBuilder, less_one: str) -> str:
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
