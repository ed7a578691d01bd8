"""What layers of the reference share, and whom they ask for weights: `exporter.reference`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.activations import ACTIVATIONS
from onnxport.exporter.plan import EMBEDDING
from onnxport.graphs.spec import ArchSpec

Array = NDArray[np.float32]


class WeightSource(Protocol):
    """Applies a model's weights by role; each is asked for once, in the order of execution."""

    def embed(self, token_ids: NDArray[np.int64], role: str = EMBEDDING) -> Array:
        """Rows of the embedding table, float32 [num_tokens, hidden_size], or of another one."""
        ...

    def vector(self, role: str) -> Array:
        """A norm's weight, float32 [size]."""
        ...

    def linear(self, role: str, x: Array) -> Array:
        """`x @ weight.T + bias`; float32 [rows, K] to [rows, N].

        Of each expert `experts.gate_up` gives gate's features, and then up's.
        """
        ...

    def sum_of_experts(self, role: str, x: Array, parts: Array) -> Array:
        """`x[:, e] @ weight[e].T + parts[:, e] * bias[e]`, added up over experts.

        Args:
            role: The weight's.
            x: [rows, experts, K], multiplied with the parts.
            parts: [rows, experts].

        Returns:
            [rows, N].
        """
        ...

    def head(self, x: Array) -> Array:
        """Logits, float32 [rows, hidden_size] to [rows, vocab]."""
        ...


def norm(spec: ArchSpec, weights: WeightSource, role: str, hidden: Array) -> Array:
    """The residual stream, normalized; [num_tokens, hidden]."""
    if spec.layer_norms:
        hidden = hidden - hidden.mean(-1, keepdims=True)
    normed = rms_norm(hidden, weights.vector(role), spec.rms_norm_eps)
    return normed + weights.vector(f"{role}_bias") if spec.norm_biases else normed


def normed_output(
    spec: ArchSpec, weights: WeightSource, layer: int, name: str, output: Array
) -> Array:
    """What attention or the feed-forward layer adds; [num_tokens, hidden]."""
    if not spec.norms_outputs(layer):
        return output
    return rms_norm(output, weights.vector(f"layers.{layer}.{name}_norm"), spec.inner_eps)


def of_told(spec: ArchSpec, layer: int, weights: WeightSource, hidden: Array, told: Array) -> Array:
    """What is added of what a layer is told of tokens, as the stream chooses."""
    role = f"layers.{layer}."
    gate = ACTIVATIONS[spec.hidden_act](weights.linear(role + "input_gate", hidden))
    added = weights.linear(role + "input_out", gate * told)
    return normed_output(spec, weights, layer, "input_out", added)


def softcap(x: Array, cap: float | None) -> Array:
    """`cap * tanh(x / cap)`, or x itself."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def rms_norm(x: Array, weight: Array | np.float32, epsilon: float) -> Array:
    """`x / sqrt(mean(x * x) + epsilon) * weight`, over the last axis."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return normed
