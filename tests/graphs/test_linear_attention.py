"""Builders of layers with a state: what they make fits ONNX Runtime's own operator schemas."""

from __future__ import annotations

import re

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_attention import StatePool, causal_convolution, gated_delta_net

HEADS, KEY_SIZE, VALUE_SIZE, KERNEL = 4, 16, 8, 4
CHANNELS = 2 * 2 * KEY_SIZE + HEADS * VALUE_SIZE


def layer(dtype: int, gates_dtype: int = TensorProto.FLOAT) -> bytes:
    """A convolution and the gated delta net behind it."""
    g = GraphBuilder("layer")
    for name in (contract.STATE_READS, contract.STATE_WRITES):
        g.input(name, TensorProto.INT32, [contract.BATCH])
    g.input(contract.CUMULATIVE_SEQUENCE_LENGTHS, TensorProto.INT32, [contract.BATCH_PLUS_ONE])
    x = g.input("x", dtype, [contract.NUM_TOKENS, CHANNELS])
    gates = [g.input(name, gates_dtype, [contract.NUM_TOKENS, HEADS]) for name in ("decay", "beta")]
    names = (contract.past_conv_state(0), contract.present_conv_state(0))
    for declare, name in zip((g.input, g.output), names, strict=True):
        declare(name, dtype, [contract.NUM_STATES, CHANNELS, KERNEL - 1])
    conv = StatePool(*names, "conv")
    names = (contract.past_recurrent_state(0), contract.present_recurrent_state(0))
    for declare, name in zip((g.input, g.output), names, strict=True):
        declare(name, TensorProto.FLOAT, [contract.NUM_STATES, HEADS, VALUE_SIZE, KEY_SIZE])
    floats = np.float16 if dtype == TensorProto.FLOAT16 else np.float32
    weight = g.constant(np.ones((CHANNELS, 1, KERNEL), floats), "weight")
    vector = g.constant(np.zeros(HEADS, np.float32), "vector")
    mixed = causal_convolution(g, x, weight, conv)
    y = gated_delta_net(g, mixed, *gates, StatePool(*names, "delta"), a_log=vector, dt_bias=vector)
    g.output("y", dtype, [contract.NUM_TOKENS, HEADS, VALUE_SIZE])
    g.node("Identity", [y], outputs=["y"])
    return g.build().SerializeToString()


def refusal(model: bytes) -> str:
    """Why ONNX Runtime does not load a graph on a processor; "" if it does."""
    try:
        ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    except Exception as error:  # of a class of its own for each reason
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.FLOAT])
def test_types_are_those_of_the_schemas(dtype: int) -> None:
    """ONNX Runtime checks them; 1.31 then finds no kernel for a processor, 1.32 does."""
    reason = refusal(layer(dtype))
    assert not reason or re.search("NOT_IMPLEMENTED.*VarlenCausalConvWithState", reason)


def test_other_types_are_refused() -> None:
    """So what the one above shows is not nothing."""
    wrong = layer(TensorProto.FLOAT16, TensorProto.INT32)
    assert re.search("Type Error.*GatedDeltaNet|INVALID_GRAPH", refusal(wrong))
