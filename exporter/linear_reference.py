"""Gated delta nets and state spaces in NumPy, float32: part of `exporter.reference`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.linear_nodes import LENGTH_EPSILON
from onnxport.graphs.linear_spec import LinearAttentionSpec, StateSpaceSpec

Array = NDArray[np.float32]


def convolve(x: Array, kernel: Array) -> Array:
    """Convolve each channel for itself, over a token and those before it.

    Args:
        x: [num_tokens, channels].
        kernel: [channels, tokens], the token's own last.

    Returns:
        [num_tokens, channels].
    """
    tokens, length = len(x), kernel.shape[-1]
    padded = np.concatenate([np.zeros((length - 1, x.shape[1]), np.float32), x])
    result: Array = sum(
        (padded[at : at + tokens] * kernel[:, at] for at in range(length)), np.zeros_like(x)
    )
    return result


def delta_net(linear: LinearAttentionSpec, qkv: Array, beta: Array, decay: Array) -> Array:
    """Query a state that each token changes (arXiv:2412.06464), beginning with zeros.

    The state S of a value head becomes g S, where each column may have a g of its own, and then
    S + beta (v - S k) k^T; S q comes of it.

    Args:
        linear: The sizes.
        qkv: Queries, keys and values, [num_tokens, channels].
        beta: How much of a value is new, from 0 to 1, or 2; [num_tokens, value_heads].
        decay: g, from 0 to 1; [num_tokens, decay_width].

    Returns:
        [num_tokens, value_heads, value_size].
    """
    edges = [linear.key_width, 2 * linear.key_width]
    q, k, v = np.split(qkv, edges, axis=-1)
    shared = linear.value_heads // linear.key_heads
    q, k = (
        np.repeat(_unit(part.reshape(len(part), linear.key_heads, -1)), shared, axis=1)
        for part in (q, k)
    )
    q = q * np.float32(linear.key_size**-0.5)
    v = v.reshape(len(v), linear.value_heads, -1)
    state = np.zeros(linear.recurrent_state, np.float32)
    result: Array = np.empty_like(v)
    for token in range(len(qkv)):
        key = k[token, :, :, None]  # of each head a column
        state *= decay[token].reshape(linear.value_heads, 1, -1)
        change = (v[token] - (state @ key)[..., 0]) * beta[token, :, None]
        state += change[..., None] * k[token, :, None]
        result[token] = (state @ q[token, :, :, None])[..., 0]
    return result


def state_space(
    space: StateSpaceSpec, values: Array, given: Array, taken: Array, decay: Array
) -> Array:
    """Take something of a state that each token adds to (arXiv:2405.21060), beginning with zeros.

    The state S of a head becomes g S + v b^T; S c comes of it.

    Args:
        space: The sizes.
        values: v, [num_tokens, heads, head_size].
        given: b of each group, [num_tokens, groups, state_size].
        taken: c, likewise.
        decay: g, from 0 to 1; [num_tokens, heads].

    Returns:
        [num_tokens, heads, head_size].
    """
    shared = space.heads // space.groups
    given, taken = (np.repeat(part, shared, axis=1) for part in (given, taken))
    state = np.zeros(space.recurrent_state, np.float32)
    result: Array = np.empty_like(values)
    for token in range(len(values)):
        state *= decay[token, :, None, None]
        state += values[token, ..., None] * given[token, :, None]
        result[token] = (state @ taken[token, ..., None])[..., 0]
    return result


def softplus(x: Array) -> Array:
    """`log(1 + exp(x))`, for large x, too."""
    result: Array = np.logaddexp(np.float32(0), x)
    return result


def _unit(x: Array) -> Array:
    """Vectors of length 1 along the last axis."""
    result: Array = x / np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(LENGTH_EPSILON))
    return result
