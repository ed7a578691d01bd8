"""Drawing: from logits and a random number to a token.

The vocabulary is wide (152k) and most of it is never looked at twice: `min_p`, `top_k` and `top_p`
find the few likeliest tokens without sorting the rest; rows that are only tempered find theirs as
the one with the largest sum of its logit and a random number of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.noise import GROUP, LEAST_TEMPERATURE, Noise, per_unit
from onnxport.serving.edits import Floats, Ids
from onnxport.serving.row_params import RowParams
from onnxport.serving.topm import top_m

BLOCK_ELEMENTS = 1 << 18  # logits worked on at once: 1 MiB of float32, which stays in a CPU cache
RUN_ELEMENTS = 1 << 21  # logits of which the largest are sought at once: bounds what that allocates
FIRST_NUCLEUS = 64  # likeliest tokens among which a nucleus is first looked for
LOWEST = float(np.finfo(np.float32).min)
REACH = 87.0  # exp(-87) is about the least float32 above 0


def draw(logits: Floats, rows: Sequence[RowParams], numbers: Sequence[int]) -> Ids:
    """Draw a token for each of some rows.

    Args:
        logits: float32 [num_rows, vocab], with a finite maximum in each of these rows.
        rows: the parameters of each row.
        numbers: the rows, ascending; none is greedy.

    Returns:
        int64 [num_rows]; what is not of `numbers` is 0.
    """
    tokens = np.zeros(len(rows), np.int64)
    full = [row for row in numbers if not rows[row].truncated]
    for row in full:
        tokens[row] = _draw_full(logits[row], rows[row])
    by_limit: dict[int, list[int]] = {}
    for row in numbers:
        if rows[row].thinning is not None:
            tokens[row] = _draw_thinned(logits[row], rows[row])
        elif rows[row].truncated:
            by_limit.setdefault(_first_limit(rows[row], logits.shape[1]), []).append(row)
    for limit, few in by_limit.items():
        tokens[few] = _draw_truncated(logits, rows, few, limit)
    return tokens


def _first_limit(row: RowParams, vocab: int) -> int:
    """Return how many of the likeliest tokens to look at first; depends on nothing but the row."""
    wanted = max(FIRST_NUCLEUS, row.top_k or 0)
    return min(vocab, 1 << (wanted - 1).bit_length())


def _runs(rows: Sequence[int], longest: int) -> Iterator[tuple[int, slice]]:
    """Split ascending `rows` into runs of consecutive ones, whose logits are views, not copies.

    Yields:
        The place of a run in `rows`, and its slice of all rows; at most `longest` rows.
    """
    start = 0
    for end in range(1, len(rows) + 1):
        full = end - start == longest
        if full or end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield start, slice(rows[start], rows[end - 1] + 1)
            start = end


def _weights(logits: Floats, rows: Sequence[RowParams], out: Floats) -> Floats:
    """Return exp((logits - maximum) / temperature), float32 [num_rows, vocab], a part of `out`."""
    scale = np.array([per_unit(row.temperature) for row in rows], np.float32)
    weights = out[: len(rows)]
    np.subtract(logits, logits.max(axis=1, keepdims=True), out=weights)
    np.multiply(weights, scale[:, None], out=weights)
    np.exp(weights, out=weights)
    return weights


def _blocks(
    logits: Floats, rows: Sequence[RowParams], numbers: Sequence[int]
) -> Iterator[tuple[slice, Sequence[RowParams], Floats]]:
    """Yield the weights of some rows, some at a time: their places in `numbers`, and parameters.

    All are in the same memory, good until the next ones are taken: to get new memory from the
    system for every row costs more than the arithmetic.
    """
    vocab = logits.shape[1]
    size = max(1, min(len(numbers), BLOCK_ELEMENTS // vocab))
    memory = np.empty((size, vocab), np.float32)
    for place, run in _runs(numbers, size):
        yield (
            slice(place, place + run.stop - run.start),
            rows[run],
            _weights(logits[run], rows[run], memory),
        )


def _draw_full(logits: Floats, row: RowParams) -> int:
    """Draw from all tokens of one row, float32 [vocab], with a finite maximum: see `Noise`.

    Most groups of tokens have no sum that is large enough, by their largest logit and number.
    """
    noise = Noise(row.uniform, len(logits))
    padded = np.full(len(noise.most) * GROUP, -np.inf, np.float32)
    padded[: len(logits)] = logits
    scaled = padded.reshape(-1, GROUP).astype(np.float64) * per_unit(row.temperature)
    most = scaled.max(axis=1) + noise.most
    best = most.argmax(keepdims=True)
    least = (scaled[best] + noise.of(best)).max()
    likely = np.flatnonzero(most >= least)
    place = int((scaled[likely] + noise.of(likely)).argmax())
    return int(likely[place // GROUP]) * GROUP + place % GROUP


def _draw_thinned(logits: Floats, row: RowParams) -> int:
    """Draw from one row, float32 [vocab], of which its `thinning` leaves tokens out."""
    ids, weights = thinned(logits, row)
    sums = weights.cumsum()
    return int(ids[int((sums > row.uniform * sums[-1]).argmax())])


def thinned(
    logits: Floats, row: RowParams, reach: float = REACH
) -> tuple[Ids, NDArray[np.float64]]:
    """Return what is left of a row with a `thinning`: tokens, the likeliest first, and weights.

    Args:
        logits: float32 [vocab], its maximum finite.
        row: how it is sampled; not its edits and mask.
        reach: of others, the logarithm of what they weigh less than the likeliest.
    """
    assert row.thinning is not None
    deviations, typical_p, threshold = row.thinning
    maximum = logits.max(keepdims=True)
    nearly_nothing = max(float(maximum[0]) - reach * row.temperature, LOWEST)
    floor = max(float(_floors(maximum, [row])[0]), nearly_nothing)
    if deviations:
        finite = logits[logits > -np.inf].astype(np.float64)
        floor = max(floor, float(finite.max()) - deviations * float(finite.std()))
    size = min(row.top_k or len(logits), int(np.count_nonzero(logits >= np.float32(floor))))
    [values], [ids] = top_m(logits[None], size)
    scale = max(row.temperature, LEAST_TEMPERATURE)
    exponents = (values.astype(np.float64) - float(values[0])) / scale
    weights = np.exp(exponents)
    if typical_p < 1.0:
        kept = _typical(weights, exponents, typical_p)
        weights, ids = weights[kept], ids[kept]
    sums = weights.cumsum()
    if row.top_p < 1.0:
        weights = weights[: int(np.searchsorted(sums, row.top_p * sums[-1])) + 1]
    likely = int(np.count_nonzero(weights >= threshold * weights.sum()))
    first = max(0, likely - 1)
    return ids[first : len(weights)], weights[first:]


def _typical(
    weights: NDArray[np.float64], exponents: NDArray[np.float64], share: float
) -> NDArray[np.int64]:
    """Return the places, ascending, of the tokens whose surprise is nearest to its average.

    As many as have at least `share` of all weights (Meister et al., Locally Typical Sampling,
    2022). Surprises and exponents differ by a constant.

    Args:
        weights: [num_tokens], the largest first.
        exponents: their logarithms.
        share: in (0, 1].
    """
    average = float(weights @ exponents) / float(weights.sum())
    likelier = exponents > average
    places = np.arange(len(weights))
    inwards = np.where(likelier, -places, places)  # so that they lie side by side
    order = np.lexsort((inwards, ~likelier, np.abs(average - exponents)))
    sums = weights[order].cumsum()
    size = int(np.searchsorted(sums, share * sums[-1])) + 1
    found: NDArray[np.int64] = np.sort(order[:size])
    return found


def _draw_truncated(
    logits: Floats, rows: Sequence[RowParams], numbers: Sequence[int], limit: int
) -> Ids:
    """Draw from what `min_p`, `top_k` and `top_p` leave, for each of the rows `numbers`.

    Args:
        logits: float32 [num_rows, vocab].
        rows: the parameters of each row.
        numbers: the rows that are drawn, ascending.
        limit: how many of the likeliest tokens to look at first.
    """
    vocab = logits.shape[1]
    runs = _runs(numbers, max(1, RUN_ELEMENTS // vocab))
    found = [top_m(logits[run], limit) for _, run in runs]
    likeliest = (
        np.concatenate([values for values, _ in found]),
        np.concatenate([ids for _, ids in found]),
    )
    totals = np.full(len(numbers), np.nan)  # sum of all weights; NaN: of those that are looked at
    open_places = [
        place
        for place, number in enumerate(numbers)
        if rows[number].top_k is None and rows[number].min_p == 0.0
    ]
    if open_places:
        open_rows = [numbers[place] for place in open_places]
        sums = [weights.sum(axis=1) for _, _, weights in _blocks(logits, rows, open_rows)]
        totals[open_places] = np.concatenate(sums)
    tokens, enough = _draw_among(likeliest, [rows[number] for number in numbers], totals, vocab)
    for place in np.flatnonzero(~enough).tolist():
        one = slice(numbers[place], numbers[place] + 1)
        tokens[place] = _draw_wide(logits[one], rows[one], totals[place : place + 1])
    return tokens


def _draw_wide(logits: Floats, rows: Sequence[RowParams], totals: NDArray[np.float64]) -> int:
    """Draw a token of one row, of which more tokens are left than were looked at first."""
    vocab = logits.shape[1]
    if rows[0].min_p > 0.0:
        sizes = [int(np.count_nonzero(logits >= _floors(logits.max(axis=1), rows)))]
    else:
        [(_, _, weights)] = _blocks(logits, rows, [0])
        sizes = [_nucleus_size(weights[0], rows[0].top_p * totals[0]), vocab]  # by rounding
    for size in sizes:
        tokens, enough = _draw_among(top_m(logits, size), rows, totals, vocab)
        if enough[0]:
            break
    return int(tokens[0])


def _floors(maxima: Floats, rows: Sequence[RowParams]) -> Floats:
    """Return the least logit that `min_p` keeps, float32 [num_rows]; -inf keeps all.

    p >= min_p * p_max is logit >= maximum + temperature * log(min_p) (Nguyen et al., Min-p
    Sampling, 2024, with the softmax taken away on both sides).
    """
    floors = np.full(len(rows), -np.inf, np.float32)
    for index, row in enumerate(rows):
        if row.min_p > 0.0:
            floors[index] = float(maxima[index]) + row.temperature * math.log(row.min_p)
    return floors


def _nucleus_size(weights: Floats, wanted: float) -> int:
    """Return how many of the largest weights sum up to `wanted`, at most their whole sum.

    Args:
        weights: float32 [vocab].
        wanted: what they are to sum up to.
    """
    sums = np.sort(weights)[::-1].cumsum(dtype=np.float64)  # of bare floats: sorted by SIMD
    return min(int(np.searchsorted(sums, wanted)) + 1, len(weights))


def _draw_among(
    likeliest: tuple[Floats, Ids],
    rows: Sequence[RowParams],
    totals: NDArray[np.float64],
    vocab: int,
) -> tuple[Ids, NDArray[np.bool_]]:
    """Draw from the likeliest tokens.

    Args:
        likeliest: values and tokens, both [num_rows, limit], the likeliest first.
        rows: the parameters of each row.
        totals: float64 [num_rows]: sum of all weights; NaN: of those that are given.
        vocab: how many tokens there are.

    Returns:
        The tokens, and whether `limit` was enough for each row.
    """
    values, ids = likeliest
    limit = values.shape[1]
    scale = np.array([per_unit(row.temperature) for row in rows])
    weights = np.exp((values - values[:, :1]) * scale[:, None])  # float64 [rows, limit]
    top_k = np.array([limit if row.top_k is None else row.top_k for row in rows])
    passed = values >= _floors(values[:, 0], rows)[:, None]
    weights[(np.arange(limit) >= top_k[:, None]) | ~passed] = 0.0
    sums = weights.cumsum(axis=1)
    totals = np.where(np.isnan(totals), sums[:, -1], totals)
    wanted = np.array([row.top_p for row in rows]) * totals
    weights[sums - weights >= wanted[:, None]] = 0.0  # tokens after the sum has reached top_p
    kept = weights.cumsum(axis=1)
    # Without top_k more tokens than these may pass min_p, unless the last one did not.
    cut_off = np.array([row.top_k is None and row.min_p > 0.0 for row in rows]) & passed[:, -1]
    enough = ((sums[:, -1] >= wanted) & ~cut_off) | (limit == vocab)
    targets = np.array([row.uniform for row in rows]) * kept[:, -1]
    choice = (kept > targets[:, None]).argmax(axis=1)
    return ids[np.arange(len(rows)), choice], enough
