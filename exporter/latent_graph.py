"""Multi-head latent attention in a graph: what is around PagedAttention over latents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import TensorRef


def attend_latents(
    g: GraphBuilder,
    spec: ArchSpec,
    weights: StoredWeights,
    layer: int,
    x: str,
    linear: Callable[[str, str], str],
    attend: Callable[[int, tuple[str, ...]], str],
) -> str:
    """Attention of a paged graph, in the absorbed form that `LatentSpec` tells.

    Args:
        g: The builder.
        spec: The model.
        weights: Its weights.
        layer: Which one.
        x: What attention reads, [num_tokens, hidden].
        linear: (role, x) -> their product.
        attend: (layer, (queries, rows)) -> what is found, [num_tokens, num_heads * kv_rank].

    Returns:
        What the output projection reads, [num_tokens, attended_size].
    """
    latent, role = spec.latent, f"layers.{layer}"
    assert latent is not None
    queries, row = _projected(g, spec, latent, weights, role, linear(f"{role}.qkv", x))
    if latent.query_rank is not None:
        queries = linear(f"{role}.q_b", queries)
    heads, rank = spec.num_heads, latent.kv_rank
    apart = ops.reshape(g, queries, (0, heads, latent.query_size), "q.heads")
    plain, turning = _split(g, apart, (latent.nope_size, latent.rope_size), "q.split")
    found = _by_head(g, plain, weights.matrices[f"{role}.k_up"].weight, "k_up")
    query = g.node("Concat", [found, turning], name="query", axis=-1)
    query = ops.reshape(g, query, (0, heads * latent.row_size), "query.join")
    mixed = ops.reshape(g, attend(layer, (query, row)), (0, heads, rank), "latents.heads")
    stored = weights.matrices[f"{role}.v_up"].weight
    stored = stored.view(stored.name, (heads, latent.value_size, rank))
    values = _by_head(g, mixed, stored, "v_up")
    return ops.reshape(g, values, (0, spec.attended_size), "v.join")


def _projected(
    g: GraphBuilder,
    spec: ArchSpec,
    latent: LatentSpec,
    weights: StoredWeights,
    role: str,
    joined: str,
) -> tuple[str, str]:
    """What queries are made of, or themselves, and the rows of the cache before they rotate."""
    width = latent.query_rank or spec.num_heads * latent.query_size
    first, latents, turning = _split(
        g, joined, (width, latent.kv_rank, latent.rope_size), "qkv.split"
    )

    def norm(value: str, name: str) -> str:
        weight = g.weight(weights.vectors[f"{role}.{name}"])
        return ops.rms_norm(g, value, weight, spec.inner_eps, name)

    if latent.query_rank is not None:
        first = norm(first, "q_latent_norm")
    row = g.node("Concat", [norm(latents, "latent_norm"), turning], name="row", axis=-1)
    return first, row


def _by_head(g: GraphBuilder, x: str, stored: TensorRef, name: str) -> str:
    """Numbers [num_tokens, heads, K] by matrices [heads, N, K]; [num_tokens, heads, N].

    A runtime without an operator for it turns the matrices once, when it loads them.
    """
    rows = g.node("Transpose", [x], name=f"{name}.rows", perm=[1, 0, 2])
    matrices = g.node("Transpose", [g.weight(stored)], name=f"{name}.turned", perm=[0, 2, 1])
    products = g.node("MatMul", [rows, matrices], name=name)
    return g.node("Transpose", [products], name=f"{name}.tokens", perm=[1, 0, 2])


def _split(g: GraphBuilder, x: str, widths: tuple[int, ...], name: str) -> tuple[str, ...]:
    sizes = g.constant(np.array(widths, np.int64), "widths")
    return g.node("Split", [x, sizes], outputs=len(widths), name=name, axis=-1)
