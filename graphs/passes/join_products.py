"""Join products that are added up, where a device pays for each node and for each output of one.

`split_experts` cuts the rows of all experts in parts, gives each a product, and adds these up:

    y = x[0] w[0]^T + x[1] w[1]^T + …          x = [x[0], x[1], …]

With the weights side by side that is one product, `x w^T`, of which the parts of x are what they
were: two nodes less for each expert, and no Split. WebGPU binds all outputs of a Split at once, and
can bind few.

Side by side the weights are not in the artifact: they are read and copied, and take memory on the
host for as long as the session lives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, consumers, initializers, names, set_attribute
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.retype import external_placeholder
from onnxport.graphs.passes.split_matmul import drop_unread
from onnxport.graphs.tensors import numpy_dtype

_WEIGHTS: Final = {"MatMulNBits": (1, 2), "Gemm": (1,)}  # inputs, [features, columns, …]


def join_products(
    model: onnx.ModelProto, read_tensor: Callable[[TensorProto], NDArray[Any]]
) -> PassResult:
    """Replace a Split, products of its outputs, and the Adds of these by one product.

    It fires where the Split cuts the last axis, where all its outputs have products of one kind
    without zero points or biases, and the Adds take these one by one, in order; where nothing else
    reads anything in between, nor their weights. What is added behind stays.

    Args:
        model: A graph.
        read_tensor: Returns the contents of an initializer.
    """
    copy = copy_model(model)
    found = _matches(copy)
    if not found:
        return PassResult("join_products", copy, {})
    attached: dict[str, NDArray[Any]] = {}
    taken = names(copy)
    made = {
        one.sums[-1].output[0]: _joined(one, copy, read_tensor, attached, taken) for one in found
    }
    gone = {node.output[0] for one in found for node in (one.split, *one.products, *one.sums)}
    nodes = []
    for node in copy.graph.node:
        if node.output[0] in made:
            nodes.append(made[node.output[0]])
        elif node.output[0] not in gone:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    drop_unread(copy)
    changes = {"products joined": sum(len(one.products) for one in found)}
    return PassResult("join_products", copy, changes, attached)


def joined_bytes(model: onnx.ModelProto) -> int:
    """How much memory `join_products` takes for what it makes."""
    tensors = initializers(model)
    parts = [
        tensors[product.input[place]]
        for one in _matches(model)
        for product in one.products
        for place in _WEIGHTS[product.op_type]
    ]
    return sum(math.prod(one.dims) * numpy_dtype(one.data_type).itemsize for one in parts)


def _matches(model: onnx.ModelProto) -> list[_Sum]:
    """What can be joined."""
    graph = _Graph(
        initializers(model),
        {name: [node for node, _ in found] for name, found in consumers(model).items()},
        {info.name for info in model.graph.output},
    )
    return [one for node in model.graph.node if (one := _match(node, graph)) is not None]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A model, looked up."""

    tensors: dict[str, TensorProto]
    readers: dict[str, list[onnx.NodeProto]]
    outputs: set[str]

    def reader(self, name: str) -> onnx.NodeProto | None:
        """The only node that reads a value."""
        found = self.readers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.outputs else None


@dataclass(frozen=True, slots=True)
class _Sum:
    """Nodes that one product can take the place of."""

    split: onnx.NodeProto
    products: list[onnx.NodeProto]  # of each of its outputs
    sums: list[onnx.NodeProto]  # Adds: of the first two products, of that and the third, …


def _match(split: onnx.NodeProto, graph: _Graph) -> _Sum | None:
    if split.op_type != "Split" or split.domain or attribute_int(split, "axis", 0) != -1:
        return None
    products = [node for name in split.output if (node := graph.reader(name)) is not None]
    is_sum = len(products) == len(split.output) > 1 and all(
        product.input[0] == name and _fits(product, products[0], graph)
        for name, product in zip(split.output, products, strict=True)
    )
    if not is_sum:
        return None
    sums: list[onnx.NodeProto] = []
    total = products[0].output[0]
    for product in products[1:]:
        node = graph.reader(total)
        added = [total, product.output[0]]
        if node is None or node.op_type != "Add" or list(node.input) != added:
            return None
        if graph.reader(added[1]) is None:
            return None
        sums.append(node)
        total = node.output[0]
    return _Sum(split, products, sums)


def _fits(node: onnx.NodeProto, first: onnx.NodeProto, graph: _Graph) -> bool:
    """Whether a node is a product of the first one's kind, with weights of its own."""
    places = _WEIGHTS.get(node.op_type, ())
    if node.op_type != first.op_type or len(node.input) != 1 + len(places) or not places:
        return False
    for place in places:
        tensor, other = (graph.tensors.get(one.input[place]) for one in (node, first))
        if tensor is None or other is None or graph.reader(tensor.name) is None:
            return False
        if (tensor.dims[0], len(tensor.dims)) != (other.dims[0], len(other.dims)):
            return False
    given, expected = ({a.name: a for a in one.attribute} for one in (node, first))
    if given != expected:
        return False
    if node.op_type == "Gemm":
        return set(given) == {"transB"} and given["transB"].i == 1
    ranks = [len(graph.tensors[name].dims) for name in node.input[1:]]  # flat scales are not joined
    return node.domain == contract.MICROSOFT and ranks == [3, 2]


def _joined(
    found: _Sum,
    model: onnx.ModelProto,
    read_tensor: Callable[[TensorProto], NDArray[Any]],
    attached: dict[str, NDArray[Any]],
    taken: set[str],
) -> onnx.NodeProto:
    """The one product; its weights are declared in the model and go to `attached`."""
    first, tensors = found.products[0], initializers(model)
    node = onnx.NodeProto()
    node.CopyFrom(first)
    node.input[0], node.output[0] = found.split.input[0], found.sums[-1].output[0]
    for place in _WEIGHTS[first.op_type]:
        parts = [tensors[product.input[place]] for product in found.products]
        name = f"{parts[0].name}.joined"
        while name in taken:
            name += "_"
        taken.add(name)
        value = np.concatenate([read_tensor(part) for part in parts], axis=1)
        attached[name] = value
        model.graph.initializer.append(external_placeholder(name, parts[0].data_type, value.shape))
        node.input[place] = name
    if first.op_type == "MatMulNBits":
        set_attribute(node, "K", sum(attribute_int(one, "K", 0) for one in found.products))
    return node
