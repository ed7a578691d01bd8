"""What graphs compute in float32 whatever their activations are, found where no Cast tells it.

A graph of 16-bit activations has a Cast where such a part begins and one where it ends. One of
float32 has none, for there all is float32, and whoever changes its type has to know these parts:

- the choice among experts and their weights (`graphs.experts`, `graphs.passes.split_experts`):
  scores in 16 bits are often the same, or round past one another, and others would be chosen;
- the cap of the logits (`graphs.ops.softcap`), which would round them once more;
- mean and deviation of a gate (`graphs.ops.above_deviations`), whose squares 16 bits may not hold;
- the sizes of residual streams (`exporter.altup`), for the same reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import onnx

from onnxport.graphs import contract
from onnxport.graphs.inspect import consumers, initializers, input_at, producers

# Operators of each kind of part, behind what it reads.
_SCORES: Final = ("Sigmoid", "Softmax")
_CHOICE: Final = frozenset(
    [
        *("Add", "GatherElements", "Log", "Max", "Min", "Pad", "ScatterElements", "Slice", "TopK"),
        *("ReduceSum", "Reshape", "Sub", "Unsqueeze"),  # of experts in groups
        *_SCORES,
    ]
)
_CUTOFF: Final = frozenset(["Mul", "ReduceMean", "Relu", "Sqrt", "Sub"])
_PARTS: Final = frozenset(
    [
        *("And", "Cast", "Div", "Equal", "Greater", "Less", "Or", "ReduceSum", "Reshape"),
        *("Softmax", "Where"),
    ]
)


@dataclass(frozen=True, slots=True)
class FloatIsland:
    """A part of a graph that stays float32.

    Attributes:
        start: the value that it reads, and its weights beside that.
        made: all values that its nodes make.
    """

    start: str
    made: frozenset[str]


def float_islands(model: onnx.ModelProto) -> list[FloatIsland]:
    """Find them in a graph whose activations are float32, as the exporter or `split_experts` wrote.

    What only looks like one of them, with another operator in it, is none.
    """
    graph = _Graph(model)
    find = {
        "ScatterElements": graph.choice,
        "Div": graph.parts,
        "Cast": graph.cap,
        "Relu": graph.cutoff,
        "ReduceL2": graph.size,
    }
    found = [find[node.op_type](node) for node in model.graph.node if node.op_type in find]
    return [island for island in found if island is not None]


class _Graph:
    """Looks for each kind of part, from the node that ends it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._made = producers(model)
        self._readers = consumers(model)
        self._stored = initializers(model).keys()

    def choice(self, end: onnx.NodeProto) -> FloatIsland | None:
        """Logits of the experts that are chosen, and the sum of their scores."""
        scores = self._before(end, 0, "Min")
        scores = scores and self._before(scores, 0, *_SCORES)
        if scores is None:
            return None
        start = scores.input[0]
        nodes = self._path(start, end, _CHOICE)
        if nodes is None:
            return None
        found = self._readers_of(scores, "GatherElements")
        totals = [total for one in found for total in self._readers_of(one, "ReduceSum")]
        return _island(start, (*nodes, *found, *totals))

    def parts(self, end: onnx.NodeProto) -> FloatIsland | None:
        """What each expert of a layer that was split counts for."""
        node = self._before(end, 0, "Where")
        node = node and self._before(node, 1, "Reshape")
        node = node and self._before(node, 0, "Softmax")
        nodes = node and self._path(node.input[0], end, _PARTS)
        return _island(node.input[0], nodes) if node and nodes else None

    def cap(self, end: onnx.NodeProto) -> FloatIsland | None:
        """What bounds the logits, the Cast that makes them included."""
        if end.output[0] != contract.LOGITS:
            return None
        nodes = [end]
        for op_type in ("Mul", "Tanh", "Mul"):
            node = self._before(nodes[-1], 0, op_type)
            if node is None:
                return None
            nodes.append(node)
        return _island(nodes[-1].input[0], nodes)

    def cutoff(self, end: onnx.NodeProto) -> FloatIsland | None:
        """What leaves of a gate what is above some deviations."""
        node: onnx.NodeProto | None = end
        for op_type in ("Sub", "Sub"):
            node = node and self._before(node, 0, op_type)
        nodes = node and self._path(node.input[0], end, _CUTOFF)
        return _island(node.input[0], nodes) if node and nodes else None

    def size(self, length: onnx.NodeProto) -> FloatIsland | None:
        """The root of a row's mean square, of its length."""
        readers = self._readers.get(length.output[0], [])
        nodes = [one for one, place in readers if place == 0 and one.op_type == "Mul"]
        is_alone = len(nodes) == len(readers) == 1 and input_at(nodes[0], 1) in self._stored
        return _island(length.input[0], (length, *nodes)) if is_alone else None

    def _before(self, node: onnx.NodeProto, place: int, *op_types: str) -> onnx.NodeProto | None:
        """What makes an input, if it is one of some operators."""
        found = self._made.get(input_at(node, place))
        return found if found is not None and found.op_type in op_types else None

    def _readers_of(self, node: onnx.NodeProto, op_type: str) -> list[onnx.NodeProto]:
        """What reads the first output of a node first, of one operator."""
        readers = self._readers.get(node.output[0], [])
        return [one for one, place in readers if place == 0 and one.op_type == op_type]

    def _path(
        self, start: str, end: onnx.NodeProto, op_types: Collection[str]
    ) -> list[onnx.NodeProto] | None:
        """All that makes `end` of `start` alone; None where another operator has a part in it."""
        nodes: dict[str, onnx.NodeProto] = {}
        pending = [end]
        while pending:
            node = pending.pop()
            if node.op_type not in op_types:
                return None
            nodes[node.output[0]] = node
            for name in node.input:
                if not name or name == start or name in self._stored:
                    continue
                if name not in self._made:
                    return None
                if self._made[name].output[0] not in nodes:
                    pending.append(self._made[name])
        return list(nodes.values())


def _island(start: str, nodes: Iterable[onnx.NodeProto]) -> FloatIsland:
    return FloatIsland(start, frozenset(name for node in nodes for name in node.output if name))
