"""Experts as OpenVINO's CPU plugin computes them: each token by those that it is given to.

The plugin has a product that gathers: for each token it multiplies the weights of the chosen
experts alone, which stay int4 or int8 (`GatherMatmul` in its runtime graph). No public operator
stands for it; the plugin makes it of a pattern, that of gpt-oss as PyTorch computes all experts:

    tiled  = x, once for each expert
    joined = tiled gate_up^T + bias
    gated  = (Clamp(up) + constant) * Swish(Minimum(gate, constant))
    down   = gated down^T + bias
    y      = sum over experts of down * parts, which ScatterElementsUpdate made of the chosen

Gate and up may take turns in it, as the exporter stores them, so that weights stay over the
artifact's memory map. (The other pattern, of three products, would want copies of them apart.) Most
experts have neither biases nor limits; in their places are constants that change nothing. They may
not be 0, for sums with that are removed before the pattern is looked for. `NOTHING` is too small
to change any number above 2^-102.

A plugin that does not know the pattern computes what is written, all experts for each token, with
the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.experts import Swiglu

NOTHING: Final = float(np.finfo(np.float32).tiny)  # normal, so that no processor takes it for 0
NO_LIMIT: Final = float(np.finfo(np.float32).max)
GATHERS: Final = "GatherMatmul"  # layerType of the product in the runtime graph
PRODUCTS: Final = 2  # that a layer has of them: gate and up, which are one, and down


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Of all experts; gate's rows and up's take turns."""

    gate_up: Any  # a node, float32 [experts, 2 * size, hidden]
    down: Any  # likewise [experts, hidden, size]
    gate_up_bias: NDArray[np.float32] | None = None  # [experts, 2 * size]
    down_bias: NDArray[np.float32] | None = None  # [experts, hidden]


def write_experts(
    x: Any, logits: Any, weights: ExpertWeights, per_token: int, swiglu: Swiglu
) -> Any:
    """What a layer of experts returns, float32 [num_tokens, hidden].

    Args:
        x: float32 [num_tokens, hidden].
        logits: of the router, float32 [num_tokens, experts].
        weights: of the experts.
        per_token: how many experts a token is given to.
        swiglu: what there is between an expert's products.
    """
    import openvino.opset15 as ops

    (count, joined_size, hidden), axes = weights.gate_up.shape, range(3)
    limit = NO_LIMIT if swiglu.limit is None else swiglu.limit
    parts = _parts(logits, count, per_token)
    # Only a Reshape of another rank stays one: the sum has three dimensions, and so a use.
    rows = ops.reshape(ops.add(x, _constant([[[NOTHING]]])), _ints([-1, hidden]), False)
    tiled = ops.reshape(ops.tile(rows, _ints([count, 1])), _ints([count, -1, hidden]), False)
    bias = _bias(weights.gate_up_bias, count, joined_size)
    joined = ops.add(ops.matmul(tiled, weights.gate_up, False, True), bias)
    gate, up = (
        ops.slice(joined, _ints([turn]), _ints([joined_size]), _ints([2]), _ints([axes[-1]]))
        for turn in (0, 1)
    )
    silu = ops.swish(ops.minimum(gate, _constant(limit)), _constant(swiglu.alpha))
    up = ops.add(ops.clamp(up, -limit, limit), _constant(swiglu.up_offset or NOTHING))
    made = ops.matmul(ops.multiply(up, silu), weights.down, False, True)
    made = ops.add(made, _bias(weights.down_bias, count, hidden))
    made = ops.reshape(made, _ints([count, -1, hidden]), False)
    return ops.reduce_sum(ops.multiply(made, parts), _ints([0]), False).output(0)


def count_gathers(compiled: Any) -> int:
    """How many products of a compiled graph are of the chosen experts alone."""
    nodes = compiled.get_runtime_model().get_ops()
    return sum(node.get_rt_info()["layerType"].astype(str) == GATHERS for node in nodes)


def _parts(logits: Any, count: int, per_token: int) -> Any:
    """What a token has of each expert, 0 of those not chosen, [experts, num_tokens, 1]."""
    import openvino.opset15 as ops

    chosen = ops.topk(logits, _ints(per_token), 1, "max", "value", "i32", True)
    none = ops.broadcast(_constant(0), ops.shape_of(logits))
    parts = ops.softmax(chosen.output(0), 1)
    scattered = ops.scatter_elements_update(none, chosen.output(1), parts, _ints(1))
    return ops.reshape(ops.transpose(scattered, _ints([1, 0])), _ints([count, -1, 1]), False)


def _bias(values: NDArray[np.float32] | None, count: int, size: int) -> Any:
    """A bias of each expert; None: one that changes nothing."""
    given = np.full((count, size), NOTHING) if values is None else values
    return _constant(given.reshape(count, 1, size))


def _constant(value: Any) -> Any:
    import openvino.opset15 as ops

    return ops.constant(np.array(value, np.float32))


def _ints(value: Any) -> Any:
    import openvino.opset15 as ops

    return ops.constant(np.array(value, np.int64))
