"""Set the precision that products with quantized weights compute in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import onnx

from onnxport.graphs import contract
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.passes.result import PassResult, copy_model

_PRODUCTS: Final = ("MatMulNBits", "QMoE")


def set_accuracy(model: onnx.ModelProto, level: int) -> PassResult:
    """Give every MatMulNBits and QMoE the accuracy level that a device is good at.

    Args:
        model: Any model.
        level: The least precise type that activations may be brought to inside the operator: 1
            float32, 2 float16, 3 bfloat16, 4 int8, 0 unset (ONNX Runtime's operator schema).

    Raises:
        ValueError: The level is not one of these.
    """
    if level not in contract.ACCURACY_LEVELS:
        raise ValueError(f"accuracy level {level} is not one of {contract.ACCURACY_LEVELS}")
    copy = copy_model(model)
    nodes = list(_products(copy))
    for node in nodes:
        set_attribute(node, "accuracy_level", level)
    counts = Counter({_PRODUCTS[0]: 0}) + Counter(node.op_type for node in nodes)
    changes = {f"{name} at level {level}": count for name, count in counts.items()}
    return PassResult("accuracy", copy, changes)


def takes_int8(model: onnx.ModelProto, level: int | None = None) -> bool:
    """Whether there is such a product, and each may bring its activations to int8 (level 4).

    Args:
        model: Any model.
        level: The level that they are going to get; None: they keep theirs.
    """
    levels = _levels(model)
    return (levels if level is None or not levels else {level}) == {contract.INT8_LEVEL}


def has_int8_products(model: onnx.ModelProto) -> bool:
    """Whether some such product may bring its activations to int8 (level 4)."""
    return contract.INT8_LEVEL in _levels(model)


def _levels(model: onnx.ModelProto) -> set[int]:
    nodes = _products(model)
    return {next((a.i for a in node.attribute if a.name == "accuracy_level"), 0) for node in nodes}


def _products(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for node in model.graph.node:
        if node.op_type in _PRODUCTS and node.domain == contract.MICROSOFT:
            yield node
