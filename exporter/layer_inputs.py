"""What layers are told of tokens in both graphs, and how a layer ends that is.

A table has a row of each token, and a product of the embedding is added to it: Gemma 3n and 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from onnxport.exporter.feed_forward import ACTIVATIONS
from onnxport.exporter.plan import LAYER_INPUTS
from onnxport.graphs import contract as names
from onnxport.graphs import ops

if TYPE_CHECKING:
    from onnxport.exporter.decoder import Decoder


def layer_inputs(d: Decoder, embedded: str) -> tuple[str, ...]:
    """What each layer is told of the tokens, [..., layer_input_size]; none where it is not."""
    g, size, layers = d.g, d.spec.layer_input_size, d.spec.num_layers
    if size is None:
        return ()
    with g.scope(LAYER_INPUTS):
        found = d.embed(LAYER_INPUTS, _rows(d))
        product = d.linear(f"{LAYER_INPUTS}.product", embedded)
        apart = ops.reshape(g, product, (*d.leading, layers, size), "apart")
        weight = g.weight(d.weights.vectors[f"{LAYER_INPUTS}.norm"])
        normed = ops.rms_norm(g, apart, weight, d.spec.inner_eps, "norm")
        joined = ops.reshape(g, normed, (*d.leading, layers * size), "join")
        both = g.node("Add", [found, joined], name="both")
        sizes = g.constant(np.full(layers, size, np.int64), "sizes")
        return tuple(g.node("Split", [both, sizes], outputs=layers, name="split", axis=-1))


def ending(d: Decoder, layer: int, hidden: str, delta: str, told: str) -> str:
    """The stream behind a layer: what it was told goes in, and it may be scaled."""
    g, role = d.g, f"layers.{layer}"
    hidden = g.node("Add", [hidden, delta], name="residual")
    if told:
        hidden = g.node("Add", [hidden, of_told(d, role, hidden, told)], name="residual.told")
    if d.spec.layer_scales:
        weight = g.weight(d.weights.vectors[f"{role}.scale"])
        hidden = g.node("Mul", [hidden, weight], name="residual.scaled")
    return hidden


def of_told(d: Decoder, role: str, hidden: str, told: str) -> str:
    """What is added of what a layer is told, as the stream chooses."""
    gate = d.linear(f"{role}.input_gate", hidden)
    gated = d.g.node("Mul", [ACTIVATIONS[d.spec.hidden_act](d.g, gate), told], name="told")
    return d.output(f"{role}.input_out", d.linear(f"{role}.input_out", gated))


def _rows(d: Decoder) -> str:
    """The rows of the table: tokens, or the first where there is none of one."""
    g, rows = d.g, d.spec.layer_input_rows
    if rows is None:
        return names.INPUT_IDS
    end, first = (g.constant(np.array(one, np.int64), "row") for one in (rows, 0))
    has_one = g.node("Less", [names.INPUT_IDS, end], name="has_row")
    return g.node("Where", [has_one, names.INPUT_IDS, first], name="rows")
