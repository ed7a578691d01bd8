"""A layer of a gated delta net in both graphs, and the inputs and outputs that it adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from onnxport.exporter.graph_parts import activation_dtype
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import contract as names
from onnxport.graphs import linear_attention as nodes
from onnxport.graphs import ops
from onnxport.graphs.builder import Dims, GraphBuilder
from onnxport.graphs.linear_spec import LinearAttentionSpec
from onnxport.graphs.spec import ArchSpec


class DeltaInputs(NamedTuple):
    """What a gated delta net reads of a layer, beside states."""

    qkv: str  # [..., channels], ahead of the convolution
    kernel: str  # [channels, 1, kernel]
    decay: str  # float32 [..., decay_width], ahead of its activation
    beta: str  # float32 [..., value_heads], likewise
    a_log: str  # float32 [value_heads]
    dt_bias: str  # float32 [decay_width]
    by_channel: bool  # decays are of channels


Mix = Callable[[int, DeltaInputs], str]  # (layer, inputs) -> [..., value_heads, value_size]


def declare_slots(g: GraphBuilder, spec: ArchSpec, dtype: int) -> None:
    """Declare the paged graph's states, of all layers that have one, and the slots of rows."""
    if spec.linear is None:
        return
    for name in (names.STATE_READS, names.STATE_WRITES):
        g.input(name, TensorProto.INT32, [names.BATCH])
    conv: Dims = (names.NUM_STATES, *spec.linear.conv_state)
    sizes = spec.linear.recurrent_state
    for layer in spec.linear_layers:
        g.input(names.past_conv_state(layer), dtype, conv)
        g.output(names.present_conv_state(layer), dtype, conv)
        if sizes is None:
            continue
        recurrent: Dims = (names.NUM_STATES, *sizes)
        g.input(names.past_recurrent_state(layer), TensorProto.FLOAT, recurrent)
        g.output(names.present_recurrent_state(layer), TensorProto.FLOAT, recurrent)


def how_much(g: GraphBuilder, linear: LinearAttentionSpec, beta: str) -> str:
    """How much of a value is new, of what a product says."""
    part = g.node("Sigmoid", [beta], name="beta")
    if not linear.doubled_beta:
        return part
    return g.node("Add", [part, part], name="beta.doubled")


def mix_by_slots(
    g: GraphBuilder, linear: LinearAttentionSpec, layer: int, inputs: DeltaInputs
) -> str:
    """Convolution and delta rule in the paged graph."""
    conv = nodes.StatePool(names.past_conv_state(layer), names.present_conv_state(layer), "conv")
    mixed = nodes.causal_convolution(g, inputs.qkv, inputs.kernel, conv)
    recurrent = (names.past_recurrent_state(layer), names.present_recurrent_state(layer))
    return nodes.gated_delta_net(
        g,
        mixed,
        inputs.decay,
        how_much(g, linear, inputs.beta) if linear.doubled_beta else inputs.beta,
        nodes.StatePool(*recurrent, "delta"),
        a_log=inputs.a_log,
        dt_bias=inputs.dt_bias,
        has_sigmoid=not linear.doubled_beta,
        by_channel=inputs.by_channel,
    )


def linear_attention(
    g: GraphBuilder,
    spec: ArchSpec,
    weights: StoredWeights,
    layer: int,
    x: str,
    linear: Callable[[str, str], str],
    mix: Mix,
    leading: tuple[int, ...],
) -> str:
    """What a layer has in place of attention, but for its last product.

    Args:
        g: The builder.
        spec: The model.
        weights: As they are stored.
        layer: Its number.
        x: [..., hidden_size].
        linear: (role, x): a product with the matrix of a role.
        mix: Convolution and delta rule.
        leading: Reshape dimensions of x before the last.

    Returns:
        [..., value_width].
    """
    assert isinstance(spec.linear, LinearAttentionSpec)
    role, dtype = f"layers.{layer}.linear", activation_dtype(weights)
    sizes = spec.linear

    def vector(name: str) -> str:
        return g.weight(weights.vectors[f"{role}.{name}"])

    kernel = weights.vectors[f"{role}.conv"]
    kernel = kernel.view(f"{role}.conv.kernel", (sizes.channels, 1, sizes.kernel))
    with g.scope("linear"):
        qkv = linear(f"{role}.qkv", x)
        beta, decay = _gates(g, sizes, role, x, linear)
        rates = vector("a_log"), vector("dt_bias"), sizes.gate_rank is not None
        found = mix(layer, DeltaInputs(qkv, g.weight(kernel), decay, beta, *rates))
        normed = ops.rms_norm(g, found, vector("norm"), sizes.norm_eps or spec.rms_norm_eps, "norm")
        flat = ops.reshape(g, normed, (*leading, sizes.value_width), "join")
        read = x if sizes.gate_rank is None else linear(f"{role}.z_in", x)
        gate = ops.cast(g, linear(f"{role}.z", read), TensorProto.FLOAT, "z.cast")
        if sizes.gate_rank is None:
            gate = ops.silu(g, gate)
        else:
            gate = g.node("Sigmoid", [gate], name="z.sigmoid")
        gated = g.node(
            "Mul", [ops.cast(g, flat, TensorProto.FLOAT, "join.cast"), gate], name="gated"
        )
        return ops.cast(g, gated, dtype, "gated.cast")


def _gates(
    g: GraphBuilder,
    sizes: LinearAttentionSpec,
    role: str,
    x: str,
    linear: Callable[[str, str], str],
) -> tuple[str, str]:
    """Beta and decay ahead of their activations, float32 [..., value_heads], [..., decay_width]."""
    both = linear(f"{role}.ba", x)
    if sizes.gate_rank is None:
        gates = ops.cast(g, both, TensorProto.FLOAT, "gates")
        beta, decay = g.node("Split", [gates], outputs=2, name="split", axis=-1, num_outputs=2)
        return beta, decay
    widths = g.constant(np.array([sizes.value_heads, sizes.gate_rank], np.int64), "widths")
    beta, low = g.node("Split", [both, widths], outputs=2, name="split", axis=-1)
    decay = linear(f"{role}.decay", low)
    return (
        ops.cast(g, beta, TensorProto.FLOAT, "beta.cast"),
        ops.cast(g, decay, TensorProto.FLOAT, "decay.cast"),
    )
