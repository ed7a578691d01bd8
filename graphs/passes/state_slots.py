"""Let operators of our own keep states where they are, in the slots of a pool.

`Gather` copies the states of a step out of the pool, the standard operator makes others of them,
and `ScatterND` copies these into the pool. `onnxport.CausalConv` and `onnxport.GatedDeltaNet` read
each state in one slot and write it to another: it comes from memory once, and goes there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, consumers, initializers, producers
from onnxport.graphs.linear_nodes import (
    DELTA_NET,
    CausalConvNode,
    DeltaNetNode,
    is_linear_node,
    read_linear_node,
)
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.result import PassResult, copy_model

CAUSAL_CONV: Final = "CausalConv"
_SLOT_NODES: Final = ("Cast", "Unsqueeze", "Reshape", "Identity")  # that make indices of slots


def use_state_slots(model: onnx.ModelProto) -> PassResult:
    """Replace every Gather, standard operator and ScatterND by one operator on the pool.

    Args:
        model: A paged graph in float32.

    Raises:
        ArtifactError: A layer's states do not come from a pool by STATE_READS and go there by
            STATE_WRITES, or something else reads them; its operator has what is not understood; or
            the weights of a convolution are no initializer. There is no other kernel.
    """
    copy = copy_model(model)
    found = {node.output[0]: node for node in model.graph.node if is_linear_node(node)}
    if not found:
        return PassResult("state_slots", copy, {})
    graph = StateGraph.of(model)
    fused: dict[str, onnx.NodeProto] = {}
    dropped: set[str] = set()
    for output, node in found.items():
        pool = graph.pool(node)
        fused[output] = _fused(read_linear_node(node), pool, graph)
        dropped |= pool.dropped
    del copy.graph.node[:]
    for node in model.graph.node:
        if node.output[0] not in dropped:
            copy.graph.node.append(fused.get(node.output[0], node))
    if DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET))
    return PassResult("state_slots", copy, {"operators on states in their slots": len(found)})


@dataclass(frozen=True, slots=True)
class _Pool:
    """Where an operator's states come from and go to."""

    past: str
    present: str
    dropped: frozenset[str]  # first outputs of nodes that are not needed any more


@dataclass(frozen=True, slots=True)
class StateGraph:
    """What is looked up of a graph whose layers have states."""

    makers: Mapping[str, onnx.NodeProto]
    readers: Mapping[str, list[tuple[onnx.NodeProto, int]]]
    weights: Mapping[str, onnx.TensorProto]
    outputs: frozenset[str]

    @classmethod
    def of(cls, model: onnx.ModelProto) -> StateGraph:
        """Look at a graph."""
        outputs = frozenset(info.name for info in model.graph.output)
        inputs = {info.name for info in model.graph.input}
        weights = {k: v for k, v in initializers(model).items() if k not in inputs}
        return cls(producers(model), consumers(model), weights, outputs)

    def pool(self, node: onnx.NodeProto) -> _Pool:
        """The pool of a standard operator. Raises ArtifactError where there is none."""
        read = read_linear_node(node)
        gather, scatter = self.makers.get(read.state), self._only_reader(read.final_state)
        if (
            gather is None
            or scatter is None
            or self._only_reader(read.state) is None
            or not self._is_read(gather)
            or not self._is_written(scatter, gather.input[0])
        ):
            raise ArtifactError(
                f"state_slots: the states of {node.op_type} {node.name!r} must be gathered from a "
                f"pool by {contract.STATE_READS} for it alone, and what it returns be scattered to "
                f"the same pool by {contract.STATE_WRITES} alone; this device has no other kernel"
            )
        dropped = {gather.output[0], scatter.output[0], *self._slots_of(scatter)}
        return _Pool(gather.input[0], scatter.output[0], frozenset(dropped))

    def _only_reader(self, value: str) -> onnx.NodeProto | None:
        readers = self.readers.get(value, [])
        return readers[0][0] if len(readers) == 1 and value not in self.outputs else None

    def _is_read(self, node: onnx.NodeProto) -> bool:
        return bool(
            node.op_type == "Gather"
            and attribute_int(node, "axis", 0) == 0
            and self._source(node.input[1]) == contract.STATE_READS
        )

    def _is_written(self, node: onnx.NodeProto, pool: str) -> bool:
        return bool(
            node.op_type == "ScatterND"
            and node.input[0] == pool
            and not node.attribute
            and self._source(node.input[1]) == contract.STATE_WRITES
        )

    def _source(self, name: str) -> str:
        """The value that indices are made of."""
        while name in self.makers and self.makers[name].op_type in _SLOT_NODES:
            name = self.makers[name].input[0]
        return name

    def _slots_of(self, scatter: onnx.NodeProto) -> set[str]:
        """Nodes that make the indices of a ScatterND and of nothing else."""
        found: set[str] = set()
        name = scatter.input[1]
        while name in self.makers and self._only_reader(name) is not None:
            found.add(name)
            name = self.makers[name].input[0]
        return found


def _fused(node: CausalConvNode | DeltaNetNode, pool: _Pool, graph: StateGraph) -> onnx.NodeProto:
    slots = [pool.past, node.lengths, contract.STATE_READS, contract.STATE_WRITES]
    outputs = [node.output, pool.present]
    if isinstance(node, CausalConvNode):
        weight = graph.weights.get(node.weight)
        if (
            weight is None
            or len(weight.dims) != 3
            or (node.bias and node.bias not in graph.weights)
        ):
            raise ArtifactError(
                f"state_slots: the weights of {node.name!r} must be initializers, [channels, 1, "
                "kernel] and, of the bias, [channels]"
            )
        return onnx.helper.make_node(
            CAUSAL_CONV,
            [node.input, node.weight, node.bias, *slots],
            outputs,
            name=node.name,
            domain=DOMAIN,
            channels=weight.dims[0],
            taps=weight.dims[2],
            activation="silu" if node.has_silu else "none",
        )
    inputs = [node.query, node.key, node.value, node.decay, node.beta, node.a_log, node.dt_bias]
    return onnx.helper.make_node(
        DELTA_NET,
        [*inputs, *slots],
        outputs,
        name=node.name,
        domain=DOMAIN,
        scale=node.scale or 0.0,
        qk_l2_norm=int(node.is_normalized),
        beta_activation="sigmoid" if node.has_sigmoid else "none",
    )
