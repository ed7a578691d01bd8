"""Which tensors make up attention: projections, gates, latents, norms of heads."""

from __future__ import annotations

from dataclasses import replace

from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.plan_parts import (
    MatrixPlan,
    Part,
    VectorPlan,
    bias_of,
    plan_norm,
    split_by_head,
    stack_rows,
    times,
)
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec


def head_vectors(
    spec: ArchSpec, layer: int, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """Norms of queries and keys, and sinks, of a layer with attention."""
    found = {}
    if spec.apart_qk_norm:
        found["q_norm"] = _apart_norm(prefix + names.q_norm, spec.num_heads, spec.head_size)
        found["k_norm"] = _apart_norm(prefix + names.k_norm, spec.num_kv_heads, spec.head_size)
    elif spec.qk_norm and not spec.unweighted_qk_norm:
        size = spec.heads_of(layer).head_size
        sizes = (spec.q_size, spec.kv_size) if spec.whole_qk_norm else (size, size)
        found["q_norm"] = plan_norm(names, prefix + names.q_norm, sizes[0])
        if spec.kv_source(layer) == layer:
            found["k_norm"] = plan_norm(names, prefix + names.k_norm, sizes[1])
    if spec.has_sinks(layer):
        found["sinks"] = VectorPlan(prefix + names.sinks, (spec.query_heads(layer),))
    return {role + name: vector for name, vector in found.items()}


def _apart_norm(tensor: str, heads: int, size: int) -> VectorPlan:
    """The weights of each head's norm, in one tensor, or with "{}" for the head in one of each."""
    if "{}" not in tensor:
        return VectorPlan(tensor, (heads, size))
    first, *others = (tensor.format(head) for head in range(heads))
    return VectorPlan(first, (size,), more=tuple(others))


def attention_matrices(
    spec: ArchSpec, layer: int, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """Attention's projections of what a layer reads, and what makes gates.

    Unless gates have a tensor of their own, each head's is below its query.
    """
    inputs, widths = spec.attention_inputs(layer), spec.qkv_parts(layer)
    attended = spec.attended_width(layer)
    o = stack_rows(prefix, names.o, (spec.hidden_size,), attended, biased=spec.o_bias)
    own = spec.multipliers
    scale = spec.output_scale * (1.0 if own is None else own.attention) * (spec.value_scale or 1.0)
    found = {role + "o": replace(o, scale=scale)}
    if spec.latent is not None:
        return found | _latent_matrices(spec, spec.latent, names, role, prefix)
    if names.qkv_by_head:
        tensor = f"{prefix}{names.qkv[0]}.weight"
        queries = spec.q_size // spec.num_kv_heads
        rows = (queries, spec.head_size, spec.head_size)
        kinds = split_by_head(tensor, spec.num_kv_heads, rows, inputs)
        biases = ((bias_of(tensor), (spec.qkv_size,)),) if spec.qkv_bias else ()
        parts = tuple(part for kind in kinds for part in kind)
        found[role + "qkv"] = MatrixPlan(parts, inputs, biases, biases_by_parts=bool(biases))
    elif not spec.attention_gate or names.attention_gate is not None:
        tensors = names.qkv[: len(widths)]
        qkv = stack_rows(prefix, tensors, widths, inputs, biased=spec.qkv_bias)
        if own is not None:
            qkv = times(qkv, (own.queries, own.keys, own.values))
        found[role + "qkv"] = qkv
    if not spec.attention_gate:
        return found
    if names.attention_gate is not None:
        sizes = (spec.gate_size(layer),)
        gate = stack_rows(prefix, (names.attention_gate,), sizes, inputs, biased=False)
        return found | {role + "attention_gate": gate}
    first, *others = (f"{prefix}{name}.weight" for name in names.qkv)
    q, gates = split_by_head(first, spec.num_heads, (spec.head_size,) * 2, inputs)
    joined = (*q, *map(Part, others, widths[1:]))
    gate = MatrixPlan(gates, inputs)
    return found | {role + "qkv": MatrixPlan(joined, inputs), role + "attention_gate": gate}


def _latent_matrices(
    spec: ArchSpec, latent: LatentSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """Attention's projections, of which each head's keys and values have one of latents.

    These are products of a batch, one for each head, and stay floats: no operator has a batch of
    quantized ones. Of DeepSeek V3 they are 2 GB beside 350. Were those of keys in the queries'
    projection, as they could be, that would have three times as many weights.
    """
    heads, hidden = spec.num_heads, spec.hidden_size
    queries = heads * latent.query_size
    first, rank = (names.latent_q, queries), latent.query_rank
    found = {}
    if rank is not None:
        first = (names.latent_q_a, rank)
        found["q_b"] = stack_rows(prefix, (names.latent_q_b,), (queries,), rank, biased=False)
    parts = (first[0], names.latent_kv_a)
    found["qkv"] = stack_rows(prefix, parts, (first[1], latent.row_size), hidden, biased=False)
    ups = _latent_parts(heads, latent, names, prefix)
    found["k_up"] = MatrixPlan(ups[0], latent.kv_rank, is_exact=True, apart=True)
    found["v_up"] = MatrixPlan(ups[1], latent.kv_rank, is_exact=True, by_rows=True)
    return {role + name: one for name, one in found.items()}


def _latent_parts(
    heads: int, latent: LatentSpec, names: TensorNames, prefix: str
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Of each head what makes its keys, and what makes its values."""
    keys, values, rank = latent.nope_size, latent.value_size, latent.kv_rank
    if names.latent_apart is None:
        tensor = f"{prefix}{names.latent_kv_b}.weight"
        first, second = split_by_head(tensor, heads, (keys, values), rank)
        return first, second
    k, v = (f"{prefix}{name}.weight" for name in names.latent_apart)
    across, along = (heads, rank, keys), (heads, values, rank)
    return (
        tuple(Part(k, keys, head * keys, across, is_transposed=True) for head in range(heads)),
        tuple(Part(v, values, head * values, along) for head in range(heads)),
    )
