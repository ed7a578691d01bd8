"""State spaces in the GQA graph, whose states are of a batch's rows."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxport.exporter.linear_batch import Padding, convolve_rows, keep_inputs
from onnxport.exporter.space_layer import Scanned, SpaceInputs, by_heads, split_mixed, stepped
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_spec import StateSpaceSpec


def scan_by_rows(
    g: GraphBuilder, space: StateSpaceSpec, padding: Padding, layer: int, inputs: SpaceInputs
) -> Scanned:
    """Convolution and state space in the GQA graph, the latter in float32.

    What is no token adds nothing to a state, and lets all of it stay.
    """
    keep_inputs(g, padding, layer, inputs.mixed)
    first = convolve_rows(g, layer, inputs.mixed, inputs.kernel, inputs.bias)
    mixed = ops.cast(g, first, TensorProto.FLOAT, "conv.cast")
    value, given, taken = split_mixed(g, space, mixed)
    rate = g.node("Neg", [g.node("Exp", [inputs.a_log], name="rate.exp")], name="rate")
    values = by_heads(g, space, value, (0, 0))
    real = g.node("Mul", [inputs.steps, padding.real], name="steps.real")
    added = stepped(g, values, real)
    output, _ = g.node(
        "LinearAttention",
        [
            _of_each_head(g, space, taken, "taken"),
            _of_each_head(g, space, given, "given"),
            ops.reshape(g, added, (0, 0, space.value_width), "added"),
            names.gqa_past_recurrent_state(layer),
            g.node("Mul", [real, rate], name="decay"),
        ],
        outputs=[".out", names.gqa_present_recurrent_state(layer)],
        domain=names.MICROSOFT,
        name="space",
        q_num_heads=space.heads,
        kv_num_heads=space.heads,
        update_rule="gated",
        scale=1.0,
    )
    heads = ops.reshape(g, output, (0, 0, space.heads, space.head_size), "space.heads")
    return Scanned(values, heads)


def _of_each_head(g: GraphBuilder, space: StateSpaceSpec, x: str, name: str) -> str:
    """What a group has, for each of its heads; [batch, seq, heads * state_size]."""
    shared = space.heads // space.groups
    if shared == 1:
        return x
    groups = ops.reshape(g, x, (0, 0, space.groups, space.state_size), f"{name}.groups")
    places = np.repeat(np.arange(space.groups), shared).astype(np.int64)
    repeated = g.node(
        "Gather", [groups, g.constant(places, "shared")], name=f"{name}.repeat", axis=2
    )
    return ops.reshape(g, repeated, (0, 0, space.heads * space.state_size), f"{name}.join")
