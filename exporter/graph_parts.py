"""What both graphs of a decoder have beside its layers: products, caches, RoPE, attributes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxport.exporter.plan import FINAL_NORM, HEAD
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import attention_ops, ops
from onnxport.graphs import contract as names
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import TensorRef

ACCURACY_LEVEL = 4  # MatMulNBits may round activations to int8 blocks; a provider may lower it


def product(
    g: GraphBuilder, weights: StoredWeights, role: str, x: str, *, is_flat: bool = True
) -> str:
    """`x @ matrix.T + bias`; `is_flat` says whether x is [rows, columns]."""
    matrix = weights.matrices[role]
    bias = "" if matrix.bias is None else g.weight(matrix.bias)
    weight, name = g.weight(matrix.weight), role.rpartition(".")[2]
    if matrix.block is None:
        assert not matrix.by_rows
        return ops.linear(g, x, weight, bias, name)
    assert matrix.scales is not None
    sizes = {"k": matrix.columns, "n": matrix.rows, "block_size": matrix.block.block_size}
    y = ops.matmul_nbits(
        g,
        x,
        weight,
        g.weight(matrix.scales),
        **sizes,
        bits=matrix.block.bits,
        zero_points="" if matrix.zero_points is None else g.weight(matrix.zero_points),
        bias=bias if matrix.offsets is None else "",
        accuracy_level=ACCURACY_LEVEL,
        name=name,
    )
    if matrix.offsets is None:
        return y
    y = ops.add_offsets(g, x, y, g.weight(matrix.offsets), **sizes, is_flat=is_flat, name=name)
    return g.node("Add", [y, bias], name=f"{name}.bias") if bias else y


def tied_head(g: GraphBuilder, weights: StoredWeights, x: str, *, is_flat: bool) -> str:
    """Logits of x, where a dense table [vocab, x's columns] serves the embedding and the head."""
    matrix = weights.matrices[HEAD]
    weight = g.weight(matrix.weight)
    if is_flat:
        return g.node("Gemm", [x, weight], name=HEAD, transB=1)
    rows = ops.reshape(g, x, (-1, matrix.columns), "head.rows")
    flat = g.node("Gemm", [rows, weight], name=HEAD, transB=1)
    shape = g.node("Shape", [names.INPUT_IDS], name="head.shape")
    vocab = g.constant(np.array([matrix.rows], np.int64), "vocab")
    dims = g.node("Concat", [shape, vocab], name="head.dims", axis=0)
    return g.node("Reshape", [flat, dims], name="head.unflatten")


def attributes(spec: ArchSpec, layer: int) -> attention_ops.AttentionAttributes:
    """Attention's attributes. The window counts the query's own token, as the spec's does."""
    return attention_ops.AttentionAttributes(
        num_heads=spec.query_heads(layer),
        kv_num_heads=spec.heads_of(layer).num_kv_heads,
        scale=spec.scale_of(layer) if spec.inverse_layer_scale else spec.attention_scale,
        softcap=spec.attention_softcap,
        local_window_size=spec.sliding_window[layer],
        local_window_chunked=bool(spec.chunked_windows and spec.sliding_window[layer]),
        do_rotary=spec.rotates_within(layer),
        rotary_interleaved=spec.rope_of(layer).interleaved,
        v_head_size=None if spec.latent is None else spec.latent.kv_rank,
    )


def sinks(g: GraphBuilder, weights: StoredWeights, layer: int) -> str:
    """The attention sinks of a layer, if it has any."""
    stored = weights.vectors.get(f"layers.{layer}.sinks")
    return "" if stored is None else g.weight(stored)


def activation_dtype(weights: StoredWeights) -> int:
    """The element type of activations, which is that of the norms' weights."""
    norms = (weights.vectors.get(role) for role in (FINAL_NORM, "layers.0.input_norm"))
    return next(norm.data_type for norm in norms if norm is not None)


def declare_pools(g: GraphBuilder, spec: ArchSpec, dtype: int) -> None:
    """Declare the paged caches of all layers that have some, in and out."""
    for layer in spec.cached_layers:
        heads = spec.heads_of(layer)
        pool: list[int | str] = [
            names.NUM_BLOCKS,
            names.BLOCK_SIZE,
            heads.num_kv_heads,
            heads.head_size,
        ]
        _declare_caches(g, spec, layer, dtype, pool, pool)


def declare_rows_of_caches(g: GraphBuilder, spec: ArchSpec, dtype: int) -> None:
    """Likewise those of GroupQueryAttention, which are the sequences' own."""
    for layer in spec.cached_layers:
        heads: list[int | str] = [names.BATCH, spec.num_kv_heads]
        past, total = (
            [*heads, length, spec.head_size]
            for length in ("past_sequence_length", "total_sequence_length")
        )
        _declare_caches(g, spec, layer, dtype, past, total)


def _declare_caches(
    g: GraphBuilder,
    spec: ArchSpec,
    layer: int,
    dtype: int,
    past: list[int | str],
    present: list[int | str],
) -> None:
    caches = names.cache_names(layer, spec.cache_parts)
    for name, _ in caches:
        g.input(name, dtype, past)
    for _, name in caches:
        g.output(name, dtype, present)


def rope_tables(
    g: GraphBuilder, spec: ArchSpec, weights: StoredWeights, dtype: int
) -> list[tuple[str, str]]:
    """Each layer's cos and sin tables in the activations' type.

    They are stored in float32, for long positions. Names are empty where attention rotates nothing.
    """
    if spec.qk_norm_last:
        return [("", "")] * spec.num_layers

    def table(ref: TensorRef) -> str:
        stored = g.weight(ref)
        if dtype == TensorProto.FLOAT:
            return stored
        return ops.cast(g, stored, dtype, f"{stored}.cast")

    tables = {rope: (table(cos), table(sin)) for rope, (cos, sin) in weights.ropes.items()}
    return [
        tables[spec.rope_of(layer)] if spec.rotates_within(layer) else ("", "")
        for layer in range(spec.num_layers)
    ]
