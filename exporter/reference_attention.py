"""Attention in NumPy, float32, or a state in its place: part of `exporter.reference`."""

from __future__ import annotations

import numpy as np

from onnxport.exporter.activations import sigmoid, silu
from onnxport.exporter.linear_reference import convolve, delta_net, softplus, state_space
from onnxport.exporter.reference_parts import Array, WeightSource, rms_norm, softcap
from onnxport.exporter.rope import growth_factors
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec, ShortConvSpec, StateSpaceSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec


def attend(
    spec: ArchSpec,
    layer: int,
    weights: WeightSource,
    x: Array,
    tables: tuple[Array, Array] | None,
    kept: dict[int, tuple[Array, Array]],
) -> Array:
    """Causal self-attention; [num_tokens, hidden] to [num_tokens, attended_size].

    `kept` are keys and values of the layers before, and takes those of this one.
    Without `tables` nothing rotates.
    """
    if spec.latent is not None:
        heads = _of_latents(spec, spec.latent, layer, weights, x, tables)
    else:
        heads = _of_heads(spec, layer, weights, x, tables, kept)
    q, k, v = heads
    if spec.query_growth is not None and spec.grows(layer):
        q = q * growth_factors(spec.query_growth, np.arange(len(q)))[:, None, None]
    result = _mixed(spec, layer, weights, q, k, v)
    if spec.attention_gate:
        product = weights.linear(f"layers.{layer}.attention_gate", x)
        gates = softplus(product) if spec.softplus_gates else sigmoid(product)
        result *= np.repeat(gates, result.shape[1] // gates.shape[1], axis=-1)
    return result


def _of_heads(
    spec: ArchSpec,
    layer: int,
    weights: WeightSource,
    x: Array,
    tables: tuple[Array, Array] | None,
    kept: dict[int, tuple[Array, Array]],
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of all query heads, [num_tokens, num_heads, head_size] each."""
    tokens, size = len(x), spec.heads_of(layer).head_size
    qkv = weights.linear(f"layers.{layer}.qkv", x)
    if spec.qkv_bound is not None:
        qkv = np.clip(qkv, -spec.qkv_bound, spec.qkv_bound)
    edges = np.cumsum(spec.qkv_parts(layer))[:-1]
    whole = np.split(qkv, edges, axis=-1)
    sizes = (size, size, spec.value_size or size)
    heads = [part.reshape(tokens, -1, one) for part, one in zip(whole, sizes, strict=False)]
    if spec.qk_norm_last:
        assert tables is not None
        return _turned(spec, layer, weights, heads, tables)
    if len(heads) == 2:  # keys are values
        heads.append(heads[1])
    if spec.norms_heads(layer):
        for at, name in enumerate(("q_norm", "k_norm")[: len(whole)]):
            normed = whole[at] if spec.whole_qk_norm else heads[at]
            weight = _head_weight(spec, layer, weights, name)
            if spec.apart_qk_norm:
                normed = normed - normed.mean(-1, keepdims=True)
                weight = weight.reshape(-1, spec.head_size)
            normed = rms_norm(normed, weight, spec.inner_eps)
            heads[at] = normed.reshape(heads[at].shape)
    if tables is not None:
        embedding = spec.rope_of(layer)
        heads[:2] = [_rotate(one, tables, embedding) for one in heads[:2]]
    if len(heads) == 1:
        return _of_each_query(heads[0], *kept[spec.kv_source(layer)])
    q, k, v = heads
    if spec.value_norm:
        v = rms_norm(v, np.ones(size, np.float32), spec.inner_eps)
    kept[layer] = k, v
    return _of_each_query(q, k, v)


def _head_weight(spec: ArchSpec, layer: int, weights: WeightSource, name: str) -> Array:
    """The weight of a norm of heads."""
    if spec.unweighted_qk_norm:
        return np.ones(spec.head_size, np.float32)
    return weights.vector(f"layers.{layer}.{name}")


def _turned(
    spec: ArchSpec,
    layer: int,
    weights: WeightSource,
    heads: list[Array],
    tables: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """What `_of_heads` returns where RoPE is ahead of the norms."""
    q, k = (
        rms_norm(
            _rotate(part, tables, spec.rope),
            weights.vector(f"layers.{layer}.{name}"),
            spec.inner_eps,
        )
        for part, name in zip(heads[:2], ("q_norm", "k_norm"), strict=True)
    )
    return _of_each_query(q, k, heads[2])


def _of_each_query(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Keys and values for each query head, and these."""
    shared = q.shape[1] // k.shape[1]
    return q, np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)


def _of_latents(
    spec: ArchSpec,
    latent: LatentSpec,
    layer: int,
    weights: WeightSource,
    x: Array,
    tables: tuple[Array, Array] | None,
) -> tuple[Array, Array, Array]:
    """Likewise where keys and values are made of latents, which here they really are."""
    tokens, heads, role = len(x), spec.num_heads, f"layers.{layer}."
    width = latent.query_rank or heads * latent.query_size
    edges = [width, width + latent.kv_rank]
    queries, latents, turning = np.split(weights.linear(role + "qkv", x), edges, axis=-1)
    if latent.query_rank is not None:
        normed = rms_norm(queries, weights.vector(role + "q_latent_norm"), spec.inner_eps)
        queries = weights.linear(role + "q_b", normed)
    latents = rms_norm(latents, weights.vector(role + "latent_norm"), spec.inner_eps)
    keys, v = (
        weights.linear(role + name, latents).reshape(tokens, heads, -1) for name in ("k_up", "v_up")
    )
    embedding = spec.rope_of(layer)
    plain, turned = np.split(queries.reshape(tokens, heads, -1), [latent.nope_size], axis=-1)
    turning = turning[:, None]
    if tables is not None:
        turned, turning = (_rotate(one, tables, embedding) for one in (turned, turning))
    shared = np.repeat(turning, heads, axis=1)
    return np.concatenate([plain, turned], -1), np.concatenate([keys, shared], -1), v


def _mixed(
    spec: ArchSpec, layer: int, weights: WeightSource, q: Array, k: Array, v: Array
) -> Array:
    """Values by the softmax of what queries make of keys; [num_tokens, attended_size]."""
    tokens = len(q)
    scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(spec.scale_of(layer))
    scores = softcap(scores, spec.attention_softcap)
    positions = np.arange(tokens)
    distance, window = positions[:, None] - positions, spec.sliding_window[layer] or tokens
    visible = (distance >= 0) & (distance < window)
    if spec.chunked_windows:
        visible &= positions // window == positions[:, None] // window
    scores = np.where(visible, scores, -np.inf)
    if spec.has_sinks(layer):
        sinks = weights.vector(f"layers.{layer}.sinks")[:, None, None]
        scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:2], 1))], axis=-1)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    seen = scores[..., :tokens]
    result: Array = np.einsum("hqk,khd->qhd", seen, v).reshape(tokens, -1)
    return result


