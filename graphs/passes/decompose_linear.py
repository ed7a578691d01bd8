"""Rewrite the operators of layers that keep states into standard ONNX operators, opset 21.

On the CPU the result is the reference for the kernels, and what runs where these were not built. A
convolution gathers what each of its taps reads. A gated delta net is two loops, over sequences and
over the tokens of each, so that a sequence has the same bits whatever else is in the batch and
however its tokens are cut into steps. Pools are gathered from and scattered to as they were.

After `decompose` and all passes that do not take subgraphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxport.errors import ArtifactError
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types, initializers, names, producers
from onnxport.graphs.linear_nodes import (
    LENGTH_EPSILON,
    CausalConvNode,
    DeltaNetNode,
    is_linear_node,
    read_linear_node,
)
from onnxport.graphs.passes.result import PassResult, copy_model

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
_CONV_PLAN = "convolution"  # scope of what convolutions share


def decompose_linear(model: onnx.ModelProto) -> PassResult:
    """Replace VarlenCausalConvWithState and GatedDeltaNet by standard operators.

    Sequences of no new tokens keep their states, but one must have some. Whatever the activations
    are, all is computed in float32.

    Args:
        model: A paged graph, in its final types.

    Raises:
        ArtifactError: A node has what is not understood; or its sizes, which the states' pool and
            the weights of a convolution have, or its types are unknown.
    """
    return rewrite_linear(model, LinearRewriter, "decompose_linear")


def rewrite_linear(
    model: onnx.ModelProto, make: Callable[[GraphBuilder, onnx.ModelProto], LinearRewriter], by: str
) -> PassResult:
    """Replace the operators by what a rewriter emits.

    Args:
        model: as for `decompose_linear`.
        make: a rewriter of a copy of the model, which emits into a builder.
        by: the name of the pass.
    """
    copy = copy_model(model)
    found = [node for node in model.graph.node if is_linear_node(node)]
    if not found:
        return PassResult(by, copy, {})
    g = GraphBuilder("decomposed")
    g.reserve(names(copy) - {name for node in found for name in node.output})
    rewriter = make(g, copy)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if is_linear_node(node):
            with g.scope(node.name or node.output[0]):
                rewriter.rewrite(read_linear_node(node))
            nodes.extend(g.take_nodes())
        else:
            nodes.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    copy.graph.initializer.extend(g.take_initializers())
    changes = Counter(f"{node.op_type} decomposed" for node in found)
    return PassResult(by, copy, dict(changes))


class LinearRewriter:
    """Emits the replacement of each node."""

    def __init__(self, g: GraphBuilder, model: onnx.ModelProto) -> None:
        self._g = g
        self._types = element_types(model)
        self._weights = initializers(model)
        self._makers = producers(model)
        self._shapes = {info.name: info.type.tensor_type.shape.dim for info in model.graph.input}
        self._plans: dict[tuple[str, int], _ConvPlan] = {}

    def rewrite(self, node: CausalConvNode | DeltaNetNode) -> None:
        """Emit one node's replacement; its outputs keep their names."""
        if isinstance(node, CausalConvNode):
            self._convolve(node)
        else:
            self._delta_net(node)

    def _convolve(self, node: CausalConvNode) -> None:
        g, weight = self._g, self._weights.get(node.weight)
        if weight is None or len(weight.dims) != 3:
            raise ArtifactError(
                f"decompose_linear: the weights of {node.name!r} must be an initializer "
                "[channels, 1, kernel]"
            )
        taps = int(weight.dims[2])
        plan = self._plan(node.lengths, taps, node.input)
        state = g.node("Transpose", [self._float(node.state)], perm=[0, 2, 1])
        flat = g.node("Reshape", [state, self._ints([-1, weight.dims[0]])])
        inputs = g.node("Concat", [flat, self._float(node.input)], axis=0)
        read = g.node("Gather", [inputs, plan.read], axis=0)  # [num_tokens, taps, channels]
        by_tap = g.node("Transpose", [self._float(node.weight)], perm=[1, 2, 0])
        sums = g.node("ReduceSum", [g.node("Mul", [read, by_tap]), self._ints([1])], keepdims=0)
        if node.bias:
            sums = g.node("Add", [sums, self._float(node.bias)])
        self._return(ops.silu(g, sums) if node.has_silu else sums, node.input, node.output)
        kept = g.node("Gather", [inputs, plan.kept], axis=0)  # [batch, taps - 1, channels]
        final = g.node("Transpose", [kept], perm=[0, 2, 1])
        self._return(final, node.state, node.final_state)

    def _plan(self, lengths: str, taps: int, like: str) -> _ConvPlan:
        if (lengths, taps) not in self._plans:
            with self._g.scope(_CONV_PLAN, root=True):
                self._plans[lengths, taps] = _ConvPlan(self._g, lengths, taps, like)
        return self._plans[lengths, taps]

    def _delta_net(self, node: DeltaNetNode) -> None:
        g = self._g
        heads, value_size, key_size = self._state_sizes(node)
        query, key, value = self._projections(node, (heads, value_size, key_size))
        if node.is_normalized:
            query, key = self._normalized(query), self._normalized(key)
        query = g.node("Mul", [query, self._scalar(node.scale or key_size**-0.5)])
        decay = g.node("Exp", [self._log_decay(node, heads)])
        columns = {
            "query": self._shared(query, heads, [heads, key_size, 1]),
            "key": self._shared(key, heads, [heads, key_size, 1]),
            "value": ops.reshape(g, value, [-1, heads, value_size, 1]),
            "decay": ops.reshape(g, decay, [-1, heads, 1, key_size if node.has_channels else 1]),
        }
        if node.has_delta_rule:
            beta = g.node("Sigmoid", [node.beta]) if node.has_sigmoid else node.beta
            columns["beta"] = ops.reshape(g, beta, [-1, heads, 1, 1])
        shape = [heads, value_size, key_size]
        body = _sequences(columns, node.lengths, node.state, shape)
        lengths = g.node("Shape", [node.lengths])
        batch = g.node("Sub", [lengths, self._ints([1])])
        batch = g.node("Squeeze", [batch])
        nothing = g.constant(np.zeros((0, heads, value_size), np.float32), "nothing")
        output, states = g.node("Loop", [batch, "", nothing], outputs=2, body=body)
        self._return(output, node.query, node.output)
        g.node("Identity", [states], outputs=[node.final_state])

    def _state_sizes(self, node: DeltaNetNode) -> tuple[int, int, int]:
        """Value heads, value size and key size, which the states' pool has."""
        maker = self._makers.get(node.state)
        pool = node.state if maker is None else maker.input[0]
        dims = [dim.dim_value for dim in self._shapes.get(pool, ())]
        if len(dims) != 4 or not all(dims[1:]):
            raise ArtifactError(
                f"decompose_linear: the states of {node.name!r} must be a graph input [num_states, "
                f"value_heads, value_size, key_size], or gathered from one, with fixed sizes; "
                f"found {dims}"
            )
        return dims[1], dims[2], dims[3]

    def _projections(self, node: DeltaNetNode, sizes: tuple[int, int, int]) -> tuple[str, str, str]:
        """Query and key [num_tokens, key_heads, key_size], and the value, in float32."""
        g, (heads, value_size, key_size) = self._g, sizes
        shape = [0, -1, key_size]
        if not node.is_packed:
            given = (node.query, node.key, node.value)
            flat = [g.node("Flatten", [self._float(x)], axis=1) for x in given]
            return ops.reshape(g, flat[0], shape), ops.reshape(g, flat[1], shape), flat[2]
        all_of = self._float(node.query)
        width = g.node("Squeeze", [g.node("Shape", [all_of], start=1, end=2)])
        values = g.constant(np.array(heads * value_size, np.int64), "values")
        both = g.node("Sub", [width, values])
        half = g.node("Div", [both, g.constant(np.array(2, np.int64), "two")])
        parts = [g.node("Unsqueeze", [x, self._ints([0])]) for x in (half, half, values)]
        sizes_of = g.node("Concat", parts, axis=0)
        query, key, value = g.node("Split", [all_of, sizes_of], outputs=3, axis=1)
        return ops.reshape(g, query, shape), ops.reshape(g, key, shape), value

    def _normalized(self, x: str) -> str:
        """Vectors of length 1 along the last axis."""
        g = self._g
        square = g.node("ReduceSum", [g.node("Mul", [x, x]), self._ints([-1])], keepdims=1)
        length = g.node("Sqrt", [g.node("Add", [square, self._scalar(LENGTH_EPSILON)])])
        return g.node("Div", [x, length])

    def _log_decay(self, node: DeltaNetNode, heads: int) -> str:
        """[num_tokens, heads], or of channels [num_tokens, heads, key_size]."""
        g, shape = self._g, [-1, heads, self._state_sizes(node)[2]]
        if not node.has_qwen_gate:
            return ops.reshape(g, node.decay, shape) if node.has_channels else node.decay
        raw = g.node("Softplus", [g.node("Add", [node.decay, node.dt_bias])])
        rate = g.node("Neg", [g.node("Exp", [node.a_log])])
        if node.has_channels:
            raw, rate = ops.reshape(g, raw, shape), ops.reshape(g, rate, [heads, 1])
        return g.node("Mul", [raw, rate])

    def _shared(self, x: str, heads: int, shape: Sequence[int]) -> str:
        """Give each value head its query or key: [num_tokens, *shape]."""
        g = self._g
        count = g.node("Shape", [x], start=1, end=2)
        times = g.node("Div", [self._ints([heads]), count])
        wide = g.node("Unsqueeze", [x, self._ints([2])])  # [num_tokens, key_heads, 1, key_size]
        repeats = g.node("Concat", [self._ints([1, 1]), times, self._ints([1])], axis=0)
        return ops.reshape(g, g.node("Tile", [wide, repeats]), [-1, *shape])

    def _float(self, x: str) -> str:
        kind = self._types.get(x)
        if kind is None:
            raise ArtifactError(f"decompose_linear: the type of {x!r} is unknown")
        return x if kind == FLOAT else ops.cast(self._g, x, FLOAT)

    def _return(self, x: str, like: str, name: str) -> None:
        """Give out a value in the type of an input."""
        self._g.node("Cast", [x], outputs=[name], to=self._types[like])

    def _ints(self, values: Sequence[int]) -> str:
        return self._g.constant(np.array(values, np.int64), "ints")

    def _scalar(self, value: float) -> str:
        return self._g.constant(np.array(value, np.float32), "scalar")


