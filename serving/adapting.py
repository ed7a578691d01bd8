"""What of sampling depends on all of a row's logits: a moving temperature, Mirostat, adaptive-p.

The temperature is the higher the less sure the model is: least + (most - least) * h ** exponent,
where h is the entropy of the row, before any temperature, as a share of what it could be, the
logarithm of the number of tokens that may come (kalomaze's dynamic temperature, 2023, and
llama.cpp's sampler `temp_ext`).

Mirostat keeps the surprise of tokens, -log2 of their probabilities, near a target (Basu et al.,
Mirostat, 2021; llama.cpp's samplers of that name). `mu` says how much a token may surprise; it
begins at twice the target and is corrected by each token. The first way estimates how fast
probabilities fall with the rank, by the likeliest tokens, and from that how many tokens to leave;
the second leaves the tokens that surprise by at most mu.

Adaptive-p draws, of what all else leaves, tokens whose probability is near a target (MrJackSpade's
and ddh0's sampler of llama.cpp, `adaptive_p`, 2025). What is near is lifted, by a bell around the
target, and the rest falls off, whatever its own probability was. The target moves: where the
tokens before were likelier than wanted, on a weighted average, it is as much lower.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.noise import LEAST_TEMPERATURE
from onnxport.serving.drawing import LOWEST, REACH, thinned
from onnxport.serving.edits import Floats, Ids
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import RowParams, Thinning
from onnxport.serving.topm import top_m

LIKELIEST = 100  # tokens that tell how fast probabilities fall
PEAK, SHARPNESS, WIDTH = 5.0, 10.0, 0.3  # of adaptive-p's bell, as in llama.cpp


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

    def applied(self, row: RowParams) -> RowParams:
        """Return how the next token is drawn."""
        assert row.adapting is not None
        return row._replace(adapting=row.adapting._replace(mu=self.mu))


class AdaptiveP:
    """How probable the next token of one sequence is to be. Kept as `Mirostat` is."""

    __slots__ = ("_decay", "_sum", "_total", "_wanted")

    def __init__(self, params: SamplingParams) -> None:
        """Begin before the first token, as if all before had been as probable as wanted."""
        assert params.adaptive_target is not None
        self._wanted, self._decay = params.adaptive_target, params.adaptive_decay
        self._total = 1.0 / (1.0 - self._decay)
        self._sum = self._wanted * self._total

    @property
    def target(self) -> float:
        """The probability near which the next token is drawn, [0, 1]."""
        return min(1.0, max(0.0, 2.0 * self._wanted - self._sum / self._total))

    def note(self, surprise: float) -> None:
        """Take how much a token surprised among those that all else left, in bits."""
        self._sum = 2.0**-surprise + self._decay * self._sum
        self._total = 1.0 + self._decay * self._total

    def applied(self, row: RowParams) -> RowParams:
        """Return how the next token is drawn."""
        return row._replace(target=self.target)


Feedback = Mirostat | AdaptiveP  # what tokens that were drawn say of how the next one is


def feedback(params: SamplingParams) -> Feedback | None:
    """Return what a sequence begins with; None: each of its tokens is drawn by itself."""
    if params.greedy:
        return None
    if params.mirostat:
        return Mirostat(params)
    return None if params.adaptive_target is None else AdaptiveP(params)


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


def near_target(
    values: Floats, row: RowParams
) -> tuple[Ids, NDArray[np.float64], NDArray[np.float64]]:
    """Return what is left of a row to draw from by adaptive-p.

    Args:
        values: float32 [vocab], as `settled` got them.
        row: what it returned, with a `target`.

    Returns:
        Tokens, the likeliest first, their probabilities, and the logits that they are drawn by.
    """
    assert row.target is not None
    # What weighs nothing counts, too: it is as far from the target as any unlikely token.
    ids, _ = thinned(values, row._replace(thinning=row.thinning or Thinning()), reach=math.inf)
    # Weighed by themselves: they may weigh nothing beside a token that was left out.
    left = values[ids].astype(np.float64)
    weights = np.exp((left - left.max()) / max(row.temperature, LEAST_TEMPERATURE))
    chances = weights / weights.sum()
    distance = np.abs(chances - row.target) / WIDTH
    return ids, chances, PEAK - SHARPNESS * distance * distance / (1.0 + distance)


def drawn_near(values: Floats, row: RowParams) -> tuple[int, float]:
    """Draw by adaptive-p.

    Args:
        values: float32 [vocab], as `settled` got them.
        row: what it returned, with a `target`.

    Returns:
        The token, and how much it surprises among those that all else left, in bits.
    """
    if row.greedy:
        return int(values.argmax()), 0.0
    ids, chances, logits = near_target(values, row)
    order = ids.argsort()
    sums = np.exp(logits[order] - logits.max()).cumsum()
    place = order[int((sums > row.uniform * sums[-1]).argmax())]
    chance = float(chances[place])
    return int(ids[place]), -math.log2(chance) if chance > 0.0 else math.inf


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
