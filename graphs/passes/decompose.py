"""Rewrite PagedAttention into standard ONNX operators, opset 21.

Any execution provider runs the result; on the CPU it is the reference for every faster path.
There is no control flow, and no operator of another domain.

Keys and values are written with one ScatterND on the 4-D cache by [block, offset] pairs. Its
output is the graph's output, so when a caller binds one buffer as input and output, ONNX Runtime
updates it in place; a Reshape between cache and ScatterND would force a copy of the whole pool.

Queries are cut into tiles of up to `tile_tokens` tokens of one sequence, so that a batch of
ragged chunks needs little padding: decoding makes one row a sequence, a prefill of T tokens makes
about T / tile_tokens tiles. Each tile gathers the blocks of its sequence and attends to them:

    tile queries [tiles, heads, tile, head_size] x keys [tiles, kv_heads, head_size, kv_len]

Execution providers that compile for fixed shapes want `bounds="shapes"`: then the shape of every
value follows from the inputs' shapes. A caller pads tokens and rows to a few sizes; a row of no
new tokens and columns of the block table that no sequence needs change no result.

What does not depend on a layer (slots, tiles, gathered block ids, masks, the rows of the RoPE
tables) is computed once, by `onnxport.graphs.passes.paged_plan`.

On ONNX Runtime 1.27's WebGPU provider (a software Vulkan device) the plan runs on the CPU, every
node of a layer on the device; the few copies to it do not grow with the layers, and nothing is
copied back before the results. Outputs agreed with NumPy to 4e-6 on 40 random cases.

What a pool holds where a sequence has no key may be anything, NaN too: it is chosen away.

Of a latent cache rows are written and gathered once: values are their leading channels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs import contract, ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import element_types, initializers, names, producers
from onnxport.graphs.paged import (
    PagedAttentionNode,
    PagedInput,
    attention_nodes,
    is_paged_attention,
    rotary_dim,
)
from onnxport.graphs.passes.paged_plan import SCOPE, PagedPlan
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.tensors import numpy_dtype

Bounds = Literal["metadata", "shapes"]

DEFAULT_TILE_TOKENS: Final = 64
_COMPUTE_TYPES: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def decompose(
    model: onnx.ModelProto,
    *,
    tile_tokens: int = DEFAULT_TILE_TOKENS,
    bounds: Bounds = "metadata",
) -> PassResult:
    """Replace every PagedAttention by standard operators.

    Scores take `rows * num_heads * kv_len` elements, where rows is at most
    num_tokens + batch * min(tile_tokens, longest chunk) and kv_len the longest sequence rounded
    up to whole blocks; gathered keys and values take 2 * rows / tile * kv_len * kv_heads *
    head_size. A sliding window masks, and saves no work.

    Args:
        model: A paged graph. Activations and cache may be float32, float16 or bfloat16; the
            types of an EP are set by other passes before.
        tile_tokens: Most query tokens that share one gathered copy of their keys and values.
        bounds: Where the longest chunk and sequence come from. "metadata": from the attention
            metadata. "shapes": the graph has no such input; the length of a new one, QUERY_TILE,
            1 to `tile_tokens`, is the tile, and kv_len is the width of the block table in
            tokens. Any length of it gives the same results; the longest chunk's is the fastest.

    Raises:
        ArtifactError: A node uses what this rewrite does not cover, a quantized cache, or a slot
            mapping where shapes bound it; or its types are unknown.
    """
    assert bounds in get_args(Bounds), bounds
    layers = {node.outputs[0]: node for node in attention_nodes(model)}
    if not layers:
        return PassResult("decompose", copy_model(model), {})
    copy = copy_model(model)
    g = GraphBuilder("decomposed")
    remade = {name for node in layers.values() for name in node.outputs if name}
    g.reserve(names(copy) - remade)
    query_tile = _take_query_tile(copy, layers.values()) if bounds == "shapes" else None
    rewriter = _Rewriter(g, copy, tile_tokens, query_tile)
    nodes: list[onnx.NodeProto] = []
    for node in copy.graph.node:
        if is_paged_attention(node):
            layer = layers[node.output[0]]
            with g.scope(layer.name or f"attention.{layer.outputs[0]}"):
                rewriter.rewrite(layer)
            nodes.extend(g.take_nodes())
        else:
            nodes.append(node)
    copies = [_copied(node) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(copies)
    copy.graph.initializer.extend(g.take_initializers())
    changes = Counter({"PagedAttention decomposed": len(layers), "plans": len(rewriter.plans)})
    return PassResult("decompose", copy, dict(changes))


def _take_query_tile(model: onnx.ModelProto, layers: Iterable[PagedAttentionNode]) -> str:
    """Let a graph have the input QUERY_TILE in place of the attention metadata."""
    metadata = {layer.input(PagedInput.ATTENTION_METADATA) for layer in layers}
    for info in [info for info in model.graph.input if info.name in metadata]:
        model.graph.input.remove(info)
    name, dims = contract.QUERY_TILE, [contract.QUERY_TILE]
    info = onnx.helper.make_tensor_value_info(name, TensorProto.INT8, dims)
    model.graph.input.append(info)
    return name


def _copied(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


class _Rewriter:
    """Emits the replacement of each node, and shares plans between them."""

    def __init__(
        self, g: GraphBuilder, model: onnx.ModelProto, tile_tokens: int, query_tile: str | None
    ) -> None:
        self._g = g
        self._types = element_types(model)
        self._initializers = initializers(model)
        self._producers = producers(model)
        self._tile_tokens = tile_tokens
        self._query_tile = query_tile
        self.plans: dict[tuple[str, ...], PagedPlan] = {}

    def rewrite(self, layer: PagedAttentionNode) -> None:
        """Emit one layer's attention; its outputs keep their names."""
        _refuse(layer, maps_slots=self._query_tile is None)
        dtype = self._types.get(layer.input(PagedInput.QUERY))
        cache_dtype = self._types.get(layer.input(PagedInput.KEY_CACHE))
        if dtype not in _COMPUTE_TYPES or cache_dtype not in _COMPUTE_TYPES:
            raise ArtifactError(
                f"decompose: the types of {layer.name!r} are unknown: {dtype}, cache {cache_dtype}"
            )
        assert dtype is not None
        assert cache_dtype is not None
        plan = self._plan(layer)
        query, key, value = self._split_heads(layer)
        query, key = self._normalize(layer, dtype, query, key)
        if layer.do_rotary:
            query = self._rotate(layer, plan, query)
            key = self._rotate(layer, plan, key) if layer.writes else key
        keys = self._update(layer, plan, key, PagedInput.KEY_CACHE, dtype, cache_dtype)
        if value is None:
            values = self._leading(layer, keys)
        else:
            values = self._update(layer, plan, value, PagedInput.VALUE_CACHE, dtype, cache_dtype)
        self._attend(layer, plan, dtype, (query, keys, values))

    def _plan(self, layer: PagedAttentionNode) -> PagedPlan:
        key = (
            layer.input(PagedInput.CUMULATIVE_SEQUENCE_LENGTHS),
            layer.input(PagedInput.PAST_SEQUENCE_LENGTHS),
            layer.input(PagedInput.SLOT_MAPPING),
            layer.input(PagedInput.ATTENTION_METADATA),
        )
        if key not in self.plans:
            with self._g.scope(SCOPE, root=True):
                self.plans[key] = PagedPlan(self._g, layer, self._tile_tokens, self._query_tile)
        return self.plans[key]

    def _split_heads(self, layer: PagedAttentionNode) -> tuple[str, str, str | None]:
        """Query [T, heads, head_size], key and value, if any, [T, kv_heads, head_size]."""
        g, heads, kv_heads, size = self._g, layer.num_heads, layer.kv_num_heads, layer.head_size
        if layer.is_latent:
            query = ops.reshape(g, layer.input(PagedInput.QUERY), [-1, heads, size])
            return query, ops.reshape(g, layer.input(PagedInput.KEY), [-1, kv_heads, size]), None
        if not layer.is_packed:
            inputs = layer.inputs[PagedInput.QUERY : PagedInput.VALUE + 1]
            shapes = ([-1, heads, size], [-1, kv_heads, size], [-1, kv_heads, size])
            split = [ops.reshape(g, x, shape) for x, shape in zip(inputs, shapes, strict=True)]
            return split[0], split[1], split[2]
        packed = ops.reshape(g, layer.input(PagedInput.QUERY), [-1, heads + 2 * kv_heads, size])
        sizes = g.constant(np.array([heads, kv_heads, kv_heads], np.int64), "heads")
        q, k, v = g.node("Split", [packed, sizes], outputs=[".q", ".k", ".v"], axis=1)
        return q, k, v

    def _normalize(
        self, layer: PagedAttentionNode, dtype: int, query: str, key: str
    ) -> tuple[str, str]:
        """RMSNorm of each head where the node has weights for it, computed in float32."""
        weights = layer.input(PagedInput.Q_NORM_WEIGHT), layer.input(PagedInput.K_NORM_WEIGHT)
        if not weights[0]:
            return query, key
        g = self._g
        results: list[str] = []
        epsilon = g.constant(np.array(layer.qk_norm_epsilon, np.float32), "epsilon")
        axes = g.constant(np.array([-1], np.int64), "last")
        for x, weight in zip((query, key), weights, strict=True):
            wide = x if dtype == TensorProto.FLOAT else ops.cast(g, x, TensorProto.FLOAT)
            gain = weight if dtype == TensorProto.FLOAT else ops.cast(g, weight, TensorProto.FLOAT)
            square = g.node("Mul", [wide, wide])
            mean = g.node("ReduceMean", [square, axes], keepdims=1)
            rms = g.node("Sqrt", [g.node("Add", [mean, epsilon])])
            normed = g.node("Mul", [g.node("Div", [wide, rms]), gain])
            results.append(normed if dtype == TensorProto.FLOAT else ops.cast(g, normed, dtype))
        return results[0], results[1]

    def _rotate(self, layer: PagedAttentionNode, plan: PagedPlan, x: str) -> str:
        """Rotate channels of x [T, heads, head_size] by its tokens' positions."""
        g = self._g
        cos = plan.rotary_rows(layer.input(PagedInput.COS))  # [T, 1, rotary_dim / 2]
        sin = plan.rotary_rows(layer.input(PagedInput.SIN))
        half, start = self._rotary_half(layer), layer.rotary_offset
        before, rotated, after = self._cut(x, (start, 2 * half, layer.head_size - start - 2 * half))
        assert rotated is not None
        if layer.rotary_interleaved:
            pairs = ops.reshape(g, rotated, [0, 0, half, 2])
            columns = g.node("Split", [pairs], outputs=2, axis=-1, num_outputs=2)
            a, b = (ops.reshape(g, column, [0, 0, half]) for column in columns)
        else:
            a, b = g.node("Split", [rotated], outputs=2, axis=-1, num_outputs=2)
        left = g.node("Sub", [g.node("Mul", [a, cos]), g.node("Mul", [b, sin])])
        right = g.node("Add", [g.node("Mul", [b, cos]), g.node("Mul", [a, sin])])
        sides = [left, right]
        if layer.rotary_interleaved:
            columns = tuple(ops.reshape(g, side, [0, 0, half, 1]) for side in sides)
            sides = [ops.reshape(g, g.node("Concat", columns, axis=-1), [0, 0, 2 * half])]
        return g.node("Concat", [part for part in (before, *sides, after) if part], axis=-1)

    def _cut(self, x: str, widths: tuple[int, int, int]) -> tuple[str | None, ...]:
        """Split the last axis in three; None for a part of no width."""
        used = [width for width in widths if width]
        if len(used) == 1:
            return tuple(x if width else None for width in widths)
        sizes = self._g.constant(np.array(used, np.int64), "widths")
        parts = iter(self._g.node("Split", [x, sizes], outputs=len(used), axis=-1))
        return tuple(next(parts) if width else None for width in widths)

    def _rotary_half(self, layer: PagedAttentionNode) -> int:
        """rotary_dim / 2."""
        found = rotary_dim(layer, self._initializers, self._producers)
        if found is None:
            raise ArtifactError(
                f"decompose: the cos table of {layer.name!r} must be an initializer [positions, "
                "rotary_dim / 2], perhaps cast"
            )
        return found // 2

    def _update(
        self,
        layer: PagedAttentionNode,
        plan: PagedPlan,
        x: str,
        position: PagedInput,
        dtype: int,
        cache_dtype: int,
    ) -> str:
        """Write x [T, kv_heads, head_size]; returns [tiles, kv_len, kv_heads, head_size].

        What another layer has written is only read.
        """
        g, cache = self._g, layer.input(position)
        table = plan.of_table(layer.input(PagedInput.BLOCK_TABLE))
        if layer.writes:
            present = layer.outputs[1 if position == PagedInput.KEY_CACHE else 2]
            if cache_dtype != dtype:
                x = ops.cast(g, x, cache_dtype)
            if plan.written is not None:
                x = g.node("Gather", [x, plan.written], axis=0)
            g.node("ScatterND", [cache, table.slots, x], outputs=[present])
            cache = present
        blocks = g.node("Gather", [cache, table.tile_blocks], axis=0)
        if cache_dtype != dtype:
            blocks = ops.cast(g, blocks, dtype)
        shape = plan.kv_shape(layer.kv_num_heads, layer.head_size)
        return g.node("Reshape", [blocks, shape])

    def _leading(self, layer: PagedAttentionNode, keys: str) -> str:
        """The values that lie in front of latent rows, [tiles, kv_len, 1, v_head_size]."""
        if layer.v_head_size == layer.head_size:
            return keys
        widths = [layer.v_head_size, layer.head_size - layer.v_head_size]
        sizes = self._g.constant(np.array(widths, np.int64), "widths")
        values, _ = self._g.node("Split", [keys, sizes], outputs=2, axis=-1)
        return values

    def _attend(
        self,
        layer: PagedAttentionNode,
        plan: PagedPlan,
        dtype: int,
        qkv: tuple[str, str, str],
    ) -> None:
        """Attention of the tiles, and back to one row a token."""
        g, heads, kv_heads, size = self._g, layer.num_heads, layer.kv_num_heads, layer.head_size
        query, keys, values = qkv
        scale = layer.scale if layer.scale is not None else 1.0 / math.sqrt(size)
        factor = scale / layer.softcap if layer.softcap else scale
        tiles = g.node("Gather", [query, plan.tile_tokens], axis=0)  # [tiles, tile, heads, size]
        tiles = g.node("Mul", [tiles, self._scalar(factor, dtype)])
        rows = g.node("Transpose", [tiles], perm=[0, 2, 1, 3])
        rows = ops.reshape(g, rows, [0, kv_heads, -1, size])  # query heads of one KV head in turn
        columns = g.node("Transpose", [keys], perm=[0, 2, 3, 1])
        scores = g.node("MatMul", [rows, columns])  # [tiles, kv_heads, group * tile, kv_len]
        scores = g.node("Reshape", [scores, plan.scores_shape(heads)])
        if layer.softcap:
            bounded = g.node("Tanh", [scores])
            scores = g.node("Mul", [bounded, self._scalar(layer.softcap, dtype)])
        # Chosen, not added or multiplied by zero: whatever lies in the blocks of others, or was
        # left there, be it no number or a very large one, changes nothing.
        visible = plan.visible(layer.local_window_size, layer.is_causal, layer.local_window_chunked)
        # Finite, so that a row which sees nothing is, too.
        lowest = float(ml_dtypes.finfo(numpy_dtype(dtype)).min)
        scores = g.node("Where", [visible, scores, self._scalar(lowest, dtype)])
        weights = self._softmax(layer, plan, scores)  # [tiles, heads, tile, kv_len]
        weights = g.node("Reshape", [weights, plan.weights_shape(kv_heads)])
        values = g.node(
            "Where", [plan.own(layer.local_window_size), values, self._scalar(0, dtype)]
        )
        rows = g.node("Transpose", [values], perm=[0, 2, 1, 3])
        mixed = g.node("MatMul", [weights, rows])  # [tiles, kv_heads, group * tile, v_head_size]
        mixed = g.node("Reshape", [mixed, plan.tile_shape(heads, layer.v_head_size)])
        mixed = g.node("Transpose", [mixed], perm=[0, 2, 1, 3])
        mixed = ops.reshape(g, mixed, [-1, heads * layer.v_head_size])
        g.node("Gather", [mixed, plan.token_rows], outputs=[layer.outputs[0]], axis=0)

    def _softmax(self, layer: PagedAttentionNode, plan: PagedPlan, scores: str) -> str:
        """Softmax over the keys; a head's sink takes part in the denominator only."""
        g = self._g
        sink = layer.input(PagedInput.HEAD_SINK)
        if not sink:
            return g.node("Softmax", [scores], axis=-1)
        sink = ops.reshape(g, sink, [1, layer.num_heads, 1, 1])
        sink = g.node("Expand", [sink, plan.sink_shape(layer.num_heads)])
        weights = g.node("Softmax", [g.node("Concat", [scores, sink], axis=-1)], axis=-1)
        bounds = [g.constant(np.array([n], np.int64), "bound") for n in (0, -1, -1)]
        return g.node("Slice", [weights, *bounds])

    def _scalar(self, value: float, dtype: int) -> str:
        return self._g.constant(np.array(value, numpy_dtype(dtype)), "scalar")


def _refuse(layer: PagedAttentionNode, *, maps_slots: bool) -> None:
    """Raise for what the rewrite does not cover, naming all of it."""
    mapping = layer.input(PagedInput.SLOT_MAPPING)
    checks: Mapping[str, Any] = {
        f"a {layer.kv_cache_layout} cache": layer.kv_cache_layout not in ("SEPARATE", "LATENT"),
        f"a cache of {layer.k_cache_dtype}": layer.k_cache_dtype in ("int4", "float4e2m1"),
        f"a cache quantized {layer.k_quant_type}": layer.is_quantized,
        "RoPE without its tables": layer.do_rotary and not layer.input(PagedInput.SIN),
        # How many tokens it leaves out decides shapes.
        "a slot mapping, with fixed shapes": bool(mapping) and not maps_slots,
    }
    found = [what for what, used in checks.items() if used]
    if found:
        raise ArtifactError(
            f"decompose: PagedAttention {layer.name!r} uses {' and '.join(found)}, which the "
            "decomposed attention does not cover; a provider with the native operator may."
        )