class _ConvPlan:
    """What convolutions read: rows of the states, [batch * (taps - 1)], and of the inputs behind.

    Attributes:
        read: int64 [num_tokens, taps], the rows that a token's taps read.
        kept: int64 [batch, taps - 1], the rows that become a sequence's state.
    """

    def __init__(self, g: GraphBuilder, lengths: str, taps: int, like: str) -> None:
        """Emit what does not depend on a layer; `like` is [num_tokens, …]."""

        def ints(values: Sequence[int] | int) -> str:
            return g.constant(np.array(values, np.int64), "ints")

        past = taps - 1
        bounds = ops.cast(g, lengths, INT64)
        starts = g.node("Slice", [bounds, ints([0]), ints([-1])])
        ends = g.node("Slice", [bounds, ints([1]), ints([2**31])])
        batch = g.node("Squeeze", [g.node("Shape", [starts])])
        states = g.node("Mul", [batch, ints(past)])  # rows ahead of the inputs
        count = g.node("Squeeze", [g.node("Shape", [like], start=0, end=1)])
        tokens = g.node("Range", [ints(0), count, ints(1)])
        column = g.node("Unsqueeze", [tokens, ints([1])])
        is_over = g.node("LessOrEqual", [g.node("Unsqueeze", [ends, ints([0])]), column])
        over = ops.cast(g, is_over, INT64)
        sequence = g.node("ReduceSum", [over, ints([1])], keepdims=0)  # [num_tokens]

        def rows(of: str, begin: str, first: str, offsets: Sequence[int]) -> str:
            """Rows at positions `first + offsets` of sequences whose inputs begin at `begin`."""
            place = g.node("Add", [g.node("Unsqueeze", [first, ints([1])]), ints(offsets)])
            own = g.node("Unsqueeze", [g.node("Add", [begin, states]), ints([1])])
            before = g.node("Mul", [of, ints(past)])
            before = g.node("Unsqueeze", [g.node("Add", [before, ints(past)]), ints([1])])
            is_new = g.node("GreaterOrEqual", [place, ints(0)])
            return g.node("Add", [place, g.node("Where", [is_new, own, before])])

        begin = g.node("Gather", [starts, sequence], axis=0)
        local = g.node("Sub", [tokens, begin])
        self.read = rows(sequence, begin, local, range(-past, 1))
        every = g.node("Range", [ints(0), batch, ints(1)])
        self.kept = rows(every, starts, g.node("Sub", [ends, starts]), range(-past, 0))


