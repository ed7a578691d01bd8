"""A layer of a gated delta net in the paged graph, and the inputs and outputs that it adds."""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from onnxport.exporter.graph_parts import activation_dtype
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_attention import StatePool, causal_convolution, gated_delta_net
from onnxport.graphs.spec import ArchSpec


def declare_states(g: GraphBuilder, spec: ArchSpec, dtype: int) -> None:
    """Declare the states of all layers that have one, in and out, and the slots of rows."""
    if spec.linear is None:
        return
    for name in (names.STATE_READS, names.STATE_WRITES):
        g.input(name, TensorProto.INT32, [names.BATCH])
    conv = [names.NUM_STATES, *spec.linear.conv_state]
    recurrent = [names.NUM_STATES, *spec.linear.recurrent_state]
    for layer in spec.linear_layers:
        g.input(names.past_conv_state(layer), dtype, conv)
        g.output(names.present_conv_state(layer), dtype, conv)
        g.input(names.past_recurrent_state(layer), TensorProto.FLOAT, recurrent)
        g.output(names.present_recurrent_state(layer), TensorProto.FLOAT, recurrent)


def linear_attention(
    g: GraphBuilder,
    spec: ArchSpec,
    weights: StoredWeights,
    layer: int,
    x: str,
    linear: Callable[[str, str], str],
) -> str:
    """What a layer has in place of attention, but for its last product.

    Args:
        g: The builder of a paged graph.
        spec: The model.
        weights: As they are stored.
        layer: Its number.
        x: [num_tokens, hidden_size].
        linear: (role, x): a product with the matrix of a role.

    Returns:
        [num_tokens, value_width].
    """
    assert spec.linear is not None
    role, dtype = f"layers.{layer}.linear", activation_dtype(weights)
    sizes = spec.linear

    def vector(name: str) -> str:
        return g.weight(weights.vectors[f"{role}.{name}"])

    kernel = weights.vectors[f"{role}.conv"]
    kernel = kernel.view(f"{role}.conv.kernel", (sizes.channels, 1, sizes.kernel))
    conv = StatePool(names.past_conv_state(layer), names.present_conv_state(layer), "conv")
    delta = StatePool(
        names.past_recurrent_state(layer), names.present_recurrent_state(layer), "delta"
    )
    with g.scope("linear"):
        qkv = linear(f"{role}.qkv", x)
        gates = ops.cast(g, linear(f"{role}.ba", x), TensorProto.FLOAT, "gates")
        beta, decay = g.node("Split", [gates], outputs=2, name="split", axis=-1, num_outputs=2)
        mixed = causal_convolution(g, qkv, g.weight(kernel), conv)
        found = gated_delta_net(
            g, mixed, decay, beta, delta, a_log=vector("a_log"), dt_bias=vector("dt_bias")
        )
        normed = ops.rms_norm(g, found, vector("norm"), spec.rms_norm_eps, "norm")
        flat = ops.reshape(g, normed, (0, sizes.value_width), "join")
        gate = ops.silu(g, ops.cast(g, linear(f"{role}.z", x), TensorProto.FLOAT, "z.cast"))
        gated = g.node(
            "Mul", [ops.cast(g, flat, TensorProto.FLOAT, "join.cast"), gate], name="gated"
        )
        return ops.cast(g, gated, dtype, "gated.cast")
