"""Look things up in a model: initializers, producers, consumers, element types."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import onnx
from onnx import TensorProto

# Operators whose first output has the element type of an input other than the first.
_TYPE_FROM: Final[Mapping[str, int]] = {"Where": 1, "GatherBlockQuantized": 2}

# Operators whose first output has one type, whatever their inputs.
_FIXED_TYPE: Final[Mapping[str, int]] = {
    "GatherRows": TensorProto.FLOAT,
    **dict.fromkeys(("Shape", "Size", "ArgMax", "ArgMin", "NonZero"), TensorProto.INT64),
    **dict.fromkeys(
        ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not", "IsNaN"),
        TensorProto.BOOL,
    ),
}

# Operators whose first output has the element type of their first input.
_TYPE_FROM_FIRST: Final = frozenset(
    [
        "Abs",
        "Add",
        "AddLora",
        "CausalConv",
        "Clip",
        "Concat",
        "CumSum",
        "Div",
        "Erf",
        "Exp",
        "Expand",
        "Flatten",
        "GatedDeltaNet",
        "GatedExperts",
        "GatedGelu",
        "GatedMlp",
        "GatedSilu",
        "Gather",
        "GatherElements",
        "GatherND",
        "Gelu",
        "Gemm",
        "GroupQueryAttention",
        "HeadProducts",
        "Identity",
        "LayerNormalization",
        "MatMul",
        "MatMulNBits",
        "Max",
        "Min",
        "MoE",
        "Mul",
        "Neg",
        "PagedAttention",
        "Pad",
        "Pow",
        "QMoE",
        "QuickGelu",
        "Range",
        "Reciprocal",
        "ReduceL2",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceSum",
        "Relu",
        "Reshape",
        "Round",
        "ScatterElements",
        "ScatterND",
        "Sigmoid",
        "SimplifiedLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "Slice",
        "Softmax",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Tanh",
        "Tile",
        "TopK",
        "Transpose",
        "Unsqueeze",
        "VarlenCausalConvWithState",
    ]
)

# Operators all of whose outputs have the element type of the first.
_ALL_ALIKE: Final = frozenset(["GatedMlp", "MatMulNBits", "Split"])


def initializers(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """Initializers by name."""
    return {tensor.name: tensor for tensor in model.graph.initializer}


def has_powers(model: onnx.ModelProto) -> bool:
    """Whether there are scales of MXFP4, which ONNX knows from `contract.IR_VERSION_POWERS` on."""
    return any(one.data_type == TensorProto.FLOAT8E8M0 for one in model.graph.initializer)


def producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The node that makes each value."""
    return {name: node for node in model.graph.node for name in node.output if name}


def consumers(model: onnx.ModelProto) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """The nodes that read each value, and at which input."""
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name:
                readers[name].append((node, index))
    return dict(readers)


def names(model: onnx.ModelProto) -> set[str]:
    """Every value and node name of the top graph."""
    graph = model.graph
    found = {tensor.name for tensor in graph.initializer}
    found.update(info.name for info in (*graph.input, *graph.output, *graph.value_info))
    for node in graph.node:
        found.update((node.name, *node.input, *node.output))
    return found


def attribute_int(node: onnx.NodeProto, name: str, default: int) -> int:
    """An integer attribute, or its default."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def attribute_float(node: onnx.NodeProto, name: str, default: float) -> float:
    """A floating attribute, or its default."""
    return next((float(a.f) for a in node.attribute if a.name == name), default)


def attribute_text(node: onnx.NodeProto, name: str, default: str = "") -> str:
    """A textual attribute, or its default."""
    return next((a.s.decode() for a in node.attribute if a.name == name), default)


def set_attribute(node: onnx.NodeProto, name: str, value: int | float | str) -> None:
    """Set an attribute, replacing an older one."""
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


def input_at(node: onnx.NodeProto, place: int) -> str:
    """The name of an optional input; empty where a node has none."""
    return str(node.input[place]) if place < len(node.input) else ""


def set_input(node: onnx.NodeProto, place: int, name: str) -> None:
    """Let a node have an optional input at a place that may be behind its last one."""
    node.input.extend([""] * (place + 1 - len(node.input)))
    node.input[place] = name


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """The ONNX element types of values, as far as they can be known.

    ONNX's own inference stops at operators of other domains; this follows the operators that
    decoders use. A value that is missing from the result has an unknown type.
    """
    graph = model.graph
    types = {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    for info in (*graph.input, *graph.value_info):
        types[info.name] = int(info.type.tensor_type.elem_type)
    for node in graph.node:
        kind = _output_type(node, types)
        if kind is not None and node.output:
            known = node.output if node.op_type in _ALL_ALIKE else node.output[:1]
            types.update(dict.fromkeys(known, kind))
        if node.op_type in ("PagedAttention", "GroupQueryAttention"):
            for output, cache in zip(node.output[1:3], node.input[3:5], strict=False):
                if cache in types:
                    types[output] = types[cache]
        if node.op_type == "SkipSimplifiedLayerNormalization" and kind is not None:
            types.update(dict.fromkeys(node.output[3:4], kind))
    types.pop("", None)
    return types


def _output_type(node: onnx.NodeProto, types: Mapping[str, int]) -> int | None:
    if node.op_type == "Cast":
        return attribute_int(node, "to", TensorProto.UNDEFINED)
    if node.op_type in ("Constant", "ConstantOfShape"):
        tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        return None if tensor is None else int(tensor.data_type)
    if node.op_type in _FIXED_TYPE:
        return _FIXED_TYPE[node.op_type]
    index = _TYPE_FROM.get(node.op_type, 0 if node.op_type in _TYPE_FROM_FIRST else None)
    if index is None or index >= len(node.input):
        return None
    return types.get(node.input[index])


def has_subgraphs(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether a node holds a graph (If, Loop, Scan)."""
    graphs = {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}
    return any(attribute.type in graphs for node in nodes for attribute in node.attribute)
