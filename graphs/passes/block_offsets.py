"""Let our products add what offsets of their weights' blocks make of their input.

Weights `(quant - 8) * scale + offset`, as GGUF's Q4_1 and Q4_K are, are a product without offsets
in the artifact, and beside it a product of the offsets with the sums of the blocks of its input:

    y = Gemm(ReduceSum(Reshape(x, blocks)), offsets, MatMulNBits(x))

`onnxport.MatMulNBits` has these sums, for it rounds the blocks to int8, and adds that itself. For
devices whose operator library has it, right after `use_int8_matmul`, and behind the passes that add
adapters: an `AddLora` may be between the product and the Gemm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.graphs.inspect import (
    attribute_float,
    attribute_int,
    consumers,
    initializers,
    names,
    producers,
    set_input,
)
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS, OFFSETS
from onnxport.graphs.passes.lora import ADD_LORA
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.split_matmul import drop_unread


@dataclass(frozen=True, slots=True)
class _Match:
    """The nodes that add offsets; nothing else reads what is between product and sum."""

    product: onnx.NodeProto
    adding: onnx.NodeProto | None  # AddLora behind it
    total: onnx.NodeProto  # the Gemm
    offsets: str


def fuse_block_offsets(model: onnx.ModelProto, stored: onnx.ModelProto) -> PassResult:
    """Give each product of our own domain the offsets that follow it.

    It fires where the Gemm adds to a product without zero points what sums of whole blocks of that
    product's own input, and offsets in float16, make: an initializer [N, blocks].

    Args:
        model: A lowered graph, in float32.
        stored: The artifact's graph; the offsets in float16 are found there by their names.
    """
    copy = copy_model(model)
    graph = _Graph(copy, stored)
    taken = names(copy)
    made: dict[str, TensorProto] = {}
    dropped: set[str] = set()
    for match in [found for node in copy.graph.node if (found := graph.match(node))]:
        if match.offsets not in made:
            made[match.offsets] = tensor = TensorProto()
            tensor.CopyFrom(graph.halves[match.offsets])
            tensor.name = _fresh(f"{match.offsets}.stored", taken)
        set_input(match.product, OFFSETS, made[match.offsets].name)
        dropped.add(match.total.output[0])
        last = match.product if match.adding is None else match.adding
        last.output[0] = match.total.output[0]
    if not made:
        return PassResult("block_offsets", copy, {})
    kept = [
        node
        for node in copy.graph.node
        if not (node.op_type == "Gemm" and node.output[0] in dropped)
    ]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in _read(kept, copy)]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.graph.initializer.extend(made.values())
    drop_unread(copy)
    changes = {"offsets of blocks added by their products": len(dropped)}
    return PassResult("block_offsets", copy, changes)


def _read(nodes: list[onnx.NodeProto], model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes without sums of blocks that nothing reads any more."""
    wanted = {info.name for info in model.graph.output}
    kept = []
    for node in reversed(nodes):
        is_part = node.op_type in {"ReduceSum", "Reshape"}
        if not is_part or wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


class _Graph:
    """A model, looked up."""

    def __init__(self, model: onnx.ModelProto, stored: onnx.ModelProto) -> None:
        replaceable = {info.name for info in model.graph.input}
        self._tensors = {
            name: one for name, one in initializers(model).items() if name not in replaceable
        }
        self.halves = {
            name: one
            for name, one in initializers(stored).items()
            if one.data_type == TensorProto.FLOAT16 and name in self._tensors
        }
        self._makers = producers(model)
        self._readers = consumers(model)
        self._outputs = {info.name for info in model.graph.output}

    def match(self, total: onnx.NodeProto) -> _Match | None:
        """What ends at a node, if it is such a sum."""
        if total.op_type != "Gemm" or total.domain or len(total.input) != 3:
            return None
        factors = [attribute_float(total, name, 1.0) for name in ("alpha", "beta")]
        turned = [attribute_int(total, name, 0) for name in ("transA", "transB")]
        if factors != [1.0, 1.0] or turned != [0, 1]:
            return None
        sums, offsets, base = total.input
        product = self._maker(base, ADD_LORA)
        adding = product
        if adding is not None:
            base = adding.input[0]
        product = self._maker(base, MATMUL_NBITS)
        if product is None or any(product.input[3:]) or not self._is_read_once(base):
            return None
        if adding is not None and not self._is_read_once(adding.output[0]):
            return None
        blocks = attribute_int(product, "K", 0) // attribute_int(product, "block_size", 1)
        dims = [attribute_int(product, "N", 0), blocks]
        tensor = self.halves.get(offsets)
        if tensor is None or list(tensor.dims) != dims or not self._sums_blocks(sums, product):
            return None
        return _Match(product, adding, total, offsets)

    def _maker(self, name: str, kind: str) -> onnx.NodeProto | None:
        """The operator of ours that has a value for its first output."""
        node = self._makers.get(name)
        is_it = node is not None and node.op_type == kind and node.domain == DOMAIN
        return node if is_it and node is not None and node.output[0] == name else None

    def _is_read_once(self, name: str) -> bool:
        return len(self._readers.get(name, ())) == 1 and name not in self._outputs

    def _sums_blocks(self, sums: str, product: onnx.NodeProto) -> bool:
        """Whether a value is [rows, blocks]: sums of the blocks of a product's input."""
        summed = self._makers.get(sums)
        if summed is None or summed.op_type != "ReduceSum" or len(summed.input) != 2:
            return False
        axes, keeps = self._integers(summed.input[1]), attribute_int(summed, "keepdims", 1)
        cut = self._makers.get(summed.input[0])
        if axes not in ([-1], [2]) or keeps or cut is None or cut.op_type != "Reshape":
            return False
        depth, size = (attribute_int(product, name, 0) for name in ("K", "block_size"))
        shape = self._integers(cut.input[1])
        return cut.input[0] == product.input[0] and shape == [-1, depth // size, size]

    def _integers(self, name: str) -> list[int] | None:
        """A constant of the graph's own."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        if tensor.data_type != TensorProto.INT64 or math.prod(tensor.dims) > 3:
            return None
        values: NDArray[np.int64] = numpy_helper.to_array(tensor)
        return values.ravel().tolist()


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
