"""Let the output head compute no more logits exactly than a step needs.

A decode step waits for memory, and the 8-bit head is a third and more of all weights that it reads.
Greedy and top-k sampling look at few logits of a row, and so does drawing from all of them, where
each has its random number. `onnxport.MatMulNBits` keeps four bits of
each weight of such a product besides all eight, reads these first, and reads all eight only where
one of a row's largest outputs may be; a graph input says how many of these there have to be.
Another one says which tokens a row may get at all: weights of tokens that no row may get are not
read. For devices whose operator library has it, after `fuse_product_bias` and `use_stored_scales`.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, consumers, names, set_input
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS
from onnxport.graphs.passes.result import PassResult, copy_model

LEAST_OUTPUTS: Final = 4096  # with fewer there is nothing to gain
_BITS: Final = 8
_BIAS: Final = 5  # the inputs' places, behind skip and gamma
_EXACT: Final = 6
_ALLOWED: Final = 12  # behind what is for summaries, and for adapters
_RACES: Final = 13


def use_coarse_head(model: onnx.ModelProto) -> PassResult:
    """Give the product of the logits, and the graph, EXACT_LOGITS, ALLOWED_TOKENS and RACES.

    That is done for 8 bits, LEAST_OUTPUTS or more, and no bias, where nothing in the graph reads
    the logits.
    """
    copy = copy_model(model)
    rows, node = rows_of_logits(copy), head_of(copy)
    if rows is None or node is None or not _fits(node) or contract.LOGITS in consumers(copy):
        return PassResult("coarse_head", copy, {})
    if contract.EXACT_LOGITS in names(copy):
        return PassResult("coarse_head", copy, {})
    set_input(node, _EXACT, contract.EXACT_LOGITS)
    set_input(node, _ALLOWED, contract.ALLOWED_TOKENS)
    set_input(node, _RACES, contract.RACES)
    info, kind = onnx.helper.make_tensor_value_info, TensorProto.INT32
    dims = [contract.NUM_ALLOWED, contract.mask_words(attribute_int(node, "N", 0))]
    copy.graph.input.append(info(contract.EXACT_LOGITS, kind, [rows]))
    copy.graph.input.append(info(contract.ALLOWED_TOKENS, kind, dims))
    copy.graph.input.append(info(contract.RACES, TensorProto.DOUBLE, [contract.NUM_RACES, 2]))
    return PassResult("coarse_head", copy, {"heads that compute no more than is asked for": 1})


def coarse_head_bytes(model: onnx.ModelProto) -> int:
    """What the operator keeps besides its weights: half a byte for each of them; 0 without it."""
    found = [node for node in model.graph.node if contract.EXACT_LOGITS in node.input]
    return sum(attribute_int(node, "K", 0) * attribute_int(node, "N", 0) // 2 for node in found)


def rows_of_logits(model: onnx.ModelProto) -> str | None:
    """The symbol of the rows of the logits; None where these are not [symbol, vocab]."""
    for info in model.graph.output:
        if info.name == contract.LOGITS:
            dims = info.type.tensor_type.shape.dim
            return dims[0].dim_param or None if len(dims) == 2 else None
    return None


def head_of(model: onnx.ModelProto) -> onnx.NodeProto | None:
    """Our product that makes the logits, LEAST_OUTPUTS or more; None where something else does."""
    for node in model.graph.node:
        if contract.LOGITS in node.output:
            is_product = node.op_type == MATMUL_NBITS and node.domain == DOMAIN
            is_large = attribute_int(node, "N", 0) >= LEAST_OUTPUTS
            is_first = node.output[0] == contract.LOGITS
            return node if is_product and is_large and is_first else None
    return None


def _fits(node: onnx.NodeProto) -> bool:
    return not any(node.input[_BIAS:]) and attribute_int(node, "bits", 4) == _BITS
