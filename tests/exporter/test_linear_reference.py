"""Gated delta nets in NumPy are transformers', for long sequences and all ratios of heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as peer

from onnxport.exporter.linear_reference import convolve, delta_net, softplus
from onnxport.graphs.linear_spec import LinearAttentionSpec

TOKENS = 150  # more than two chunks of transformers'


def sizes(key_heads: int, value_heads: int, key_size: int, value_size: int) -> LinearAttentionSpec:
    return LinearAttentionSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=key_size,
        value_size=value_size,
        kernel=4,
        layers=(True, False),
    )


@pytest.mark.parametrize(
    "linear", [sizes(1, 1, 8, 8), sizes(2, 2, 8, 24), sizes(1, 3, 16, 8), sizes(3, 6, 32, 32)]
)
def test_the_delta_rule(linear: LinearAttentionSpec) -> None:
    random = np.random.default_rng(0)
    qkv = random.standard_normal((TOKENS, linear.channels)).astype(np.float32)
    gates = random.uniform(0.0, 1.0, (2, TOKENS, linear.value_heads)).astype(np.float32)
    decay = 1 - 0.05 * gates[1]  # so that the first tokens are remembered
    found = delta_net(linear, qkv, gates[0], decay)
    edges = [linear.key_width, 2 * linear.key_width]
    heads = (linear.key_heads, linear.key_heads, linear.value_heads)
    q, k, v = (
        torch.from_numpy(part.reshape(1, TOKENS, count, -1))
        for part, count in zip(np.split(qkv, edges, axis=-1), heads, strict=True)
    )
    beta, log_decay = torch.from_numpy(gates[0])[None], torch.from_numpy(np.log(decay))[None]
    for rule in (peer.torch_chunk_gated_delta_rule, peer.torch_recurrent_gated_delta_rule):
        expected, _ = rule(q, k, v, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True)
        np.testing.assert_allclose(found, expected[0].numpy(), atol=2e-5)


def test_queries_and_keys_of_zeros() -> None:
    linear = sizes(1, 1, 8, 8)
    zeros = np.zeros((3, linear.channels), np.float32)
    ones = np.ones((3, 1), np.float32)
    assert not delta_net(linear, zeros, ones, ones).any()


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("length", [2, 4])
def test_the_convolution(tokens: int, length: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((tokens, 6)).astype(np.float32)
    kernel = random.standard_normal((6, length)).astype(np.float32)
    expected = peer.causal_conv1d_fn(torch.from_numpy(x.T[None].copy()), torch.from_numpy(kernel))
    np.testing.assert_allclose(convolve(x, kernel), expected[0].numpy().T, atol=1e-6)


def test_softplus_does_not_overflow() -> None:
    found = softplus(np.array([-200.0, 0.0, 1.0, 200.0], np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0.0, np.log(2), np.log1p(np.e), 200.0], rtol=1e-6)
