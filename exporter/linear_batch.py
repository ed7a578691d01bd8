"""Gated delta nets in the GQA graph, whose states are of a batch's rows.

ONNX Runtime's own CPU provider has kernels of these operators. They know no padding, which the
first step of a batch may have behind its rows, as GroupQueryAttention takes it. So what is no token
is made to change no state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from onnxport.exporter.linear_layer import DeltaInputs, how_much
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import Dims, GraphBuilder
from onnxport.graphs.linear_nodes import LENGTH_EPSILON
from onnxport.graphs.linear_spec import LinearAttentionSpec, LinearSpec
from onnxport.graphs.spec import ArchSpec

_CHANNELS_FIRST = [0, 2, 1]  # and back


def declare_rows(g: GraphBuilder, spec: ArchSpec, dtype: int) -> None:
    """Declare the GQA graph's states, of all layers that have one."""
    if spec.linear is None:
        return
    conv: Dims = (names.BATCH, *spec.linear.conv_state)
    sizes = spec.linear.recurrent_state
    for layer in spec.linear_layers:
        g.input(names.gqa_past_conv_state(layer), dtype, conv)
        g.output(names.gqa_present_conv_state(layer), dtype, conv)
        if sizes is None:
            continue
        heads, value_size, key_size = sizes
        recurrent: Dims = (names.BATCH, heads, key_size, value_size)
        g.input(names.gqa_past_recurrent_state(layer), TensorProto.FLOAT, recurrent)
        g.output(names.gqa_present_recurrent_state(layer), TensorProto.FLOAT, recurrent)


class Padding(NamedTuple):
    """Which tokens of a step are some."""

    real: str  # float32 [batch, seq, 1], 1 or 0
    kept: str  # int64 [batch, kernel - 1, 1], which inputs are kept, of the last ones and these


def find_padding(g: GraphBuilder, linear: LinearSpec) -> Padding:
    """Compute what layers share: a row has all tokens of a step, or in the first one fewer."""
    axis = g.constant(np.array([1], np.int64), "axis")
    one = g.constant(np.array(1, np.int64), "one")
    with g.scope("padding"):
        seen = g.node("ReduceSum", [names.ATTENTION_MASK, axis], name="seen", keepdims=1)
        seq = g.node("Gather", [g.node("Shape", [names.INPUT_IDS], name="shape"), one], name="seq")
        count = g.node("Min", [seen, seq], name="count")  # [batch, 1]
        zero = g.constant(np.array(0, np.int64), "zero")
        places = g.node("Range", [zero, seq, one], name="places")
        is_real = g.node("Less", [places, count], name="is_real")  # [batch, seq]
        last = ops.last_axis(g)
        column = g.node("Unsqueeze", [is_real, last], name="column")
        real = ops.cast(g, column, TensorProto.FLOAT, "real")
        behind = g.constant(np.arange(linear.kernel - 1, dtype=np.int64), "behind")
        kept = g.node("Add", [count, behind], name="kept")
        return Padding(real, g.node("Unsqueeze", [kept, last], name="kept.column"))


def mix_by_rows(
    g: GraphBuilder,
    linear: LinearAttentionSpec,
    dtype: int,
    padding: Padding,
    layer: int,
    inputs: DeltaInputs,
) -> str:
    """Convolution and delta rule in the GQA graph, the latter in float32.

    Returns:
        [batch, seq, value_heads, value_size], of the type `dtype`.
    """
    keep_inputs(g, padding, layer, inputs.qkv)
    q, k, v = _mixed(g, linear, layer, inputs)
    beta = how_much(g, linear, inputs.beta)
    output, _ = g.node(
        "LinearAttention",
        [
            _unit(g, linear, q, 1 / linear.key_size, "q"),
            _unit(g, linear, k, linear.key_size**-0.5, "k"),
            v,
            names.gqa_past_recurrent_state(layer),
            g.node("Mul", [_log_decay(g, inputs), padding.real], name="decay.real"),
            g.node("Mul", [beta, padding.real], name="beta.real"),
        ],
        outputs=[".out", names.gqa_present_recurrent_state(layer)],
        domain=names.MICROSOFT,
        name="delta",
        q_num_heads=linear.value_heads,
        kv_num_heads=linear.value_heads,
        update_rule="gated_delta",
        scale=1.0,
    )
    heads = ops.reshape(g, output, (0, 0, linear.value_heads, linear.value_size), "delta.heads")
    return ops.cast(g, heads, dtype, "delta.cast")