def _sequences(
    columns: Mapping[str, str], lengths: str, states: str, shape: Sequence[int]
) -> onnx.GraphProto:
    """The body of a loop over sequences: adds the outputs of each, and returns its state."""
    prefix = f"{states}.each"

    def own(name: str) -> str:
        return f"{prefix}.{name}"

    one = helper.make_tensor(own("one"), INT64, [], [1])
    nodes = [
        helper.make_node("Add", [own("index"), own("one")], [own("next")]),
        helper.make_node("Gather", [lengths, own("index")], [own("begin32")], axis=0),
        helper.make_node("Gather", [lengths, own("next")], [own("end32")], axis=0),
        helper.make_node("Cast", [own("begin32")], [own("begin")], to=INT64),
        helper.make_node("Cast", [own("end32")], [own("end")], to=INT64),
        helper.make_node("Sub", [own("end"), own("begin")], [own("count")]),
        helper.make_node("Gather", [states, own("index")], [own("from")], axis=0),
        helper.make_node(
            "Loop",
            [own("count"), "", own("from")],
            [own("state"), own("rows")],
            body=_tokens(columns, own("begin"), f"{prefix}.token", shape),
        ),
        helper.make_node("Concat", [own("before"), own("rows")], [own("all")], axis=0),
        helper.make_node("Identity", [own("going")], [own("goes")]),
    ]
    inputs = [
        helper.make_tensor_value_info(own("index"), INT64, []),
        helper.make_tensor_value_info(own("going"), TensorProto.BOOL, []),
        helper.make_tensor_value_info(own("before"), FLOAT, [None, *shape[:2]]),
    ]
    outputs = [
        helper.make_tensor_value_info(own("goes"), TensorProto.BOOL, []),
        helper.make_tensor_value_info(own("all"), FLOAT, [None, *shape[:2]]),
        helper.make_tensor_value_info(own("state"), FLOAT, shape),
    ]
    return helper.make_graph(nodes, "sequence", inputs, outputs, [one])


