"""A layer that is a gated convolution over a few tokens, in both graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from onnxport.exporter.linear_batch import Padding, convolve_rows, keep_inputs
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import contract as names
from onnxport.graphs import linear_attention as nodes
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_spec import ShortConvSpec
from onnxport.graphs.spec import ArchSpec


class ConvInputs(NamedTuple):
    """What a convolution reads, beside its state."""

    x: str  # [..., channels]
    kernel: str  # [channels, 1, kernel]
    bias: str  # [channels], or "" for none


Convolve = Callable[[int, ConvInputs], str]  # (layer, inputs) -> [..., channels]


def convolve_by_slots(g: GraphBuilder, layer: int, inputs: ConvInputs) -> str:
    """The convolution in the paged graph."""
    pool = nodes.StatePool(names.past_conv_state(layer), names.present_conv_state(layer), "conv")
    return nodes.causal_convolution(
        g, inputs.x, inputs.kernel, pool, bias=inputs.bias, activation="none"
    )


def convolve_by_rows(g: GraphBuilder, padding: Padding, layer: int, inputs: ConvInputs) -> str:
    """The convolution in the GQA graph."""
    keep_inputs(g, padding, layer, inputs.x)
    return convolve_rows(g, layer, inputs.x, inputs.kernel, inputs.bias, activation="none")


def short_convolution(
    g: GraphBuilder,
    spec: ArchSpec,
    weights: StoredWeights,
    layer: int,
    x: str,
    linear: Callable[[str, str], str],
    convolve: Convolve,
) -> str:
    """What a layer has in place of attention, but for its last product.

    One product makes three parts of a token: the convolution reads the product of the first and the
    last, and what it gives is times the second.

    Args:
        g: The builder.
        spec: The model.
        weights: As they are stored.
        layer: Its number.
        x: [..., hidden_size].
        linear: (role, x): a product with the matrix of a role.
        convolve: The convolution.

    Returns:
        [..., channels].
    """
    assert isinstance(spec.linear, ShortConvSpec)
    role, sizes = f"layers.{layer}.linear", spec.linear
    kernel = weights.vectors[f"{role}.conv"]
    kernel = kernel.view(f"{role}.conv.kernel", (sizes.channels, 1, sizes.kernel))
    bias = g.weight(weights.vectors[f"{role}.conv_bias"]) if sizes.bias else ""
    with g.scope("short_conv"):
        parts = linear(f"{role}.in", x)
        before, behind, values = g.node(
            "Split", [parts], outputs=3, name="split", axis=-1, num_outputs=3
        )
        read = g.node("Mul", [before, values], name="gated_in")
        found = convolve(layer, ConvInputs(read, g.weight(kernel), bias))
        return g.node("Mul", [behind, found], name="gated_out")
