"""Rewrite PagedAttention for a device whose own paged attention does less in one operator.

`onnxport.FlatPagedAttention` stores keys and values and attends; everything else that
`com.microsoft.PagedAttention` does becomes standard ONNX operators in front of it: splitting the
packed projection, normalizing heads, rotating queries and keys. The block table gives way to flat
lists without padding, as OpenVINO's PagedAttentionExtension takes them:

    positions              int64 [num_tokens]        of each token in its sequence
    block_indices          int32 [num_used_blocks]   the blocks of all sequences in turn
    block_indices_begins   int32 [batch + 1]         where each sequence's blocks begin and end
    max_context_len        int32 []                  the longest sequence, new tokens included

The caches stay graph inputs, in whatever layout the device fills them, and are written in place;
the graph's outputs for them are removed. Layers that read another one's caches get the inputs of
that, and write the same keys and values there once more. All layers get as many query heads: what
OpenVINO 2026.4's CPU plugin finds is wrong where layers of one model have several numbers of them.
Those that are added read zeros, and what they find is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract, ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types, initializers, names
from onnxport.graphs.paged import (
    PagedAttentionNode,
    PagedInput,
    attention_nodes,
    is_paged_attention,
)
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.result import PassResult, copy_model

FLAT_PAGED_ATTENTION: Final = "FlatPagedAttention"
POSITIONS: Final = "positions"
BLOCK_INDICES: Final = "block_indices"
BLOCK_INDICES_BEGINS: Final = "block_indices_begins"
MAX_CONTEXT_LEN: Final = "max_context_len"
SINKS: Final = 10  # the operator's input of these, [1, num_heads, 1, 1]; left out where none are
_CACHES: Final = (PagedInput.KEY_CACHE, PagedInput.VALUE_CACHE)
_REPLACED: Final = (contract.BLOCK_TABLE, contract.ATTENTION_METADATA)
_ADDED: Final[Mapping[str, tuple[int, list[str]]]] = {
    POSITIONS: (TensorProto.INT64, [contract.NUM_TOKENS]),
    BLOCK_INDICES: (TensorProto.INT32, ["num_used_blocks"]),
    BLOCK_INDICES_BEGINS: (TensorProto.INT32, [contract.BATCH_PLUS_ONE]),
    MAX_CONTEXT_LEN: (TensorProto.INT32, []),
}


def flatten_paged(model: onnx.ModelProto) -> PassResult:
    """Replace every PagedAttention of a graph in float32.

    Args:
        model: A paged graph of the contract, in float32.

    Raises:
        ArtifactError: A node uses what the replacement does not cover; names all of it.
    """
    layers = {node.outputs[0]: node for node in attention_nodes(model)}
    copy = copy_model(model)
    if not layers:
        return PassResult("flat_paged", copy, {})
    types = element_types(copy)
    g = GraphBuilder("flat")
    g.reserve((names(copy) | set(_ADDED)) - set(layers))
    _replace_inputs(copy, {name for layer in layers.values() for name in layer.outputs[1:]})
    widest = max(layer.num_heads for layer in layers.values())
    rewriter = _Rewriter(g, copy, _inputs_of_presents(layers.values()), widest)
    nodes: list[onnx.NodeProto] = []
    for node in copy.graph.node:
        if is_paged_attention(node):
            layer = layers[node.output[0]]
            _refuse(layer, types)
            with g.scope(layer.name or layer.outputs[0]):
                rewriter.rewrite(layer)
            nodes.extend(g.take_nodes())
        else:
            nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.graph.initializer.extend(g.take_initializers())
    if DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(helper.make_opsetid(DOMAIN, OPSET))
    return PassResult("flat_paged", copy, {"PagedAttention flattened": len(layers)})


def has_sinks(model: onnx.ModelProto) -> bool:
    """Whether heads of a flattened graph have sinks."""
    return any(
        node.op_type == FLAT_PAGED_ATTENTION and len(node.input) > SINKS
        for node in model.graph.node
    )


def _replace_inputs(model: onnx.ModelProto, presents: set[str]) -> None:
    """Declare the flat inputs in place of the block table, and drop the caches' outputs."""
    graph = model.graph
    inputs = [info for info in graph.input if info.name not in _REPLACED]
    inputs += [helper.make_tensor_value_info(name, *kind) for name, kind in _ADDED.items()]
    outputs = [info for info in graph.output if info.name not in presents]
    for field, values in ((graph.input, inputs), (graph.output, outputs)):
        copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(copies)


def _inputs_of_presents(layers: Iterable[PagedAttentionNode]) -> dict[str, str]:
    """The cache that each output of the graph is the new content of."""
    return {
        present: layer.input(position)
        for layer in layers
        for position, present in zip(_CACHES, layer.outputs[1:], strict=True)
        if present
    }