def attend_linearly(spec: ArchSpec, layer: int, weights: WeightSource, x: Array) -> Array:
    """A layer of a gated delta net; [num_tokens, hidden] to [num_tokens, value_width]."""
    if isinstance(spec.linear, ShortConvSpec):
        return _convolved(spec.linear, layer, weights, x)
    assert isinstance(spec.linear, LinearAttentionSpec)
    linear, role = spec.linear, f"layers.{layer}.linear."
    qkv = weights.linear(role + "qkv", x)
    beta, decay = np.split(weights.linear(role + "ba", x), [linear.value_heads], axis=-1)
    rate = -np.exp(weights.vector(role + "a_log").ravel())
    if linear.gate_rank is not None:
        decay = weights.linear(role + "decay", decay)
        rate = np.repeat(rate, linear.key_size)
    kernel = weights.vector(role + "conv").reshape(linear.channels, linear.kernel)
    decay = np.exp(rate * softplus(decay + weights.vector(role + "dt_bias")))
    part = sigmoid(beta) * np.float32(2 if linear.doubled_beta else 1)
    result = delta_net(linear, silu(convolve(qkv, kernel)), part, decay)
    epsilon = linear.norm_eps or spec.rms_norm_eps
    result = rms_norm(result, weights.vector(role + "norm"), epsilon)
    read = x if linear.gate_rank is None else weights.linear(role + "z_in", x)
    gate = weights.linear(role + "z", read)
    gate = silu(gate) if linear.gate_rank is None else sigmoid(gate)
    return result.reshape(gate.shape) * gate


def _convolved(conv: ShortConvSpec, layer: int, weights: WeightSource, x: Array) -> Array:
    """A layer that is a convolution; [num_tokens, hidden] to [num_tokens, channels]."""
    role = f"layers.{layer}.linear."
    before, behind, values = np.split(weights.linear(role + "in", x), 3, axis=-1)
    kernel = weights.vector(role + "conv").reshape(conv.channels, conv.kernel)
    result = convolve(before * values, kernel)
    if conv.bias:
        result += weights.vector(role + "conv_bias")
    return behind * result


def of_space(spec: ArchSpec, layer: int, weights: WeightSource, x: Array) -> Array:
    """A layer of a state space; [num_tokens, hidden] to [num_tokens, value_width]."""
    assert isinstance(spec.linear, StateSpaceSpec)
    space, role = spec.linear, f"layers.{layer}.linear."
    kernel = weights.vector(role + "conv").reshape(space.channels, space.kernel)
    mixed = convolve(weights.linear(role + "mixed", x), kernel)
    if space.conv_bias:
        mixed = mixed + weights.vector(role + "conv_bias")
    edges = [space.value_width, space.value_width + space.group_width]
    values, given, taken = (
        part.reshape(len(x), count, -1)
        for part, count in zip(
            np.split(silu(mixed), edges, axis=-1),
            (space.heads, space.groups, space.groups),
            strict=True,
        )
    )
    steps = softplus(weights.linear(role + "dt", x) + weights.vector(role + "dt_bias"))
    decay = np.exp(-np.exp(weights.vector(role + "a_log")) * steps)
    result = state_space(space, values * steps[..., None], given, taken, decay)
    result = result + values * weights.vector(role + "skip")[:, None]
    gated = result.reshape(len(x), -1) * silu(weights.linear(role + "z", x))
    if space.without_norm:
        return gated
    groups = gated.reshape(len(x), space.groups, -1)
    normed = rms_norm(groups, np.float32(1), spec.inner_eps)
    return normed.reshape(gated.shape) * weights.vector(role + "norm")


def _rotate(x: Array, tables: tuple[Array, Array], embedding: RopeSpec) -> Array:
    """RoPE on the leading channels of each head; x [num_tokens, heads, head_size]."""
    cos, sin = (table[:, None] for table in tables)  # one row for all heads
    half = embedding.rotary_dim // 2
    if embedding.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return rotated
