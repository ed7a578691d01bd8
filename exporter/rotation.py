"""RoPE in standard operators, for models that normalize queries and keys behind it.

Attention operators rotate what they are given, and so at the end. Here the rows of the tables at
the tokens' positions are gathered once, and every layer rotates queries and keys by them together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnxport.exporter.graph_parts import activation_dtype
from onnxport.exporter.positions import positions_of_rows, positions_of_tokens
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
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


def rotation_of_tokens(g: GraphBuilder, spec: ArchSpec, weights: StoredWeights) -> Rotation:
    """What rotates the paged graph's tokens."""
    with g.scope(SCOPE, root=True):
        return _rows(g, spec, weights, positions_of_tokens(g))


def rotation_of_rows(
    g: GraphBuilder, spec: ArchSpec, weights: StoredWeights, less_one: str
) -> Rotation:
    """Likewise the GQA graph's; `less_one` is int32 [batch], see `ops.gqa_sequence_lengths`."""
    with g.scope(SCOPE, root=True):
        return _rows(g, spec, weights, positions_of_rows(g, less_one))


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
