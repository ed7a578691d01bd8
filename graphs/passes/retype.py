"""Compute a 16-bit graph in float32.

The artifact stores 16-bit activations, which a CPU is slow at. This changes every 16-bit value
to float32, and removes the Cast nodes that lose their purpose. What is stored stays stored once:

- tables that are only gathered from (embeddings) keep their 16-bit data; the rows are cast;
- other 16-bit initializers (norms, biases, scales, and the weights of MatMul and Gemm in an fp16
  artifact) are read and converted. Those up to `INLINE_BYTES` become part of the model; larger
  ones are returned beside it, because a protobuf ends at 2 GB. Converted weights cost twice their
  stored size in memory, for as long as the session lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs.inspect import (
    attribute_int,
    consumers,
    element_types,
    has_subgraphs,
    names,
    set_attribute,
)
from onnxport.graphs.passes.result import PassResult, copy_model

ReadTensor = Callable[[TensorProto], NDArray[Any]]

INLINE_BYTES: Final = 64 << 10  # float32 initializers up to this size go into the protobuf
HALF_TYPES: Final = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

# Attributes that hold an element type or a tensor, in the operators that `retype` rewrites.
_TYPED_OPS: Final = frozenset({"Cast", "Constant", "ConstantOfShape"})
_TYPE_ATTRIBUTES: Final = frozenset({"dtype", "to", "output_dtype"})


def retype(model: onnx.ModelProto, read_tensor: ReadTensor) -> PassResult:
    """Change every float16 and bfloat16 value of a graph to float32.

    Graph inputs and outputs change type too: KV caches and logits become float32.

    Args:
        model: A graph without control flow.
        read_tensor: Returns an initializer's contents, such as `Artifact.read_tensor`.

    Raises:
        ArtifactError: The graph has subgraphs, or an operator whose type attribute is not
            understood.
    """
    if has_subgraphs(model.graph.node) or model.functions:
        raise ArtifactError("retype: the graph has control flow or functions; none is expected")
    copy = copy_model(model)
    changes: Counter[str] = Counter()
    attached: dict[str, NDArray[np.float32]] = {}
    for info in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        if info.type.tensor_type.elem_type in HALF_TYPES:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
            changes["inputs and outputs"] += 1
    _retype_initializers(copy, read_tensor, attached, changes)
    for node in copy.graph.node:
        _retype_attributes(node, changes)
    _remove_casts(copy, changes)
    return PassResult("retype", copy, dict(changes), attached)


def _retype_initializers(
    model: onnx.ModelProto,
    read_tensor: ReadTensor,
    attached: dict[str, NDArray[np.float32]],
    changes: Counter[str],
) -> None:
    """Convert initializers in place; a gathered table is kept, its rows are cast."""
    readers = consumers(model)
    taken = names(model)
    outputs = {info.name for info in model.graph.output}
    kept: list[TensorProto] = []
    casts: dict[str, onnx.NodeProto] = {}  # name of a Gather's 16-bit output -> Cast after it
    for tensor in model.graph.initializer:
        if tensor.data_type not in HALF_TYPES:
            kept.append(tensor)
            continue
        reads = readers.get(tensor.name, [])
        gathers = [node for node, index in reads if node.op_type == "Gather" and index == 0]
        others = [(node, index) for node, index in reads if node not in gathers]
        if gathers:
            kept.append(tensor)
            for node in gathers:
                half = _fresh(f"{node.output[0]}.stored", taken)
                casts[half] = onnx.helper.make_node(
                    "Cast",
                    [half],
                    [node.output[0]],
                    name=_fresh(f"{node.name}.cast", taken),
                    to=TensorProto.FLOAT,
                )
                node.output[0] = half
            changes["gathered tables kept"] += 1
        if others or not gathers or tensor.name in outputs:
            name = _fresh(f"{tensor.name}.float32", taken) if gathers else tensor.name
            value = np.ascontiguousarray(read_tensor(tensor), np.float32)
            kept.append(_float_initializer(name, value, attached))
            for node, index in others:
                node.input[index] = name
            changes["initializers converted"] += 1
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes.append(node)
        nodes.extend(casts[name] for name in node.output if name in casts)
    _replace(model.graph.initializer, kept)
    _replace(model.graph.node, nodes)


def _float_initializer(
    name: str, value: NDArray[np.float32], attached: dict[str, NDArray[np.float32]]
) -> TensorProto:
    if value.nbytes <= INLINE_BYTES:
        return numpy_helper.from_array(value, name)
    attached[name] = value
    return external_placeholder(name, TensorProto.FLOAT, value.shape)


def external_placeholder(name: str, data_type: int, dims: tuple[int, ...]) -> TensorProto:
    """An initializer whose contents are attached when a session is made; it names no file."""
    tensor = TensorProto(name=name, data_type=data_type, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="attached-in-memory")
    return tensor


def _retype_attributes(node: onnx.NodeProto, changes: Counter[str]) -> None:
    """Change the element types that a node's attributes name."""
    for attribute in list(node.attribute):
        names_half = attribute.name in _TYPE_ATTRIBUTES and attribute.i in HALF_TYPES
        if not names_half and attribute.t.data_type not in HALF_TYPES:
            continue
        if node.op_type not in _TYPED_OPS:
            raise ArtifactError(
                f"retype: {node.op_type} {node.name!r} has a 16-bit type in its attribute "
                f"{attribute.name!r}, which is understood in {sorted(_TYPED_OPS)} only"
            )
        if names_half:
            set_attribute(node, attribute.name, TensorProto.FLOAT)
        else:
            value = numpy_helper.to_array(attribute.t).astype(np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(value, attribute.t.name))
        changes["attributes"] += 1


def _remove_casts(model: onnx.ModelProto, changes: Counter[str]) -> None:
    """Remove each Cast from float32 to float32; a graph output keeps its name."""
    types = element_types(model)
    outputs = {info.name for info in model.graph.output}
    inputs = {info.name for info in model.graph.input}
    fixed = inputs | {tensor.name for tensor in model.graph.initializer} | outputs
    renamed: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    made: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        source = node.input[0] if node.input else ""
        useless = (
            node.op_type == "Cast"
            and attribute_int(node, "to", TensorProto.UNDEFINED) == TensorProto.FLOAT
            and types.get(source) == TensorProto.FLOAT
        )
        if useless and node.output[0] not in outputs:
            renamed[node.output[0]] = source
        elif useless and source not in fixed:
            producer = made[source]
            position = list(producer.output).index(source)
            producer.output[position] = node.output[0]
            renamed = {k: node.output[0] if v == source else v for k, v in renamed.items()}
            renamed[source] = node.output[0]
            for other in nodes:
                for index, name in enumerate(other.input):
                    other.input[index] = renamed.get(name, name)
        else:
            nodes.append(node)
            made.update(dict.fromkeys(node.output, node))
            continue
        changes["casts removed"] += 1
    _replace(model.graph.node, nodes)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _replace(field: Any, values: list[Any]) -> None:
    copies = []
    for value in values:
        copy = type(value)()
        copy.CopyFrom(value)
        copies.append(copy)
    del field[:]
    field.extend(copies)
