"""Let operators of our own keep states where they are, in the slots of a pool.

`Gather` copies the states of a step out of the pool, the standard operator makes others of them,
and `ScatterND` copies these into the pool. `onnxport.CausalConv` and `onnxport.GatedDeltaNet` read
each state in one slot and write it to another: it comes from memory once, and goes there once.

Where values are multiplied with the softplus that their decay is made of, as in state spaces, the
operator does that, too: ONNX Runtime's own Softplus gives a number other bits at another place of a
tensor, and so in another batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx
import onnx.numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, consumers, initializers, producers
from onnxport.graphs.linear_nodes import (
    CHANNEL_DECAY,
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
        pool, read = graph.pool(node), read_linear_node(node)
        steps = graph.steps(read)
        fused[output] = _fused(read, pool, steps, graph)
        dropped |= pool.dropped | (steps.dropped if steps else set())
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
class _Steps:
    """What a state space's values are ahead of their product with steps."""

    values: str
    dropped: frozenset[str]  # likewise


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

    def steps(self, node: CausalConvNode | DeltaNetNode) -> _Steps | None:
        """The steps that values are multiplied with, if they are those of the node's gate."""
        if isinstance(node, CausalConvNode) or node.has_delta_rule or not node.has_qwen_gate:
            return None
        product = self._made(node.value, "Mul")
        for place in (1, 0) if product is not None else ():
            assert product is not None
            column = self._made(product.input[place], "Unsqueeze")
            steps = column and self._made(column.input[0], "Softplus")
            total = steps and self._made(steps.input[0], "Add")
            if (
                column is None
                or steps is None
                or total is None
                or set(total.input) != {node.decay, node.dt_bias}
                or not self._is_last_axis(column)
            ):
                continue
            chain = (product, column, steps, total)
            if all(self._only_reader(one.output[0]) is not None for one in chain):
                dropped = frozenset(one.output[0] for one in chain)
                return _Steps(product.input[1 - place], dropped)
        return None

    def _made(self, value: str, op_type: str) -> onnx.NodeProto | None:
        """What makes a value, if it is such an operator."""
        maker = self.makers.get(value)
        return maker if maker is not None and maker.op_type == op_type else None

    def _is_last_axis(self, node: onnx.NodeProto) -> bool:
        axes = self.weights.get(node.input[1])
        return axes is not None and onnx.numpy_helper.to_array(axes).tolist() in ([-1], [2])

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


def _fused(
    node: CausalConvNode | DeltaNetNode, pool: _Pool, steps: _Steps | None, graph: StateGraph
) -> onnx.NodeProto:
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
    value = node.value if steps is None else steps.values
    inputs = [node.query, node.key, value, node.decay, node.beta, node.a_log, node.dt_bias]
    return onnx.helper.make_node(
        DELTA_NET,
        [*inputs, *slots],
        outputs,
        name=node.name,
        domain=DOMAIN,
        update_rule="gated_delta" if node.has_delta_rule else "gated",
        steps=int(steps is not None),
        scale=node.scale or 0.0,
        qk_l2_norm=int(node.is_normalized),
        **({CHANNEL_DECAY: 1} if node.has_channels else {}),
        beta_activation="sigmoid" if node.has_sigmoid else "none",
    )
