"""Take a joined quantized projection apart where its result is split at once.

The artifact joins the gate and up projections of a feed-forward layer: one product, then a Split.
A device that fuses the activation into a product wants them apart. Rows of MatMulNBits weights are
output features, so the parts are ranges of the same bytes; nothing is copied or stored twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, consumers, initializers, names, set_attribute
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.tensors import numpy_dtype

MATMUL_NBITS: Final = "MatMulNBits"


@dataclass(frozen=True, slots=True)
class _Joined:
    product: onnx.NodeProto
    split: onnx.NodeProto
    rows: tuple[tuple[int, int], ...]  # each part's first output feature, and the next one's


def split_matmul(model: onnx.ModelProto) -> PassResult:
    """Replace `MatMulNBits, Split` by one MatMulNBits for each part.

    It fires where the Split cuts the last axis in equal parts and is the only reader of the
    product, and where weights, scales and zero points are external data that no other node reads. A
    product with an order of inputs or a bias stays as it is.
    """
    copy = copy_model(model)
    found = {node.output[0]: node for node in copy.graph.node if node.op_type == MATMUL_NBITS}
    tensors = initializers(copy)
    readers = {name: len(nodes) for name, nodes in consumers(copy).items()}
    for info in copy.graph.output:
        readers[info.name] = readers.get(info.name, 0) + 1
    taken = names(copy)
    replaced: dict[str, list[onnx.NodeProto]] = {}  # first output of a Split -> its products
    dropped: set[str] = set()
    for split in copy.graph.node:
        product = found.get(split.input[0]) if split.op_type == "Split" else None
        joined = None if product is None else _match(product, split, tensors, readers)
        if joined is None:
            continue
        replaced[split.output[0]] = list(_parts(joined, tensors, copy.graph, taken))
        dropped.add(joined.product.output[0])
    nodes: list[onnx.NodeProto] = []
    for node in copy.graph.node:
        if node.output[0] in replaced:
            nodes.extend(replaced[node.output[0]])
        elif node.output[0] not in dropped:
            nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    drop_unread(copy)
    changes = {"joined projections split": len(replaced)} if replaced else {}
    return PassResult("split_matmul", copy, changes)


def _match(
    product: onnx.NodeProto,
    split: onnx.NodeProto,
    tensors: dict[str, TensorProto],
    readers: dict[str, int],
) -> _Joined | None:
    features = attribute_int(product, "N", 0)
    count = len(split.output)
    fits = (
        product.domain == contract.MICROSOFT
        and split.domain == ""
        and len(split.input) == 1
        and attribute_int(split, "axis", 0) == -1
        and features % count == 0
        and readers[product.output[0]] == 1
        and len(product.input) >= 3
        and not any(product.input[4:])
        and attribute_int(product, "weight_prepacked", 0) == 0
    )
    if not fits:
        return None
    for name in filter(None, product.input[1:4]):
        tensor = tensors.get(name)
        if tensor is None or tensor.data_location != TensorProto.EXTERNAL:
            return None
        if readers[name] != 1 or math.prod(tensor.dims) % features:
            return None
    ends = accumulate([features // count] * count, initial=0)
    return _Joined(product, split, tuple(pairwise(ends)))


def _parts(
    joined: _Joined,
    tensors: dict[str, TensorProto],
    graph: onnx.GraphProto,
    taken: set[str],
) -> Iterator[onnx.NodeProto]:
    """The products of a joined one; declares their weights and scales."""
    features = joined.rows[-1][1]
    for output, (first, end) in zip(joined.split.output, joined.rows, strict=True):
        node = onnx.NodeProto()
        node.CopyFrom(joined.product)
        node.name = f"{joined.product.name}.{first}"
        node.output[0] = output
        set_attribute(node, "N", end - first)
        for index in range(1, len(node.input)):
            if not node.input[index]:
                continue
            whole = tensors[node.input[index]]
            name = f"{whole.name}.{first}"
            while name in taken:
                name += "_"
            taken.add(name)
            row = math.prod(whole.dims) // features  # elements of one output feature
            dims = [end - first, *whole.dims[1:]]
            if math.prod(dims) != row * (end - first):
                dims = [row * (end - first)]  # flat scales: [N * blocks]
            graph.initializer.append(row_range(whole, name, (first, end), features, dims))
            node.input[index] = name
        yield node


def row_range(
    whole: TensorProto, name: str, rows: tuple[int, int], count: int, dims: list[int]
) -> TensorProto:
    """Rows [first, end) of the `count` that an external tensor has, as one of its own."""
    first, end = rows
    row = math.prod(whole.dims) // count  # elements
    assert math.prod(dims) == row * (end - first), f"{whole.name} {list(whole.dims)} to {dims}"
    itemsize = numpy_dtype(whole.data_type).itemsize
    entries = {entry.key: entry.value for entry in whole.external_data}
    part = TensorProto(name=name, data_type=whole.data_type, dims=dims)
    part.data_location = TensorProto.EXTERNAL
    entries["offset"] = str(int(entries.get("offset", "0")) + first * row * itemsize)
    entries["length"] = str((end - first) * row * itemsize)
    for key, value in entries.items():
        part.external_data.add(key=key, value=value)
    return part


def drop_unread(model: onnx.ModelProto) -> None:
    """Remove initializers that no node reads any more."""
    read = {name for node in model.graph.node for name in node.input}
    kept = [
        TensorProto.FromString(tensor.SerializeToString())
        for tensor in model.graph.initializer
        if tensor.name in read
    ]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