class _Rewriter:
    """Emits the replacement of each node; layers share the rows of the RoPE tables."""

    def __init__(
        self, g: GraphBuilder, model: onnx.ModelProto, pasts: Mapping[str, str], widest: int
    ) -> None:
        self._g = g
        self._widest = widest  # query heads that every layer gets
        self._pasts = pasts
        self._initializers = initializers(model)
        self._rows: dict[str, str] = {}  # table -> its rows at the tokens' positions

    def rewrite(self, layer: PagedAttentionNode) -> None:
        """Emit one layer's attention; its result keeps its name."""
        g = self._g
        query, key, value = self._split_heads(layer)
        query = self._normalize(layer, query, PagedInput.Q_NORM_WEIGHT)
        key = self._normalize(layer, key, PagedInput.K_NORM_WEIGHT)
        if layer.do_rotary:
            query, key = self._rotate(layer, query), self._rotate(layer, key)
        is_filled = layer.num_heads < self._widest
        if is_filled:
            query = self._fill(layer, query)
        widths = (self._widest, layer.kv_num_heads, layer.kv_num_heads)
        rows = [
            ops.reshape(g, x, [-1, heads * layer.head_size])
            for x, heads in zip((query, key, value), widths, strict=True)
        ]
        scale = layer.scale if layer.scale is not None else layer.head_size**-0.5
        sink = layer.input(PagedInput.HEAD_SINK)
        assert not (sink and is_filled)  # ArchSpec has no such model
        sinks = [ops.reshape(g, sink, [1, layer.num_heads, 1, 1], "sinks")] if sink else []
        (found,) = g.node(
            FLAT_PAGED_ATTENTION,
            [
                *rows,
                *(self._pasts.get(cache, cache) for cache in map(layer.input, _CACHES)),
                layer.input(PagedInput.PAST_SEQUENCE_LENGTHS),
                layer.input(PagedInput.CUMULATIVE_SEQUENCE_LENGTHS),
                BLOCK_INDICES,
                BLOCK_INDICES_BEGINS,
                MAX_CONTEXT_LEN,
                *sinks,
            ],
            outputs=[".filled" if is_filled else layer.outputs[0]],
            domain=DOMAIN,
            name="paged",
            head_size=layer.head_size,
            kv_num_heads=layer.kv_num_heads,
            local_window_size=layer.local_window_size or 0,
            scale=float(scale),
        )
        if is_filled:
            self._empty(layer, found)

    def _fill(self, layer: PagedAttentionNode, query: str) -> str:
        """Query heads of zeros behind those of each KV head, for as many as in the widest layer."""
        g, kv_heads = self._g, layer.kv_num_heads
        room = (self._widest - layer.num_heads) // kv_heads
        shape = [-1, kv_heads, layer.num_heads // kv_heads, layer.head_size]
        pads, axis = (g.constant(np.array(one, np.int64), "room") for one in ([0, room], [2]))
        nothing = g.constant(np.array(0, np.float32), "nothing")
        return g.node("Pad", [ops.reshape(g, query, shape), pads, nothing, axis], name="filled")

    def _empty(self, layer: PagedAttentionNode, found: str) -> None:
        """What a layer's own query heads found; the result has the layer's name."""
        g, kv_heads = self._g, layer.kv_num_heads
        shape = [-1, kv_heads, self._widest // kv_heads, layer.head_size]
        first, end, axis = (
            g.constant(np.array([one], np.int64), "own")
            for one in (0, layer.num_heads // kv_heads, 2)
        )
        own = g.node("Slice", [ops.reshape(g, found, shape), first, end, axis], name="own")
        width = g.constant(np.array([-1, layer.num_heads * layer.head_size], np.int64), "width")
        g.node("Reshape", [own, width], outputs=[layer.outputs[0]], name="own.join")

    def _split_heads(self, layer: PagedAttentionNode) -> tuple[str, str, str]:
        """Query [T, heads, 1, head_size], key and value [T, kv_heads, 1, head_size]."""
        g, heads, kv_heads, size = self._g, layer.num_heads, layer.kv_num_heads, layer.head_size
        if layer.is_packed:
            sizes = np.array([heads * size, kv_heads * size, kv_heads * size], np.int64)
            inputs = g.node(
                "Split",
                [layer.input(PagedInput.QUERY), g.constant(sizes, "widths")],
                outputs=[".q", ".k", ".v"],
                axis=-1,
            )
        else:
            inputs = layer.inputs[PagedInput.QUERY : PagedInput.VALUE + 1]
        shapes = ([-1, heads, 1, size], [-1, kv_heads, 1, size], [-1, kv_heads, 1, size])
        q, k, v = (ops.reshape(g, x, shape) for x, shape in zip(inputs, shapes, strict=True))
        return q, k, v

    def _normalize(self, layer: PagedAttentionNode, x: str, position: PagedInput) -> str:
        """RMSNorm over the last axis of x, if the node has a weight for it."""
        weight = layer.input(position)
        return ops.rms_norm(self._g, x, weight, layer.qk_norm_epsilon) if weight else x

    def _rotate(self, layer: PagedAttentionNode, x: str) -> str:
        """Rotate the leading channels of x [T, heads, 1, head_size] by the tokens' positions.

        Written as `x * cos + rotate_half(x) * sin` over full-width tables, the form that compilers
        look for. Of neighbouring channels, if these are pairs, the other one is gathered.
        """
        g = self._g
        half = self._rotary_half(layer)
        is_paired = layer.rotary_interleaved
        cos = self._table_rows(layer.input(PagedInput.COS), is_paired=is_paired)
        sin = self._table_rows(layer.input(PagedInput.SIN), is_paired=is_paired)
        rest: list[str] = []
        if layer.head_size > 2 * half:
            x, *rest = self._cut(x, [2 * half, layer.head_size - 2 * half])
        if is_paired:
            others = g.constant(np.arange(2 * half, dtype=np.int64) ^ 1, "others")
            signs = g.constant(np.tile(np.array([-1, 1], np.float32), half), "signs")
            turned = g.node("Mul", [g.node("Gather", [x, others], axis=3), signs])
        else:
            a, b = self._cut(x, [half, half])
            minus = g.node("Mul", [b, g.constant(np.array(-1, np.float32), "minus")])
            turned = g.node("Concat", [minus, a], axis=-1)
        rotated = g.node("Add", [g.node("Mul", [x, cos]), g.node("Mul", [turned, sin])])
        return g.node("Concat", [rotated, *rest], axis=-1) if rest else rotated

    def _cut(self, x: str, widths: list[int]) -> tuple[str, ...]:
        """Split the channels of x [T, heads, 1, channels]."""
        sizes = self._g.constant(np.array(widths, np.int64), "sizes")
        return self._g.node("Split", [x, sizes], outputs=len(widths), axis=3)

    def _rotary_half(self, layer: PagedAttentionNode) -> int:
        """rotary_dim / 2, the width of the cos table."""
        table = self._initializers.get(layer.input(PagedInput.COS))
        if table is None or len(table.dims) != 2:
            raise ArtifactError(
                f"flat_paged: the cos table of {layer.name!r} must be an initializer [positions, "
                "rotary_dim / 2]"
            )
        return int(table.dims[1])

    def _table_rows(self, table: str, *, is_paired: bool) -> str:
        """Rows [T, 1, 1, rotary_dim] of a table: both halves alike, or both channels of a pair."""
        if table not in self._rows:
            g = self._g
            with g.scope("rope", root=True):
                rows = g.node("Gather", [table, POSITIONS], axis=0)
                if is_paired:
                    last = g.constant(np.array([2], np.int64), "last")
                    column = g.node("Unsqueeze", [rows, last])
                    pairs = g.node("Concat", [column, column], axis=-1)
                    rows = ops.reshape(g, pairs, [0, -1])
                else:
                    rows = g.node("Concat", [rows, rows], axis=-1)
                axes = g.constant(np.array([1, 2], np.int64), "axes")
                self._rows[table] = g.node("Unsqueeze", [rows, axes])
        return self._rows[table]


def _refuse(layer: PagedAttentionNode, types: dict[str, int]) -> None:
    """Raise for what the rewrite does not cover, naming all of it."""
    checks = {
        "activations that are not float32": types.get(layer.input(PagedInput.QUERY))
        != TensorProto.FLOAT,
        f"a {layer.kv_cache_layout} cache": layer.kv_cache_layout != "SEPARATE",
        "RoPE without its tables": layer.do_rotary and not layer.input(PagedInput.SIN),
        "a RoPE offset": layer.rotary_offset != 0,
        "softcap": layer.softcap != 0,
        "attention in chunks": layer.local_window_chunked,
        "a slot mapping": bool(layer.input(PagedInput.SLOT_MAPPING)),
        "attention that is not causal": not layer.is_causal,
        "a quantized cache": layer.is_quantized,
    }
    found = [what for what, used in checks.items() if used]
    if found:
        raise ArtifactError(
            f"flat_paged: PagedAttention {layer.name!r} uses {' and '.join(found)}, which the "
            "paged attention of this device does not take; use another provider"
        )