def _tokens(
    columns: Mapping[str, str], begin: str, prefix: str, shape: Sequence[int]
) -> onnx.GraphProto:
    """The body of a loop over a sequence's tokens: changes the state, and queries it.

    Without a beta there is no delta rule: what is added are values as they are.
    """

    def own(name: str) -> str:
        return f"{prefix}.{name}"

    axis = helper.make_tensor(own("axis"), INT64, [1], [-1])
    nodes = [helper.make_node("Add", [own("index"), begin], [own("at")])]
    nodes += [
        helper.make_node("Gather", [column, own("at")], [own(name)], axis=0)
        for name, column in columns.items()
    ]
    nodes += [
        helper.make_node("Mul", [own("from"), own("decay")], [own("kept")]),
        helper.make_node("Transpose", [own("key")], [own("row")], perm=[0, 2, 1]),
    ]
    if "beta" in columns:
        nodes += [
            helper.make_node("MatMul", [own("kept"), own("key")], [own("known")]),
            helper.make_node("Sub", [own("value"), own("known")], [own("new")]),
            helper.make_node("Mul", [own("new"), own("beta")], [own("delta")]),
        ]
    delta = own("delta") if "beta" in columns else own("value")
    nodes += [
        helper.make_node("Mul", [delta, own("row")], [own("change")]),
        helper.make_node("Add", [own("kept"), own("change")], [own("state")]),
        helper.make_node("MatMul", [own("state"), own("query")], [own("column")]),
        helper.make_node("Squeeze", [own("column"), own("axis")], [own("output")]),
        helper.make_node("Identity", [own("going")], [own("goes")]),
    ]
    inputs = [
        helper.make_tensor_value_info(own("index"), INT64, []),
        helper.make_tensor_value_info(own("going"), TensorProto.BOOL, []),
        helper.make_tensor_value_info(own("from"), FLOAT, shape),
    ]
    outputs = [
        helper.make_tensor_value_info(own("goes"), TensorProto.BOOL, []),
        helper.make_tensor_value_info(own("state"), FLOAT, shape),
        helper.make_tensor_value_info(own("output"), FLOAT, shape[:2]),
    ]
    return helper.make_graph(nodes, "token", inputs, outputs, [axis])
