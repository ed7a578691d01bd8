"""Rewrite the operators of layers that keep states for devices: no control flow, opset 21.

A loop over tokens, as in `decompose_linear`, is slow where each node is a kernel that is started. A
step has at most CHUNK_TOKENS new tokens a row here, which are computed at once (arXiv:2412.06464).
Where a row has one, what follows is the plain formula. With a row's states S [value_size, key_size]
as columns, C tokens, and decays g <= 0, of which only sums are ever exponents:

    D[i, t] = exp(sum of g behind i up to t), 0 where i > t
    A[i, t] = beta[t] D[i, t] k[i].k[t]                     for i < t
    U       = beta (V - exp(G) S K) (I + A)^-1              what each token adds; G: sums up to it
    output  = exp(G) S Q + U (D * K^T Q)
    S'      = exp(G[C]) S + U D[:, C] K^T

Without the delta rule, as state spaces have it, U is V. Where each channel of a key has a decay, D
and exp(G) are in keys and queries: see `chunk_decays`.

The inverse grows by doubling: where W is that of the blocks of s tokens on the diagonal, and A_s
what A has of one such block for the next one, W - W A_s W is that of blocks of 2 s. The product of
I - A, I + A^2, I + A^4 and so on is of no use: keys of tokens that repeat are alike, and numbers of
10^17 cancel out then.

Rows are padded to C tokens by some whose beta and g are 0, which change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs import contract, ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_nodes import DeltaNetNode
from onnxport.graphs.passes.chunk_decays import (
    ChannelDecays,
    ChannelPatterns,
    HeadDecays,
    channel_sums,
)
from onnxport.graphs.passes.decompose_linear import LinearRewriter, rewrite_linear
from onnxport.graphs.passes.paged_plan import SCOPE
from onnxport.graphs.passes.result import PassResult

CHUNK_TOKENS: Final = 64  # most new tokens of a row; a power of two
_NEVER: Final = -1e9  # whose exponential is 0


def chunk_linear(model: onnx.ModelProto, *, takes_tile: bool = False) -> PassResult:
    """Replace VarlenCausalConvWithState and GatedDeltaNet by standard operators.

    No row of a step may have more than CHUNK_TOKENS new tokens. What is computed of each is as wide
    as the longest has: what the input QUERY_TILE or else the attention metadata says. All is in
    float32, whatever the activations are. Shapes of values follow from these, and from shapes.

    Args:
        model: A paged graph, in its final types and behind `decompose`.
        takes_tile: Let the graph have the input QUERY_TILE for it.

    Raises:
        ArtifactError: As `decompose_linear`; or the graph has neither of these inputs.
    """
    result = rewrite_linear(model, partial(_ChunkRewriter, takes_tile=takes_tile), "chunk_linear")
    if takes_tile and result.changes:
        dims = [contract.QUERY_TILE]
        info = onnx.helper.make_tensor_value_info(contract.QUERY_TILE, TensorProto.INT8, dims)
        result.model.graph.input.append(info)
    return result


class _ChunkRewriter(LinearRewriter):
    """Emits the replacement of each node."""

    def __init__(self, g: GraphBuilder, model: onnx.ModelProto, *, takes_tile: bool) -> None:
        super().__init__(g, model)
        self._inputs = {info.name for info in model.graph.input}
        self._inputs |= {contract.QUERY_TILE} if takes_tile else set()
        self._chunks: dict[str, _ChunkPlan] = {}

    def _delta_net(self, node: DeltaNetNode) -> None:
        g = self._g
        heads, value_size, key_size = self._state_sizes(node)
        query, key, value = self._projections(node, (heads, value_size, key_size))
        if node.is_normalized:
            query, key = self._normalized(query), self._normalized(key)
        query = g.node("Mul", [query, self._scalar(node.scale or key_size**-0.5)])
        plan = self._chunk_plan(node)
        query = plan.columns(g, self._shared(query, heads, [heads, key_size]))
        key = g.node("Gather", [self._shared(key, heads, [heads, key_size]), plan.tokens], axis=0)
        value = plan.columns(g, ops.reshape(g, value, [-1, heads, value_size]))
        keys = g.node("Transpose", [key], perm=[0, 2, 1, 3])  # [batch, heads, C, key_size]
        key = g.node("Transpose", [key], perm=[0, 2, 3, 1])

        decays = self._decays(plan, node, heads)
        if node.has_delta_rule:
            beta = g.node("Sigmoid", [node.beta]) if node.has_sigmoid else node.beta
            beta = plan.numbers(g, beta)
            alike = decays.products(keys, key)
            inverse = plan.inverse(g, g.node("Mul", [alike, beta]))
            known = decays.found(node.state, key)
            new = g.node("Mul", [g.node("Sub", [value, known]), beta])
            added = g.node("MatMul", [new, inverse])  # [batch, heads, value_size, C]
        else:
            added = plan.of_own(g, value)

        before, seen = decays.found(node.state, query), decays.products(keys, query)
        output = g.node("Add", [before, g.node("MatMul", [added, seen])])
        output = g.node("Transpose", [output], perm=[0, 3, 1, 2])
        output = ops.reshape(g, output, [-1, heads, value_size])
        output = g.node("Gather", [output, plan.rows], axis=0)
        self._return(output, node.query, node.output)

        kept, change = decays.left(node.state), decays.change(added, keys)
        g.node("Add", [kept, change], outputs=[node.final_state])

    def _decays(
        self, plan: _ChunkPlan, node: DeltaNetNode, heads: int
    ) -> HeadDecays | ChannelDecays:
        g, logs = self._g, self._log_decay(node, heads)
        if node.has_channels:
            with g.scope(SCOPE, root=True):
                patterns = plan.channel_patterns(g)
            rows = g.node("Transpose", [plan.columns(g, logs)], perm=[0, 1, 3, 2])
            return ChannelDecays.of(g, patterns, plan.of_own_rows(g, rows))
        decay = plan.numbers(g, logs)
        within = plan.decays(g, decay)
        return HeadDecays(g, within, g.node("Exp", [g.node("MatMul", [decay, plan.upto])]))

    def _chunk_plan(self, node: DeltaNetNode) -> _ChunkPlan:
        if node.lengths not in self._chunks:
            with self._g.scope(SCOPE, root=True):
                longest = self._longest(node)
                self._chunks[node.lengths] = _ChunkPlan(self._g, node.lengths, node.decay, longest)
        return self._chunks[node.lengths]

    def _longest(self, node: DeltaNetNode) -> str:
        """How many new tokens the longest row has, int64 [1]; at most CHUNK_TOKENS are said."""
        g = self._g
        if contract.QUERY_TILE in self._inputs:
            length = g.node("Shape", [contract.QUERY_TILE])
        elif contract.ATTENTION_METADATA in self._inputs:
            bounds = ops.cast(g, contract.ATTENTION_METADATA, TensorProto.INT64)
            length = g.node("Slice", [bounds, self._ints([0]), self._ints([1])])
        else:
            raise ArtifactError(
                f"chunk_linear: how many new tokens a row of {node.name!r} has at most says "
                f"neither {contract.QUERY_TILE!r} nor {contract.ATTENTION_METADATA!r}, one of "
                "which must be an input of the graph"
            )
        most = g.node("Min", [length, self._ints([CHUNK_TOKENS])])
        return g.node("Max", [most, self._ints([1])])


class _ChunkPlan:
    """What layers share: where the tokens of a row are, and which of them come before which.

    Attributes:
        tokens: int64 [batch, C], the token at each place of a row; behind its end the last one.
        rows: int64 [num_tokens], a token's place among all rows, [batch * C].
        upto: float32 [C, C], 1 for i <= t.
    """

    def __init__(self, g: GraphBuilder, lengths: str, like: str, longest: str) -> None:
        """Emit what does not depend on a layer.

        Args:
            g: takes the nodes.
            lengths: where rows begin, int32 [batch + 1].
            like: a value [num_tokens, …].
            longest: int64 [1], C.
        """

        def ints(*values: int) -> str:
            return g.constant(np.array(values, np.int64), "ints")

        def number(value: int) -> str:
            return g.constant(np.array(value, np.int64), "int")

        bounds = ops.cast(g, lengths, TensorProto.INT64)
        starts = g.node("Slice", [bounds, ints(0), ints(-1)])
        ends = g.node("Slice", [bounds, ints(1), ints(2**31)])
        width = g.node("Squeeze", [longest])
        places = g.node("Range", [number(0), width, number(1)])
        starts_of, ends_of = (g.node("Unsqueeze", [x, ints(1)]) for x in (starts, ends))
        at = g.node("Add", [starts_of, places])
        last = g.node("Sub", [ends_of, number(1)])
        self.tokens = g.node("Max", [g.node("Min", [at, last]), number(0)])
        is_own = ops.cast(g, g.node("Less", [at, ends_of]), TensorProto.FLOAT)
        self._own = g.node("Unsqueeze", [is_own, ints(1, 2)])  # [batch, 1, 1, C]

        count = g.node("Squeeze", [g.node("Shape", [like], start=0, end=1)])
        numbers = g.node("Range", [number(0), count, number(1)])
        column = g.node("Unsqueeze", [numbers, ints(1)])
        is_over = g.node("LessOrEqual", [g.node("Unsqueeze", [ends, ints(0)]), column])
        over = ops.cast(g, is_over, TensorProto.INT64)
        row = g.node("ReduceSum", [over, ints(1)], keepdims=0)
        begin = g.node("Gather", [starts, row], axis=0)
        local = g.node("Sub", [numbers, begin])
        self.rows = g.node("Add", [g.node("Mul", [row, width]), local])

        every = g.constant(_patterns(), "patterns")
        both = g.node("Concat", [longest, longest], axis=0)
        cut = g.node("Slice", [every, ints(0, 0), both, ints(1, 2)])
        self._same, self.upto, self._behind, *self._levels = (
            g.node("Gather", [cut, number(which)], axis=0) for which in range(len(_patterns()))
        )
        self._sees = ops.cast(g, self.upto, TensorProto.BOOL)
        self._both = both
        self._channels: ChannelPatterns | None = None

    def channel_patterns(self, g: GraphBuilder) -> ChannelPatterns:
        """What layers share whose channels have decays."""
        if self._channels is None:
            start = g.constant(np.array([0, 0], np.int64), "ints")
            axes = g.constant(np.array([2, 3], np.int64), "ints")
            every = g.constant(channel_sums(CHUNK_TOKENS), "sums")
            cut = g.node("Slice", [every, start, self._both, axes])
            upto, behind = (
                g.node("Gather", [cut, g.constant(np.array(which, np.int64), "int")], axis=0)
                for which in range(2)
            )
            first = g.constant(np.array([0], np.int64), "ints")
            levels = [g.node("Unsqueeze", [level, first]) for level in self._levels]
            pairs = g.node("Concat", levels, axis=0)
            self._channels = ChannelPatterns(upto, behind, pairs, self._same)
        return self._channels

    def columns(self, g: GraphBuilder, x: str) -> str:
        """[num_tokens, heads, size] as [batch, heads, size, C]."""
        return g.node("Transpose", [g.node("Gather", [x, self.tokens], axis=0)], perm=[0, 2, 3, 1])

    def numbers(self, g: GraphBuilder, x: str) -> str:
        """[num_tokens, heads] as [batch, heads, 1, C], 0 behind the end of a row."""
        rows = g.node("Transpose", [g.node("Gather", [x, self.tokens], axis=0)], perm=[0, 2, 1])
        axis = g.constant(np.array([2], np.int64), "ints")
        return self.of_own(g, g.node("Unsqueeze", [rows, axis]))

    def of_own(self, g: GraphBuilder, x: str) -> str:
        """[batch, heads, …, C] with 0 behind the end of a row."""
        return g.node("Mul", [x, self._own])

    def of_own_rows(self, g: GraphBuilder, x: str) -> str:
        """[batch, heads, C, …] with 0 behind the end of a row."""
        return g.node("Mul", [x, g.node("Transpose", [self._own], perm=[0, 1, 3, 2])])

    def decays(self, g: GraphBuilder, decay: str) -> str:
        """D of what `numbers` gave, [batch, heads, C, C]: of sums, for differences lose bits."""
        sums = g.node("MatMul", [g.node("Mul", [decay, self._behind]), self.upto])
        never = g.constant(np.array(_NEVER, np.float32), "never")
        return g.node("Exp", [g.node("Where", [self._sees, sums, never])])

    def inverse(self, g: GraphBuilder, a: str) -> str:
        """(I + A)^-1 for what `a`, [batch, heads, C, C], has above the diagonal."""
        first, *others = self._levels
        found = g.node("Sub", [self._same, g.node("Mul", [a, first])])
        for level in others:
            between = g.node("MatMul", [found, g.node("Mul", [a, level])])
            found = g.node("Sub", [found, g.node("MatMul", [between, found])])
        return found


def _patterns() -> NDArray[np.float32]:
    """float32 [3 + levels, CHUNK_TOKENS, CHUNK_TOKENS], 1 where i and t are as follows.

    The same; i <= t; i < t; and for each s that is a power of two, i and t in blocks of s side by
    side, the second of which is an odd one.
    """
    t = np.arange(CHUNK_TOKENS)
    i = t[:, None]
    sizes = [1 << power for power in range(CHUNK_TOKENS.bit_length() - 1)]
    levels = [(i // (2 * s) == t // (2 * s)) & (i // s < t // s) for s in sizes]
    found: Sequence[NDArray[np.bool_]] = [i == t, i <= t, i < t, *levels]
    return np.stack(found).astype(np.float32)
