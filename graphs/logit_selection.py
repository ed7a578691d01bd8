"""Small graphs that bring logits from a device to the host: all, or the largest of each row.

Another one says what is known of each row, so that not all of it has to be read there. Their inputs
and outputs are float32 and int64, [num_logits, ...], whatever the device computes in.
"""

from __future__ import annotations

import math
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

GROUP: Final = 64  # logits of a group in contract.LOGITS_SUMMARIES
CHUNK: Final = 1024  # and of a chunk
LEAST: Final = -1e38  # less than any logit, and finite after any penalty


def copy_graph(vocab_size: int) -> onnx.ModelProto:
    """A graph that returns contract.LOGITS as COPY."""
    g = GraphBuilder("copy_logits")
    logits = g.input(contract.LOGITS, TensorProto.FLOAT, [contract.NUM_LOGITS, vocab_size])
    g.output(COPY, TensorProto.FLOAT, [contract.NUM_LOGITS, vocab_size])
    g.node("Identity", [logits], outputs=[COPY])
    return g.build()


def largest_graph(vocab_size: int) -> onnx.ModelProto:
    """A graph that returns the COUNT largest of contract.LOGITS in each row."""
    g = GraphBuilder("largest_logits")
    logits = g.input(contract.LOGITS, TensorProto.FLOAT, [contract.NUM_LOGITS, vocab_size])
    count = g.input(COUNT, TensorProto.INT64, [1])
    g.output(VALUES, TensorProto.FLOAT, [contract.NUM_LOGITS, COUNT])
    g.output(TOKENS, TensorProto.INT64, [contract.NUM_LOGITS, COUNT])
    g.node("TopK", [logits, count], outputs=[VALUES, TOKENS], axis=-1, largest=1, sorted=1)
    return g.build()


def summary_graph(vocab_size: int) -> onnx.ModelProto:
    """A graph that returns contract.LOGITS_SUMMARIES of contract.LOGITS.

    It takes contract.SUMMARY_SCALES, none of them negative, as which the last number of a row comes
    back. Its smallest values are -inf, for nobody looked. Groups without any logit have LEAST. Of a
    row with logits that are not finite, a sum is not a number.
    """
    chunks = -(-vocab_size // CHUNK)
    g = GraphBuilder("summarize_logits")
    logits = g.input(contract.LOGITS, TensorProto.FLOAT, [contract.NUM_LOGITS, vocab_size])
    scales = g.input(contract.SUMMARY_SCALES, TensorProto.FLOAT, [contract.NUM_LOGITS])
    shape: list[int | str] = [contract.NUM_LOGITS, contract.summary_floats(vocab_size)]
    g.output(contract.LOGITS_SUMMARIES, TensorProto.FLOAT, shape)

    def ints(name: str, *values: int) -> str:
        return g.constant(np.array(values, np.int64), name)

    last, second = ints("last", -1), ints("second", 1)
    pads = ints("pads", 0, 0, 0, chunks * CHUNK - vocab_size)
    fill = g.constant(np.array(LEAST, np.float32), "fill")
    whole = g.node("Pad", [logits, pads, fill])
    grouped = g.node("Reshape", [whole, ints("by_group", 0, chunks * (CHUNK // GROUP), GROUP)])
    groups = g.node("ReduceMax", [grouped, last], keepdims=0)
    of_chunks = g.node("Reshape", [groups, ints("in_chunks", 0, chunks, CHUNK // GROUP)])
    largest = g.node("ReduceMax", [of_chunks, last], keepdims=1)
    chunked = g.node("Reshape", [whole, ints("by_chunk", 0, chunks, CHUNK)])
    per_unit = g.node("Mul", [scales, g.constant(np.array(math.log(2), np.float32), "log_2")])
    per_unit = g.node("Unsqueeze", [per_unit, ints("behind", 1, 2)])
    exponents = g.node("Mul", [g.node("Sub", [chunked, largest]), per_unit])
    sums = g.node("ReduceSum", [g.node("Exp", [exponents]), last], keepdims=0)
    flat = g.node("Squeeze", [largest, last])
    least = g.node("Sub", [flat, g.constant(np.array(np.inf, np.float32), "infinity")])
    told = g.node("Unsqueeze", [scales, second])
    parts = [groups, flat, least, sums, told]
    g.node("Concat", parts, outputs=[contract.LOGITS_SUMMARIES], axis=1)
    return g.build()
