"""Small graphs that bring logits from a device to the host: all, or the largest of each row.

Their inputs and outputs are float32 and int64, [num_logits, ...], whatever the device computes in.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.builder import GraphBuilder

COPY: Final = "copy"  # float32 [num_logits, vocab]
COUNT: Final = "count"  # int64 [1], host: how many of each row
VALUES: Final = "values"  # float32 [num_logits, count], the largest first
TOKENS: Final = "tokens"  # int64 [num_logits, count], of VALUES
SUMS: Final = "sums"  # float32 [num_logits], of all logits: NaN where one of them is


def copy_graph(vocab_size: int) -> onnx.ModelProto:
    """A graph that returns contract.LOGITS as COPY."""
    g = GraphBuilder("copy_logits")
    logits = g.input(contract.LOGITS, TensorProto.FLOAT, [contract.NUM_LOGITS, vocab_size])
    g.output(COPY, TensorProto.FLOAT, [contract.NUM_LOGITS, vocab_size])
    g.node("Identity", [logits], outputs=[COPY])
    return g.build()


def largest_graph(vocab_size: int) -> onnx.ModelProto:
    """A graph that returns the COUNT largest of contract.LOGITS in each row, and their sum.

    TopK compares, and nothing is larger than NaN, nor smaller: it may leave one out anywhere. A sum
    leaves out none.
    """
    g = GraphBuilder("largest_logits")
    logits = g.input(contract.LOGITS, TensorProto.FLOAT, [contract.NUM_LOGITS, vocab_size])
    count = g.input(COUNT, TensorProto.INT64, [1])
    g.output(VALUES, TensorProto.FLOAT, [contract.NUM_LOGITS, COUNT])
    g.output(TOKENS, TensorProto.INT64, [contract.NUM_LOGITS, COUNT])
    g.output(SUMS, TensorProto.FLOAT, [contract.NUM_LOGITS])
    g.node("TopK", [logits, count], outputs=[VALUES, TOKENS], axis=-1, largest=1, sorted=1)
    last = g.constant(np.array([-1], np.int64), "last")
    g.node("ReduceSum", [logits, last], outputs=[SUMS], keepdims=0)
    return g.build()
