"""How far logits may be from the reference, and when two tokens may change places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxport.cache_rows import INT4, INT8
from onnxport.providers.base import Capabilities


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far logits are from the reference."""

    max_diff: float  # largest absolute difference over the standard deviation of the reference
    max_kl: float  # largest Kullback-Leibler divergence of a row from the reference, in nats
    top1_agreement: float  # share of rows whose likeliest token is the reference's
    nearest_diff: float  # `max_diff` of the row that has the least


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far logits may be; a top token may differ only within `max_diff`."""

    name: str
    max_diff: float
    max_kl: float
    nearest_diff: float | None = None  # what the nearest row must come to; None: as all others

    def allows(self, found: Comparison) -> bool:
        """Whether all figures are within their limits; not-a-number is not."""
        nearest = self.max_diff if self.nearest_diff is None else self.nearest_diff
        within = found.max_diff <= self.max_diff and found.max_kl <= self.max_kl
        return within and found.nearest_diff <= nearest


# Measured on random models of 2 to 8 layers: 6e-5 and 4e-10 in float32; 0.6 and 0.05 with 8-bit
# activations, which are coarse on purpose. That limit catches what is broken, not what is inexact.
EXACT = Tolerance("float32 arithmetic", 2e-3, 1e-6)
HALF = Tolerance("16-bit arithmetic", 1e-1, 1e-2)
COARSE = Tolerance("8-bit activations", 1.5, 0.5)
COARSE_CACHE = Tolerance("8-bit KV cache", COARSE.max_diff, COARSE.max_kl)
# Which nobody gets unasked: `verify` tells what it costs, and this catches what is broken. On
# random models, whose attention is steep: 4.0 and 3.8.
COARSEST_CACHE = Tolerance("4-bit KV cache", 10.0, 10.0)
# What rounds what a router reads may give a token of a near tie to another expert, which is another
# product. Measured on random models: 0.33 and 0.06.
HALF_OF_EXPERTS = Tolerance("16-bit arithmetic, experts", 6e-1, 2e-1)
# As coarse, so few experts of random weights make one row another: 4.6 and 4.3 were measured, which
# NumPy gives, too, where it rounds as products do; and 0.4 with the experts of exact arithmetic.
# Others logits differ as much. But rounding moves a few tokens, and what is broken all: in each of
# the models that have such a row another one was within 0.4, and of others' logits none within 2.
COARSE_OF_EXPERTS = Tolerance("8-bit activations, experts", 6.0, 10.0, nearest_diff=1.0)


def choose_tolerance(capabilities: Capabilities, *, has_experts: bool) -> Tolerance:
    """Return how exact a provider has to be.

    Args:
        capabilities: the types it computes and caches in, and whether it rounds to int8.
        has_experts: whether the model gives tokens to some of several experts.
    """
    if capabilities.kv_cache_dtype == INT4:
        return COARSEST_CACHE
    if capabilities.int8_products:
        return COARSE_OF_EXPERTS if has_experts else COARSE
    if capabilities.kv_cache_dtype == INT8:
        return COARSE_CACHE
    types = {capabilities.compute_dtype, capabilities.kv_cache_dtype}
    if not types & {"float16", "bfloat16"}:
        return EXACT
    return HALF_OF_EXPERTS if has_experts else HALF


def compare(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> Comparison:
    """Compare logits, both [num_logits, vocab]."""
    if not np.isfinite(actual).all():
        return Comparison(math.inf, math.inf, 0.0, math.inf)
    reference, found = expected.astype(np.float64), actual.astype(np.float64)
    spread = float(reference.std()) or 1.0
    log_p, log_q = log_softmax(reference), log_softmax(found)
    divergences = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    agree = reference.argmax(axis=-1) == found.argmax(axis=-1)
    diffs = np.abs(reference - found).max(axis=-1) / spread
    return Comparison(
        max_diff=float(diffs.max()),
        max_kl=max(0.0, float(divergences.max())),
        top1_agreement=float(agree.mean()),
        nearest_diff=float(diffs.min()),
    )


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def measured_error(tolerance: Tolerance, *found: Comparison, has_experts: bool = False) -> float:
    """How far any logit may be from exact, in standard deviations, by what was measured.

    Never below what float32 arithmetic is allowed, for few rows were measured, and rounding grows
    with the length of the context; and never above what this arithmetic is allowed. With experts
    it is that, but in float32: rounding gives a token of a near tie to another expert, which moves
    logits many times as far, and so seldom that the few rows that were measured may show none.
    """
    if has_experts and tolerance is not EXACT:
        return tolerance.max_diff
    measured = max(EXACT.max_diff, *(one.max_diff for one in found))
    return min(tolerance.max_diff, measured)


def tie_limit(error: float, other_error: float) -> float:
    """How far below the likeliest a token may be that one of two runs has chosen.

    The token that a run chooses is, by exact logits, at most 2 * its error below any other. A
    model that computes the position again adds at most 2 * its own error to that.

    Args:
        error: of the model that is judged, in standard deviations; it computes again.
        other_error: of the run that it is compared with.
    """
    return 2 * max(error, other_error) + 2 * error


def gap(logits: NDArray[np.float32], tokens: tuple[int, int]) -> float:
    """How far the less likely of two tokens is below the likeliest, in standard deviations.

    Args:
        logits: float32 [vocab].
        tokens: that two runs chose.
    """
    values = logits.astype(np.float64)
    spread = float(values.std()) or 1.0
    return float(values.max() - values[list(tokens)].min()) / spread
