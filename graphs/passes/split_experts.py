"""Write experts in standard operators, for devices that have none for them.

`com.microsoft.MoE` and `QMoE` give each token to a few experts. Here every expert computes for
every token, and what a token did not ask for is left out: as many times the work as there are
experts for each one that is chosen, but on any device, and with one product for the first halves of
all of them:

    joined = x gate_up^T + bias, for all experts at once
    gated  = Where(chosen, swiglu(gate, up) * part, 0), or of up alone without a gate
    y      = sum over experts of gated[expert] down[expert]^T, and of part[expert] bias[expert]

Blocks of weights that have offsets add these times the sums of what they are multiplied with, see
`ops.add_offsets`; those of down once for all experts.

An expert is chosen where fewer than k others have a larger logit, or the same one and a lower
index. It is left out by a choice, not by a part of 0: 0 times infinity is no number. Biases, which
layers may lack, are finite.

Weights of an expert are ranges of the artifact's bytes, or of what `write_int8_experts` made;
nothing is copied or stored twice. So it comes before passes that convert weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.experts import (
    FP4,
    GELU,
    GLOBAL_SCALES,
    OFFSETS,
    RELU2,
    Swiglu,
    bits_of,
    offsets_of,
)
from onnxport.graphs.inspect import (
    attribute_int,
    attribute_text,
    element_types,
    initializers,
    names,
)
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.passes.retype import FLOAT_DTYPES, external_placeholder
from onnxport.graphs.passes.split_matmul import drop_unread, row_range

MOE, QMOE = "MoE", "QMoE"
EXPERTS_INPUTS = {MOE: [0, 1, 2, 4], QMOE: [0, 1, 2, 3, 5, 6]}  # that the exporter's have
BIASES = {MOE: (3, 5), QMOE: (4, 7)}  # inputs: gate_up's and down's, which a node has or not
_WEIGHTS = {MOE: (2, 4), QMOE: (2, 5)}  # inputs: gate_up and down; scales are behind them


def split_experts(
    model: onnx.ModelProto,
    which: Callable[[onnx.NodeProto], bool] = lambda node: True,
    made: PassResult | None = None,
) -> PassResult:
    """Replace `MoE` and `QMoE` by what they compute, expert by expert.

    Args:
        model: A graph as an artifact has it: weights are external data.
        which: Of these nodes.
        made: What made the graph, if it attached weights of experts.

    Raises:
        ArtifactError: Experts of another kind than the exporter writes.
    """
    copy = copy_model(model)
    found = {
        node.output[0]: node for node in copy.graph.node if node.op_type in _WEIGHTS and which(node)
    }
    if not found:
        return PassResult("split_experts", copy, {})
    tensors, types = initializers(copy), element_types(copy)
    weights = _Weights(copy.graph, made)
    g = GraphBuilder("experts")
    g.reserve(names(copy) - found.keys())
    nodes: list[onnx.NodeProto] = []
    for node in copy.graph.node:
        if node.output[0] not in found:
            nodes.append(node)
            continue
        layer = _layer(node, tensors, types, weights)
        with g.scope(node.name):
            layer.write(g)
        nodes.extend(g.take_nodes())
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.graph.initializer.extend(g.take_initializers())
    drop_unread(copy)
    changes = {"layers of experts split": len(found)}
    return PassResult("split_experts", copy, changes, weights.attached, weights.sources)


class _Weights:
    """Declares rows of tensors in a graph; those of attached ones are attached, too."""

    def __init__(self, graph: onnx.GraphProto, made: PassResult | None) -> None:
        self.attached: dict[str, NDArray[Any]] = {}
        self.sources: dict[str, TensorProto] = {}
        self._graph = graph
        self._made = made

    def declare(
        self, name: str, whole: TensorProto, rows: tuple[int, int], count: int, dims: list[int]
    ) -> str:
        """Rows [first, end) of the `count` that a tensor has, under a name of their own."""
        if self._made is None or whole.name not in self._made.attached:
            self._graph.initializer.append(row_range(whole, name, rows, count, dims))
            return name
        values = self._made.attached[whole.name].reshape(count, -1)[slice(*rows)]
        self.attached[name] = values.reshape(dims)
        source = self._made.sources[whole.name]
        each = math.prod(whole.dims) // math.prod(source.dims)  # of one number in the artifact
        stored = [*dims[:-1], dims[-1] // each]
        self.sources[name] = row_range(source, name, rows, count, stored)
        self._graph.initializer.append(external_placeholder(name, whole.data_type, tuple(dims)))
        return name


@dataclass(frozen=True, slots=True)
class _Layer:
    """One node and its weights."""

    node: onnx.NodeProto
    tensors: dict[str, TensorProto]
    dtype: int  # of activations
    weights: _Weights

    @property
    def count(self) -> int:
        """Experts."""
        return int(self._weight(0).dims[0])

    @property
    def size(self) -> int:
        """Features between an expert's two products."""
        return int(self._weight(0).dims[1]) // Swiglu.of(self.node).parts

    def write(self, g: GraphBuilder) -> None:
        """Make the nodes, and declare weights."""
        x, logits = self.node.input[:2]
        count, size = self.count, self.size
        biases = [self.tensors[name] for name in biases_of(self.node)]
        chosen, parts = self._route(g, logits)
        joined = self._joined(g, x, biases)
        gated = self._activated(g, joined)
        weighed = g.node("Mul", [gated, parts], name="parts")
        own = g.node("Where", [chosen, weighed, self._number(g, 0)])
        rows = ops.reshape(g, own, (0, count * size), "own")
        each = g.node("Split", [rows], outputs=count, name="each", axis=-1, num_outputs=count)
        added = [
            self._product(g, one, 1, expert, f"{expert}.down") for expert, one in enumerate(each)
        ]
        if self._offsets(1) is not None:
            added.append(self._down_offsets(g, rows))
        if biases:
            bias = self._whole(g, biases[1], "down.bias", list(biases[1].dims))
            added.append(g.node("MatMul", [ops.reshape(g, parts, (0, count)), bias], name="biases"))
        total = added[0]
        for one in added[1:-1]:
            total = g.node("Add", [total, one], name="sum")
        last = [total, added[-1]] if len(added) > 1 else [total]
        kind = "Add" if len(added) > 1 else "Identity"
        g.node(kind, last, outputs=[self.node.output[0]], name="sum")

    def _joined(self, g: GraphBuilder, x: str, biases: list[TensorProto]) -> str:
        """The first products of all experts, side by side."""
        joined = self._product(g, x, 0, None, "gate_up")
        if (offsets := self._offsets(0)) is not None:
            n, blocks = self.count * int(offsets.dims[1]), int(offsets.dims[2])
            added = self._whole(g, offsets, "gate_up.offsets", [n, blocks])
            sizes = {"k": blocks * self._block_size, "n": n, "block_size": self._block_size}
            joined = ops.add_offsets(g, x, joined, added, **sizes, is_flat=True, name="gate_up")
        if not biases:
            return joined
        bias = self._whole(g, biases[0], "gate_up.bias", [math.prod(biases[0].dims)])
        return g.node("Add", [joined, bias], name="gate_up.biased")

    def _route(self, g: GraphBuilder, logits: str) -> tuple[str, str]:
        """Whether a token is given to an expert, bool, and its part; [num_tokens, experts, 1]."""
        count, per_token = self.count, attribute_int(self.node, "k", 1)
        wide = logits
        if self.dtype != TensorProto.FLOAT:
            wide = ops.cast(g, logits, TensorProto.FLOAT, "wide")
        rows, columns = (ops.reshape(g, wide, dims) for dims in ((0, 1, count), (0, count, 1)))
        lower = g.constant(np.tri(count, k=-1, dtype=bool), "lower")
        larger = g.node("Greater", [rows, columns], name="larger")
        same = g.node("Equal", [rows, columns], name="same")
        ahead = g.node("Or", [larger, g.node("And", [same, lower], name="earlier")], name="ahead")
        numbers = ops.cast(g, ahead, TensorProto.FLOAT, "ahead.numbers")
        rank = g.node("ReduceSum", [numbers, ops.last_axis(g)], name="rank")
        limit = g.constant(np.array(per_token, np.float32), "per_token")
        chosen = g.node("Less", [rank, limit], name="chosen")
        softmax = g.node("Softmax", [wide], name="probabilities", axis=-1)
        column = ops.reshape(g, softmax, (0, count, 1), "column")
        none = g.constant(np.zeros((), np.float32), "none")
        parts = g.node("Where", [chosen, column, none], name="chosen.parts")
        middle = g.constant(np.array([1], np.int64), "axis")
        whole = g.node("ReduceSum", [parts, middle], name="whole")
        parts = g.node("Div", [parts, whole], name="normalized")
        if self.dtype != TensorProto.FLOAT:
            parts = ops.cast(g, parts, self.dtype, "narrow")
        return chosen, parts

    def _activated(self, g: GraphBuilder, joined: str) -> str:
        """What there is between the products, [num_tokens, experts, size], see `Swiglu`."""
        swiglu, count, size = Swiglu.of(self.node), self.count, self.size
        if swiglu.is_relu2:
            return ops.relu_squared(g, ops.reshape(g, joined, (0, count, size), "up"))
        pairs = ops.reshape(g, joined, (0, count * size, 2), "pairs")
        halves = g.node("Split", [pairs], outputs=2, name="halves", axis=-1, num_outputs=2)
        gate, up = (ops.reshape(g, half, (0, count, size), "half") for half in halves)
        return self._gated(g, swiglu, gate, up)

    def _gated(self, g: GraphBuilder, swiglu: Swiglu, gate: str, up: str) -> str:
        if swiglu.is_gelu:
            return g.node("Mul", [ops.gelu_tanh(g, gate), up], name="gated")
        if swiglu.limit is not None:
            low, high = (self._number(g, one) for one in (-swiglu.limit, swiglu.limit))
            gate = g.node("Min", [gate, high], name="gate.limited")
            up = g.node("Clip", [up, low, high], name="up.limited")
        if swiglu.up_offset != 0:
            up = g.node("Add", [up, self._number(g, swiglu.up_offset)], name="up.offset")
        if swiglu.alpha == 1:
            return g.node("Mul", [ops.silu(g, gate), up], name="gated")
        steep = g.node("Mul", [gate, self._number(g, swiglu.alpha)], name="steep")
        activated = g.node("Mul", [gate, g.node("Sigmoid", [steep])], name="activated")
        return g.node("Mul", [activated, up], name="gated")

    def _product(self, g: GraphBuilder, x: str, which: int, expert: int | None, name: str) -> str:
        """`x @ weight.T` of an expert, or of all, one below the other."""
        stored = self._weight(which)
        count, rows = self.count, int(stored.dims[1])
        first, end = (0, count) if expert is None else (expert, expert + 1)

        def declare(tensor: TensorProto, dims: list[int]) -> str:
            unique = g.declare(f"{name}.{'scales' if tensor is not stored else 'weight'}")
            return self.weights.declare(unique, tensor, (first, end), count, dims)

        n = (end - first) * rows
        if self.node.op_type == MOE:
            weight = declare(stored, [n, int(stored.dims[2])])
            return g.node("Gemm", [x, weight], name=name, transB=1)
        bits, block = bits_of(self.node)[which], self._block_size
        scales = self.tensors[self.node.input[_WEIGHTS[QMOE][which] + 1]]
        k = int(stored.dims[2]) * 8 // bits
        return ops.matmul_nbits(
            g,
            x,
            declare(stored, [n, k // block, block * bits // 8]),
            declare(scales, [n, k // block]),
            k=k,
            n=n,
            bits=bits,
            block_size=block,
            accuracy_level=attribute_int(self.node, "accuracy_level", 0),
            name=name,
        )

    def _down_offsets(self, g: GraphBuilder, gated: str) -> str:
        """What down's offsets make of all experts' features, [num_tokens, hidden]."""
        offsets = self._offsets(1)
        assert offsets is not None
        count, hidden, blocks = offsets.dims
        cut = ops.reshape(g, gated, (-1, count * blocks, self._block_size), "down.blocks")
        sums = g.node("ReduceSum", [cut, ops.last_axis(g)], name="down.sums", keepdims=0)
        each = self._whole(g, offsets, "down.offsets", [count, hidden, blocks])
        turned = g.node("Transpose", [each], name="down.turned", perm=[0, 2, 1])
        rows = ops.reshape(g, turned, (count * blocks, hidden), "down.offset_rows")
        return g.node("MatMul", [sums, rows], name="down.offsets")

    @property
    def _block_size(self) -> int:
        return attribute_int(self.node, "block_size", 0)

    def _offsets(self, which: int) -> TensorProto | None:
        """Those of a product's blocks, [experts, rows, blocks]; None: it has none."""
        if self.node.op_type != QMOE or not (name := offsets_of(self.node)[which]):
            return None
        return self.tensors[name]

    def _whole(self, g: GraphBuilder, tensor: TensorProto, name: str, dims: list[int]) -> str:
        """A tensor in another shape."""
        return self.weights.declare(g.declare(name), tensor, (0, 1), 1, dims)

    def _weight(self, which: int) -> TensorProto:
        return self.tensors[self.node.input[_WEIGHTS[self.node.op_type][which]]]

    def _number(self, g: GraphBuilder, value: float) -> str:
        """A constant of the activations' type, exact where they become float32 later."""
        wide = g.constant(np.array(value, np.float32), "number")
        return wide if self.dtype == TensorProto.FLOAT else ops.cast(g, wide, self.dtype, "narrow")


def _layer(
    node: onnx.NodeProto,
    tensors: dict[str, TensorProto],
    types: dict[str, int],
    weights: _Weights,
) -> _Layer:
    """A node that can be split. Raises ArtifactError for another."""
    places = EXPERTS_INPUTS[node.op_type][2:]
    offsets = [name for name in offsets_of(node) if name] if node.op_type == QMOE else []
    names = [*(node.input[i] for i in places), *biases_of(node), *offsets]
    stored = [tensors.get(name) for name in names]
    is_ours = (
        is_swiglu(node)
        and attribute_text(node, "quant_type", "int") == "int"
        and all(one is not None and one.data_location == TensorProto.EXTERNAL for one in stored)
        and all(tensors[name].data_type in FLOAT_DTYPES.values() for name in offsets)
    )
    if not is_ours:
        raise ArtifactError(
            f"split_experts: {node.op_type} {node.name!r} is not as the exporter writes it; export "
            "the model again with this version"
        )
    return _Layer(node, tensors, types[node.input[0]], weights)


def is_swiglu(node: onnx.NodeProto) -> bool:
    """Whether experts are as the exporter has them: gate and up take turns, no lone bias.

    What there is between the products may be a GELU, see `Swiglu`; or there is no gate, and it is
    the square of a ReLU.
    """
    given = {index for index, name in enumerate(node.input) if name}
    needed, biases = set(EXPERTS_INPUTS[node.op_type]), set(BIASES[node.op_type])
    if node.op_type == QMOE and attribute_text(node, "quant_type", "int") == "int":
        given -= set(OFFSETS)  # as the caller knows by their types
    if attribute_text(node, "quant_type") == FP4:
        needed |= set(GLOBAL_SCALES)
    kind = attribute_text(node, "activation_type"), attribute_int(node, "swiglu_fusion", 0)
    return (
        given in (needed, needed | biases)
        and kind in (("swiglu", 1), (GELU, 1), (RELU2, 0))
        and attribute_int(node, "normalize_routing_weights", 0) == 1
    )


def biases_of(node: onnx.NodeProto) -> list[str]:
    """The biases of gate_up and of down, if experts have them."""
    found = [node.input[index] for index in BIASES[node.op_type] if index < len(node.input)]
    return [name for name in found if name]