def keep_inputs(g: GraphBuilder, padding: Padding, layer: int, x: str) -> None:
    """Return the last inputs of the convolution, that are some, as a row's state."""
    past, present = names.gqa_past_conv_state(layer), names.gqa_present_conv_state(layer)
    before = g.node("Transpose", [past], name="state.read", perm=_CHANNELS_FIRST)
    inputs = g.node("Concat", [before, x], name="state.inputs", axis=1)
    kept = g.node("GatherND", [inputs, padding.kept], name="state.kept", batch_dims=1)
    g.node("Transpose", [kept], outputs=[present], name="state.write", perm=_CHANNELS_FIRST)


def convolve_rows(
    g: GraphBuilder,
    layer: int,
    x: str,
    kernel: str,
    bias: str = "",
    *,
    activation: str = "silu",
) -> str:
    """The convolution, [batch, seq, channels] as its input x, behind "silu" or "none"."""
    first = g.node("Transpose", [x], name="conv.in", perm=_CHANNELS_FIRST)
    output, _ = g.node(
        "CausalConvWithState",
        [first, kernel, bias, names.gqa_past_conv_state(layer)],
        outputs=[".out", ".state"],  # with what is no token
        domain=names.MICROSOFT,
        name="conv",
        activation=activation,
    )
    return g.node("Transpose", [output], name="conv.back", perm=_CHANNELS_FIRST)


def _mixed(
    g: GraphBuilder, linear: LinearAttentionSpec, layer: int, inputs: DeltaInputs
) -> tuple[str, ...]:
    """Queries, keys and values behind the convolution, float32 [batch, seq, width]."""
    last = convolve_rows(g, layer, inputs.qkv, inputs.kernel)
    mixed = ops.cast(g, last, TensorProto.FLOAT, "conv.cast")
    sizes = np.array([linear.key_width, linear.key_width, linear.value_width], np.int64)
    return g.node(
        "Split", [mixed, g.constant(sizes, "sizes")], outputs=3, name="conv.split", axis=-1
    )


def _unit(g: GraphBuilder, linear: LinearAttentionSpec, x: str, scale: float, name: str) -> str:
    """Heads of length sqrt(key_size) * scale, each as often as value heads share it.

    The norm of a mean of squares, times 1 / sqrt(key_size), is that of their sum.
    """
    heads = ops.reshape(g, x, (0, 0, linear.key_heads, linear.key_size), f"{name}.heads")
    weight = g.constant(np.full(linear.key_size, scale, np.float32), f"{name}.scale")
    normed = ops.rms_norm(g, heads, weight, LENGTH_EPSILON / linear.key_size, f"{name}.unit")
    shared = linear.value_heads // linear.key_heads
    if shared > 1:
        places = np.repeat(np.arange(linear.key_heads), shared).astype(np.int64)
        normed = g.node(
            "Gather", [normed, g.constant(places, "shared")], name=f"{name}.repeat", axis=2
        )
    width = linear.value_heads * linear.key_size
    return ops.reshape(g, normed, (0, 0, width), f"{name}.join")


def _log_decay(g: GraphBuilder, inputs: DeltaInputs) -> str:
    """`-exp(a_log) * softplus(decay + dt_bias)`."""
    biased = g.node("Add", [inputs.decay, inputs.dt_bias], name="decay.biased")
    rate = g.node("Neg", [g.node("Exp", [inputs.a_log], name="decay.exp")], name="decay.rate")
    return g.node("Mul", [g.node("Softplus", [biased], name="decay.softplus"), rate], name="decay")
