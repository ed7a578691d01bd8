"""Functions whose bits depend on where a number stands, and how rows are filled up for them."""

from __future__ import annotations

from typing import Final

import numpy as np

from onnxport.graphs.builder import GraphBuilder

_VECTOR: Final = 16  # floats that processors compute at once, at most


def in_whole_vectors(g: GraphBuilder, kind: str, x: str, count: int, name: str) -> str:
    """An operator of one input, with the same bits wherever a row of x [..., count] stands.

    ONNX Runtime computes vectors of several numbers, and what is left behind the last one by other
    instructions, which round otherwise. So each row is filled up to whole vectors, with ones.

    Args:
        g: The builder.
        kind: The operator, such as Log.
        x: float32.
        count: Numbers of a row.
        name: Node name.
    """
    room = -count % _VECTOR
    if not room:
        return g.node(kind, [x], name=name)
    pads = g.constant(np.array([0, room], np.int64), "pads")
    one = g.constant(np.array(1.0, np.float32), "one")
    first, stop, axis = (
        g.constant(np.array([value], np.int64), "slice") for value in (0, count, -1)
    )
    filled = g.node("Pad", [x, pads, one, axis], name="filled")
    made = g.node(kind, [filled], name=name)
    return g.node("Slice", [made, first, stop, axis], name="unfilled")
