"""A layer of a state space (Mamba-2, arXiv:2405.21060) in both graphs."""

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
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_spec import StateSpaceSpec
from onnxport.graphs.spec import ArchSpec

FLOAT = TensorProto.FLOAT


class SpaceInputs(NamedTuple):
    """What a state space reads of a layer, beside states."""

    mixed: str  # [..., channels], ahead of the convolution: values, what goes in, what comes out
    kernel: str  # [channels, 1, kernel]
    bias: str  # [channels], of the convolution; "": none
    dt: str  # float32 [..., heads], what steps and decays are made of
    steps: str  # likewise, the softplus of that and a bias, by which values are multiplied
    a_log: str  # float32 [heads]
    dt_bias: str  # likewise


class Scanned(NamedTuple):
    """What comes of it, float32 [..., heads, head_size] each."""

    values: str  # behind the convolution
    outputs: str  # what is taken of states


Scan = Callable[[int, SpaceInputs], Scanned]  # (layer, inputs)


def scan_by_slots(
    g: GraphBuilder, space: StateSpaceSpec, dtype: int, layer: int, inputs: SpaceInputs
) -> Scanned:
    """Convolution and state space in the paged graph, whose activations are of the type `dtype`."""
    conv = nodes.StatePool(names.past_conv_state(layer), names.present_conv_state(layer), "conv")
    mixed = nodes.causal_convolution(g, inputs.mixed, inputs.kernel, conv, inputs.bias)
    value, given, taken = split_mixed(g, space, mixed)
    group = (0, space.groups, space.state_size)
    values = by_heads(g, space, ops.cast(g, value, FLOAT, "values.cast"), (0,))
    recurrent = (names.past_recurrent_state(layer), names.present_recurrent_state(layer))
    output = nodes.state_space(
        g,
        ops.reshape(g, taken, group, "taken"),
        ops.reshape(g, given, group, "given"),
        ops.cast(g, stepped(g, values, inputs.steps), dtype, "stepped.cast"),
        inputs.dt,
        nodes.StatePool(*recurrent, "space"),
        a_log=inputs.a_log,
        dt_bias=inputs.dt_bias,
    )
    return Scanned(values, ops.cast(g, output, FLOAT, "space.cast"))


def split_mixed(g: GraphBuilder, space: StateSpaceSpec, mixed: str) -> tuple[str, ...]:
    """Values, what goes into states, and what comes out of them."""
    sizes = np.array([space.value_width, space.group_width, space.group_width], np.int64)
    return g.node(
        "Split", [mixed, g.constant(sizes, "sizes")], outputs=3, name="mixed.split", axis=-1
    )


def by_heads(g: GraphBuilder, space: StateSpaceSpec, x: str, leading: tuple[int, ...]) -> str:
    """Values of each head for itself, [..., heads, head_size]."""
    return ops.reshape(g, x, (*leading, space.heads, space.head_size), "values")


def stepped(g: GraphBuilder, values: str, steps: str) -> str:
    """Values of each head times a number; both float32."""
    column = g.node("Unsqueeze", [steps, ops.last_axis(g)], name="steps.column")
    return g.node("Mul", [values, column], name="stepped")


def state_space_layer(
    g: GraphBuilder,
    spec: ArchSpec,
    weights: StoredWeights,
    layer: int,
    x: str,
    linear: Callable[[str, str], str],
    scan: Scan,
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
        scan: Convolution and state space.
        leading: Reshape dimensions of x before the last.

    Returns:
        [..., value_width].
    """
    assert isinstance(spec.linear, StateSpaceSpec)
    role, space = f"layers.{layer}.linear", spec.linear

    def vector(name: str, *shape: int) -> str:
        ref = weights.vectors[f"{role}.{name}"]
        return g.weight(ref.view(f"{role}.{name}.view", shape) if shape else ref)

    with g.scope("linear"):
        dt, bias = ops.cast(g, linear(f"{role}.dt", x), FLOAT, "dt.cast"), vector("dt_bias")
        steps = g.node("Softplus", [g.node("Add", [dt, bias], name="dt.biased")], name="steps")
        found = scan(
            layer,
            SpaceInputs(
                mixed=linear(f"{role}.mixed", x),
                kernel=vector("conv", space.channels, 1, space.kernel),
                bias=vector("conv_bias") if space.conv_bias else "",
                dt=dt,
                steps=steps,
                a_log=vector("a_log"),
                dt_bias=bias,
            ),
        )
        skip = g.node("Mul", [found.values, vector("skip", space.heads, 1)], name="skip")
        output = g.node("Add", [found.outputs, skip], name="output")
        flat = ops.reshape(g, output, (*leading, space.value_width), "join")
        gate = ops.silu(g, ops.cast(g, linear(f"{role}.z", x), FLOAT, "z.cast"))
        gated = g.node("Mul", [flat, gate], name="gated")
        if space.without_norm:
            return ops.cast(g, gated, activation_dtype(weights), "gated.cast")
        normed = _group_norm(g, space, gated, vector("norm"), spec.inner_eps, leading)
        return ops.cast(g, normed, activation_dtype(weights), "normed.cast")


def _group_norm(
    g: GraphBuilder,
    space: StateSpaceSpec,
    x: str,
    weight: str,
    epsilon: float,
    leading: tuple[int, ...],
) -> str:
    """RMSNorm over what the heads of each group have, [..., value_width] in float32."""
    if space.groups == 1:
        return ops.rms_norm(g, x, weight, epsilon, "norm")
    size = space.value_width // space.groups
    ones = g.constant(np.ones(size, np.float32), "ones")
    groups = ops.reshape(g, x, (*leading, space.groups, size), "groups")
    normed = ops.rms_norm(g, groups, ones, epsilon, "norm")
    flat = ops.reshape(g, normed, (*leading, space.value_width), "norm.join")
    return g.node("Mul", [flat, weight], name="norm.scaled")
