"""Activations in NumPy, float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.linear_reference import softplus
from onnxport.graphs.ops import GELU_CUBE, GELU_SCALE

Array = NDArray[np.float32]

_erf: Final = np.frompyfunc(math.erf, 1, 1)  # NumPy has none


def sigmoid(x: Array) -> Array:
    """`1 / (1 + exp(-x))`."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the limit, zero
        y: Array = np.reciprocal(1 + np.exp(-x))
    return y


def silu(x: Array) -> Array:
    """`x * sigmoid(x)`."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the limit, zero
        activated: Array = x / (1 + np.exp(-x))
    return activated


def xielu(x: Array, alpha_p: Array, alpha_n: Array, beta: Array, eps: Array) -> Array:
    """See `ops.xielu`; x of any shape, and numbers [1]."""
    bent = (np.expm1(np.minimum(x, eps)) - x) * (beta + softplus(alpha_n))
    activated: Array = np.where(x > 0, softplus(alpha_p) * x * x, bent) + beta * x
    return activated


def _gelu(x: Array) -> Array:
    """GELU as it is (arXiv:1606.08415)."""
    inner: Array = _erf(x * np.float32(math.sqrt(0.5))).astype(np.float32)
    return np.float32(0.5) * x * (1 + inner)


def _gelu_tanh(x: Array) -> Array:
    """GELU's approximation with tanh (arXiv:1606.08415)."""
    inner = np.float32(GELU_SCALE) * x * (1 + np.float32(GELU_CUBE) * x * x)
    activated: Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return activated


def _relu(x: Array) -> Array:
    positive: Array = np.maximum(x, np.float32(0))
    return positive


def _relu_squared(x: Array) -> Array:
    return np.square(_relu(x))


ACTIVATIONS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "silu": silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu_squared,
}
