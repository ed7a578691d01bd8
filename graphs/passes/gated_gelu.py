"""Fuse the gate of a gated feed-forward layer that has a GELU, as `gated_silu` does with a SiLU.

`onnxport.GatedGelu` is one pass over the joined projection, instead of a `Split` into gate and up,
ONNX's `Gelu` and a product. For devices whose operator library has it.
"""

from __future__ import annotations

from typing import Final

import onnx

from onnxport.graphs.passes.gated_silu import Gate, Values, fuse_gates
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.write_gelu import is_gelu_tanh

GATED_GELU: Final = "GatedGelu"  # [..., 2 * inner] -> [..., inner], gates first


def fuse_gated_gelu(model: onnx.ModelProto) -> PassResult:
    """Replace every `Split, Gelu, Mul` that is a gated GELU, as tanh approximates it.

    A pattern fires only where the Split halves the last axis and nothing else reads what it
    leaves out: the halves and the activated gate are neither graph outputs nor inputs of other
    nodes.
    """
    copy, found = fuse_gates(model, GATED_GELU, _match)
    return PassResult("gated_gelu", copy, {"gated GELUs fused": found} if found else {})


def _match(split: onnx.NodeProto, values: Values) -> Gate | None:
    """The gated GELU that starts at `split`, if one does."""
    gate, up = split.output
    of_gate = values.inner_readers(gate)
    if len(of_gate) != 1 or not is_gelu_tanh(of_gate[0]):
        return None
    product = values.product(of_gate[0].output[0], up)
    return None if product is None else Gate(split, (of_gate[0],), product)
