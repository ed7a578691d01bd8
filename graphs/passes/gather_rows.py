"""Give the rows that a graph gathers from a table to an operator of our own.

`GatherBlockQuantized` of a table in 8 bits, and `Gather` with a `Cast` behind it of one in floats,
are `onnxport.GatherRows`, with the same bits. It reads rows of a large table from the artifact's
file, so that the table does not become the process's memory by and by: embeddings are a fifth of a
small model. For devices whose operator library has it, after `retype` towards float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs.contract import MICROSOFT
from onnxport.graphs.inspect import attribute_int, consumers, element_types, initializers
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.result import PassResult, copy_model

GATHER_ROWS: Final = "GatherRows"  # table [rows, width], indices int64 -> [..., width]
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_QUANTIZED: Final = {"bits": 8, "gather_axis": 0, "quantize_axis": 1}


def use_gather_rows(model: onnx.ModelProto) -> PassResult:
    """Replace what gathers rows of initializers, in a graph whose activations are float32."""
    copy = copy_model(model)
    replaceable = {info.name for info in copy.graph.input}
    constants = {name: t for name, t in initializers(copy).items() if name not in replaceable}
    tables = {name: tensor for name, tensor in constants.items() if len(tensor.dims) == 2}
    types, readers = element_types(copy), consumers(copy)
    outputs = {info.name for info in copy.graph.output}
    count = 0
    for node in list(copy.graph.node):
        if len(node.input) < 2 or node.input[1] in constants:
            continue
        if types.get(node.input[1]) != TensorProto.INT64:
            continue
        if _is_quantized(node, tables, types):
            block_size = attribute_int(node, "block_size", 128)
            made = _node(node, list(node.input), node.output[0], block_size=block_size)
        elif _is_floats(node, tables):
            end = node
            if types[node.input[0]] != TensorProto.FLOAT:
                after = readers.get(node.output[0], [])
                if len(after) != 1 or node.output[0] in outputs or not _is_cast(after[0][0]):
                    continue
                end = after[0][0]
            made = _node(node, list(node.input), end.output[0])
            if end is not node:
                copy.graph.node.remove(end)
        else:
            continue
        node.CopyFrom(made)
        count += 1
    if count and DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    return PassResult("gather_rows", copy, {"rows of tables": count} if count else {})


def _node(node: onnx.NodeProto, inputs: list[str], output: str, **sizes: int) -> onnx.NodeProto:
    return onnx.helper.make_node(
        GATHER_ROWS, inputs, [output], name=node.name, domain=DOMAIN, **sizes
    )


def _is_quantized(
    node: onnx.NodeProto, tables: Mapping[str, TensorProto], types: Mapping[str, int]
) -> bool:
    if (node.op_type, node.domain) != ("GatherBlockQuantized", MICROSOFT) or len(node.input) != 3:
        return False
    table, _, scales = node.input
    return (
        table in tables
        and tables[table].data_type == TensorProto.UINT8
        and scales in tables
        and types[scales] == TensorProto.FLOAT
        and tables[table].dims[1] % attribute_int(node, "block_size", 128) == 0
        and all(attribute_int(node, name, -1) == value for name, value in _QUANTIZED.items())
    )


def _is_floats(node: onnx.NodeProto, tables: Mapping[str, TensorProto]) -> bool:
    table = tables.get(node.input[0])
    return (
        (node.op_type, node.domain) == ("Gather", "")
        and table is not None
        and table.data_type in _FLOATS
        and attribute_int(node, "axis", 0) == 0
    )


def _is_cast(node: onnx.NodeProto) -> bool:
    if node.op_type != "Cast":
        return False
    return attribute_int(node, "to", TensorProto.UNDEFINED) == int(TensorProto.FLOAT)
