"""What of sampling depends on all of a row's logits: a temperature that moves, and Mirostat.

The temperature is the higher the less sure the model is: least + (most - least) * h ** exponent,
where h is the entropy of the row, before any temperature, as a share of what it could be, the
logarithm of the number of tokens that may come (kalomaze's dynamic temperature, 2023, and
llama.cpp's sampler `temp_ext`).

Mirostat keeps the surprise of tokens, -log2 of their probabilities, near a target (Basu et al.,
Mirostat, 2021; llama.cpp's samplers of that name). `mu` says how much a token may surprise; it
begins at twice the target and is corrected by each token. The first way estimates how fast
probabilities fall with the rank, by the likeliest tokens, and from that how many tokens to leave;
the second leaves the tokens that surprise by at most mu.
"""

from __future__ import annotations

import math

import numpy as np

from onnxport.graphs.noise import LEAST_TEMPERATURE
from onnxport.serving.drawing import LOWEST, REACH, RowParams
from onnxport.serving.edits import Floats
from onnxport.serving.params import SamplingParams
from onnxport.serving.topm import top_m

LIKELIEST = 100  # tokens that tell how fast probabilities fall


class Mirostat:
    """How much the next token of one sequence may surprise. Belongs to the engine's thread.

    It depends on what the tokens were drawn from, which is not computed twice: so it is kept with
    the sequence, whatever becomes of its K/V, and moves when a token is appended.
    """

    __slots__ = ("_eta", "_tau", "mu")

    def __init__(self, params: SamplingParams) -> None:
        """Begin before the first token."""
        self._tau, self._eta = params.mirostat_tau, params.mirostat_eta
        self.mu = 2.0 * self._tau

    def note(self, surprise: float) -> None:
        """Take how much a token surprised among those that it was drawn from, in bits."""
        self.mu -= self._eta * (surprise - self._tau)


def settled(values: Floats, row: RowParams) -> RowParams:
    """Return how a row is drawn from its logits, with nothing left that depends on them.

    Args:
        values: float32 [vocab], changed, -inf for what must not come; their maximum is finite.
        row: how it is sampled.
    """
    if row.adapting is None:
        return row
    fixed = row._replace(adapting=None)
    if row.adapting.mirostat == 1:
        return fixed._replace(top_k=_wanted(values, row))
    if row.adapting.mirostat == 2:
        scale = max(row.temperature, LEAST_TEMPERATURE)
        weights = np.exp((values.astype(np.float64) - float(values.max())) / scale)
        share = float(weights.sum()) * 2.0 ** min(-row.adapting.mu, 1000.0)
        if share > 1.0:
            return fixed._replace(top_k=1)
        return fixed._replace(min_p=max(share, float(np.finfo(np.float64).tiny)))
    least = row.adapting.least_temperature
    way = _spread(values) ** row.adapting.exponent
    return fixed._replace(temperature=least + (row.temperature - least) * way)


def surprise(values: Floats, row: RowParams, token_id: int) -> float:
    """Return how much a token surprises among those that Mirostat left, in bits.

    Args:
        values: float32 [vocab], as `settled` got them.
        row: what it returned.
        token_id: what was drawn by that.
    """
    scale = max(row.temperature, LEAST_TEMPERATURE)
    best = float(values.max())
    floor = max(best - REACH * scale, LOWEST)
    if row.min_p > 0.0:
        floor = max(floor, best + scale * math.log(row.min_p))
    left = values[values >= np.float32(floor)]
    if row.top_k is not None and row.top_k < len(left):
        [left], _ = top_m(left[None], row.top_k)
    weights = np.exp((left.astype(np.float64) - best) / scale)
    own = (float(values[token_id]) - best) / scale
    return (math.log(float(weights.sum())) - own) / math.log(2.0)


def _spread(values: Floats) -> float:
    """Return the entropy of a row as a share of that of as many tokens that are alike, [0, 1]."""
    finite = values[values > -np.inf].astype(np.float64)
    if len(finite) < 2:
        return 1.0
    below = finite - finite.max()
    weights = np.exp(below)
    total = float(weights.sum())
    reached = weights > 0.0
    entropy = math.log(total) - float(weights[reached] @ below[reached]) / total
    return min(1.0, max(0.0, entropy / math.log(len(finite))))


def _wanted(values: Floats, row: RowParams) -> int:
    """Return how many of the likeliest tokens surprise `mu` bits on average; at least 1."""
    assert row.adapting is not None
    vocab = len(values)
    [likeliest], _ = top_m(values[None], min(LIKELIEST, vocab))
    likeliest = likeliest[likeliest > -np.inf].astype(np.float64)
    if len(likeliest) < 2:
        return 1
    falls = -np.diff(likeliest) / max(row.temperature, LEAST_TEMPERATURE)
    numbers = np.arange(1, len(likeliest), dtype=np.float64)
    ranks = np.log((numbers + 1.0) / numbers)
    steepness = float(ranks @ falls) / float(ranks @ ranks)
    beyond, log_vocab = steepness - 1.0, math.log(vocab)
    ratio = 1.0 / log_vocab
    if abs(beyond) >= 1e-9:
        ratio = beyond / -math.expm1(-beyond * log_vocab)
    power = row.adapting.mu * math.log(2.0) + math.log(ratio)
    if steepness == 0.0:  # they are all alike
        return vocab if power > 0.0 else 1
    log_size = power / steepness
    return vocab if log_size >= log_vocab else max(1, int(math.exp(log_size)))
