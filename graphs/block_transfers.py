"""Small graphs that move KV blocks on a device, for caches that the host cannot address.

Caches are those of the paged graph, [num_blocks, block_size, kv_heads, head_size], under its own
names, those of values if there are any; a graph that changes them has the outputs of the paged
graph too, to be bound to the same memory. Content is in canonical order, [n, kv_heads, block_size,
head_size] a cache (see `providers.base.KVFormat`), under the name of the cache with CONTENT before
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.tensors import numpy_dtype

BLOCKS: Final = "blocks"  # int64 [n], to read or to write
SOURCES: Final = "sources"  # int64 [n]
TARGETS: Final = "targets"  # int64 [n]
SHAPE: Final = "shape"  # int64 [4]
ZEROS: Final = "zeros"  # of SHAPE
CONTENT: Final = "content."  # and the name of a cache input

_TO_CANONICAL: Final = [0, 2, 1, 3]  # and back


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the caches of a model are."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: int  # onnx.TensorProto.DataType
    parts: int = 2  # caches of a layer: keys and values, or keys alone


def cache_names(num_layers: int, parts: int = 2) -> Iterator[tuple[str, str]]:
    """Input and output name of each cache: keys, then values if any, layer by layer."""
    for layer in range(num_layers):
        yield from contract.cache_names(layer, parts)


def zeros_graph(dtype: int, rank: int = 4) -> onnx.ModelProto:
    """A graph that makes zeros of any `rank` sizes, where its output is bound to."""
    g = GraphBuilder("zeros")
    g.input(SHAPE, TensorProto.INT64, [rank])
    zero = g.constant(np.array(0, numpy_dtype(dtype)), "zero")
    g.output(ZEROS, dtype, [f"size{axis}" for axis in range(rank)])
    g.node("Expand", [zero, SHAPE], outputs=[ZEROS])
    return g.build()


def read_graph(shape: CacheShape) -> onnx.ModelProto:
    """A graph that gathers BLOCKS of every cache into their contents."""
    g = GraphBuilder("read_blocks")
    g.input(BLOCKS, TensorProto.INT64, ["n"])
    for past, _ in cache_names(shape.num_layers, shape.parts):
        cache = _cache(g, past, shape)
        blocks = g.node("Gather", [cache, BLOCKS], axis=0)
        content = g.output(CONTENT + past, shape.dtype, _content_dims(shape))
        g.node("Transpose", [blocks], outputs=[content], perm=_TO_CANONICAL)
    return g.build()


def write_graph(shape: CacheShape) -> onnx.ModelProto:
    """A graph that replaces BLOCKS of every cache by their contents."""
    g = GraphBuilder("write_blocks")
    rows = _rows(g, g.input(BLOCKS, TensorProto.INT64, ["n"]))
    for past, present in cache_names(shape.num_layers, shape.parts):
        cache = _cache(g, past, shape)
        content = g.input(CONTENT + past, shape.dtype, _content_dims(shape))
        blocks = g.node("Transpose", [content], perm=_TO_CANONICAL)
        _write(g, shape, (cache, rows, blocks), present)
    return g.build()


def copy_graph(shape: CacheShape) -> onnx.ModelProto:
    """A graph that copies SOURCES of every cache to its TARGETS."""
    g = GraphBuilder("copy_blocks")
    sources = g.input(SOURCES, TensorProto.INT64, ["n"])
    rows = _rows(g, g.input(TARGETS, TensorProto.INT64, ["n"]))
    for past, present in cache_names(shape.num_layers, shape.parts):
        cache = _cache(g, past, shape)
        blocks = g.node("Gather", [cache, sources], axis=0)
        _write(g, shape, (cache, rows, blocks), present)
    return g.build()


def _cache(g: GraphBuilder, name: str, shape: CacheShape) -> str:
    return g.input(name, shape.dtype, _cache_dims(shape))


def _cache_dims(shape: CacheShape) -> list[int | str]:
    return [contract.NUM_BLOCKS, contract.BLOCK_SIZE, shape.num_kv_heads, shape.head_size]


def _content_dims(shape: CacheShape) -> list[int | str]:
    return ["n", shape.num_kv_heads, contract.BLOCK_SIZE, shape.head_size]


def _rows(g: GraphBuilder, blocks: str) -> str:
    """Block ids as ScatterND takes them, [n, 1]."""
    return g.node("Unsqueeze", [blocks, g.constant(np.array([1], np.int64), "last")])


def _write(g: GraphBuilder, shape: CacheShape, update: tuple[str, str, str], present: str) -> None:
    g.node("ScatterND", update, outputs=[g.output(present, shape.dtype, _cache_dims(shape))])
