"""Let a graph take the states of its rows, and give those behind their last tokens.

For runtimes that would copy a whole pool to write some of its slots: what is gathered from a pool
and what is scattered to it become the graph's input and output, under the pool's names. Whoever
runs the graph has the pools.
"""

from __future__ import annotations

from typing import Any, Final

import onnx

from onnxport.graphs import contract
from onnxport.graphs.linear_nodes import is_linear_node, read_linear_node
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.state_slots import StateGraph

BATCH: Final = "batch"  # rows of a step


def take_row_states(model: onnx.ModelProto) -> PassResult:
    """Replace inputs and outputs of pools, [num_states, …], by those of rows, [batch, …].

    The inputs `contract.STATE_READS` and `contract.STATE_WRITES` are no more.

    Args:
        model: A paged graph.

    Raises:
        ArtifactError: A layer's states do not come from a pool by STATE_READS and go there by
            STATE_WRITES, or something else reads them; or its operator has what is not understood.
    """
    copy = copy_model(model)
    found = [node for node in model.graph.node if is_linear_node(node)]
    if not found:
        return PassResult("row_states", copy, {})
    graph = StateGraph.of(model)
    renamed: dict[str, str] = {}
    dropped: set[str] = set()
    for node in found:
        pool, read = graph.pool(node), read_linear_node(node)
        renamed |= {read.state: pool.past, read.final_state: pool.present}
        dropped |= pool.dropped
    nodes = [node for node in copy.graph.node if node.output[0] not in dropped]
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for info in (*copy.graph.input, *copy.graph.output):
        if info.name in renamed.values():
            info.type.tensor_type.shape.dim[0].dim_param = BATCH
    slots = (contract.STATE_READS, contract.STATE_WRITES)
    inputs = [info for info in copy.graph.input if info.name not in slots]
    _replace(copy.graph.node, nodes)
    _replace(copy.graph.input, inputs)
    return PassResult("row_states", copy, {"states of rows": len(found)})


def _replace(field: Any, values: list[Any]) -> None:
    copies = []
    for value in values:
        copies.append(type(value)())
        copies[-1].CopyFrom(value)
    del field[:]
    field.extend(copies)
