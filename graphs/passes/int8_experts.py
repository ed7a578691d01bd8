"""Write experts in MXFP4 as experts in 8 bits, for devices that have no operator for them.

What each number means stays the same, see `graphs.fp4`; weights take twice the memory, and are made
at load. All passes behind know experts of 8 bits. So it comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract, fp4
from onnxport.graphs.experts import FP4, GLOBAL_SCALES
from onnxport.graphs.inspect import (
    attribute_int,
    attribute_text,
    has_powers,
    initializers,
    names,
    set_attribute,
)
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.retype import FLOAT_DTYPES, external_placeholder
from onnxport.graphs.passes.split_experts import QMOE, is_swiglu
from onnxport.graphs.passes.split_matmul import drop_unread
from onnxport.graphs.tensors import numpy_dtype

Which = Callable[[onnx.NodeProto], bool]
WEIGHTS: Final = (2, 5)  # inputs: gate_up and down; scales are behind them


def write_int8_experts(
    model: onnx.ModelProto,
    read_tensor: Callable[[TensorProto], NDArray[Any]],
    dtype: str,
    which: Which = lambda node: True,
) -> PassResult:
    """Replace the weights of each QMoE in MXFP4 by integers of 8 bits that mean the same.

    Args:
        model: A graph as an artifact has it: weights are external data.
        read_tensor: Returns an initializer's contents.
        dtype: Of scales: what activations are going to have, one of `FLOAT_DTYPES`.
        which: Of these nodes.

    Raises:
        ArtifactError: Experts of another kind than the exporter writes, or a scale that is too
            large for the type.
    """
    copy = copy_model(model)
    tensors, taken = initializers(copy), names(copy)
    attached: dict[str, NDArray[Any]] = {}
    sources: dict[str, TensorProto] = {}

    def attach(source: TensorProto, ending: str, value: NDArray[Any], kind: int) -> str:
        name = f"{source.name}.{ending}"
        while name in taken:
            name += "_"
        taken.add(name)
        attached[name], sources[name] = value, source
        copy.graph.initializer.append(external_placeholder(name, kind, value.shape))
        return name

    nodes = list(_nodes(copy, which))
    for node in nodes:
        check_fp4(node, tensors)
        for place in WEIGHTS:
            weight, scales = (tensors[node.input[at]] for at in (place, place + 1))
            numbers = fp4.int8_numbers(read_tensor(weight))
            kind = FLOAT_DTYPES[dtype]
            halves = fp4.int8_scales(scales.name, read_tensor(scales), numpy_dtype(kind))
            node.input[place] = attach(weight, "int8", numbers, TensorProto.UINT8)
            node.input[place + 1] = attach(scales, dtype, halves, kind)
        del node.input[GLOBAL_SCALES[0] :]
        while not node.input[-1]:
            del node.input[-1]
        kept = [attribute for attribute in node.attribute if attribute.name != "quant_type"]
        del node.attribute[:]
        node.attribute.extend(kept)
        set_attribute(node, "expert_weight_bits", fp4.INT8_BITS)
    if nodes:
        drop_unread(copy)
        if not has_powers(copy):
            copy.ir_version = contract.IR_VERSION
    changes = {"layers of experts in MXFP4 written in 8 bits": len(nodes)} if nodes else {}
    return PassResult("int8_experts", copy, changes, attached, sources)


def int8_bytes(model: onnx.ModelProto, dtype: str, which: Which = lambda node: True) -> int:
    """How much memory `write_int8_experts` takes for what it makes. Raises as that does."""
    tensors = initializers(model)
    itemsize = numpy_dtype(FLOAT_DTYPES[dtype]).itemsize
    total = 0
    for node in _nodes(model, which):
        check_fp4(node, tensors)
        for place in WEIGHTS:
            weight, scales = (tensors[node.input[at]] for at in (place, place + 1))
            total += 2 * math.prod(weight.dims) + itemsize * math.prod(scales.dims)
    return total


def is_fp4(node: onnx.NodeProto) -> bool:
    """Whether a node is of experts in MXFP4."""
    return node.op_type == QMOE and attribute_text(node, "quant_type") == FP4


def check_fp4(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> None:
    """Raise ArtifactError for experts in MXFP4 that are not as the exporter writes them."""
    if not (is_swiglu(node) and _is_ours(node, tensors)):
        raise ArtifactError(
            f"{QMOE} {node.name!r}, of experts in MXFP4, is not as the exporter writes it; export "
            "the model again with this version"
        )


def _is_ours(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Whether numbers, scales and attributes are as the exporter has them."""
    found = [tensors.get(name) for name in node.input]
    return (
        attribute_int(node, "expert_weight_bits", fp4.BITS) == fp4.BITS
        and attribute_int(node, "block_size", 0) == fp4.BLOCK_SIZE
        and all(_is_stored(found[at], TensorProto.UINT8) for at in WEIGHTS)
        and all(_is_stored(found[at + 1], TensorProto.FLOAT8E8M0) for at in WEIGHTS)
        and all(_is_one(found[at]) for at in GLOBAL_SCALES)
    )


def _nodes(model: onnx.ModelProto, which: Which) -> Iterator[onnx.NodeProto]:
    return (node for node in model.graph.node if is_fp4(node) and which(node))


def _is_stored(tensor: TensorProto | None, kind: int) -> bool:
    return (
        tensor is not None
        and tensor.data_type == kind
        and tensor.data_location == TensorProto.EXTERNAL
    )


def _is_one(tensor: TensorProto | None) -> bool:
    """Whether a tensor that is stored in the graph holds ones."""
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return False
    return bool(np.all(numpy_helper.to_array(tensor) == 1))
