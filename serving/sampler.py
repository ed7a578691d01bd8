"""Sampling: one token a row of logits.

Rows are independent of each other: what a row yields depends on its logits, its parameters and
its own random number, never on what else is in the batch. The random number is a hash of the
request's seed and the position, so nothing has to be kept between steps, and a request that is
preempted, or moved to another row, goes on as if nothing had happened.

The vocabulary is wide (152k) and most of it is never looked at twice: greedy rows cost one
argmax; `min_p`, `top_k` and `top_p` find the few likeliest tokens without sorting the rest; rows
that are only tempered find their token by cumulative sums over chunks of the vocabulary; rows with
few allowed tokens are drawn among these alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.edits import Floats, Ids, RowEdits, edited
from onnxport.serving.topm import top_m

MASK_64 = (1 << 64) - 1
BLOCK_ELEMENTS = 1 << 18  # logits worked on at once: 1 MiB of float32, which stays in a CPU cache
FIRST_NUCLEUS = 64  # likeliest tokens among which a nucleus is first looked for
CHUNK = 256  # tokens summed up together


@dataclass(frozen=True, slots=True)
class RowParams:
    """How one row is sampled."""

    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None
    top_p: float = 1.0
    uniform: float = 0.0  # the row's random number, in [0, 1); unused when greedy
    num_logprobs: int | None = None  # None: no logprobs; n: the sampled token and the n likeliest
    min_p: float = 0.0
    edits: RowEdits | None = None  # what changes in the logits before a token is drawn


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of one row, by the model's own softmax."""

    token_id: int  # the sampled token
    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: tuple[int, ...]  # the likeliest tokens, the likeliest first
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled."""

    token_ids: list[int]  # one a row
    logprobs: list[RowLogprobs | None] | None  # one a row; None when no row asked
    invalid: tuple[int, ...]  # rows with NaN or no finite maximum, as changed; their token is void


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1), the same for the same seed and position.

    The output of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
    OOPSLA 2014) at `position`, in a stream that begins at the mixed seed.
    """
    state = _mix64(seed) + (position + 1) * 0x9E3779B97F4A7C15
    return (_mix64(state) >> 11) * 2.0**-53


def _mix64(value: int) -> int:
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def sample_greedy(logits: Floats) -> Sampled:
    """Return the likeliest token of each row; of equals the one with the lowest id.

    Args:
        logits: float32 [num_rows, vocab], not changed.
    """
    tokens = logits.argmax(axis=1)
    maxima = logits[np.arange(len(tokens)), tokens]  # argmax stops at the first NaN
    invalid = np.flatnonzero(~np.isfinite(maxima)) if not np.isfinite(maxima).all() else ()
    return Sampled(tokens.tolist(), None, tuple(int(row) for row in invalid))


def sample(logits: Floats, rows: Sequence[RowParams]) -> Sampled:
    """Sample one token a row.

    The changes come first, then temperature, `min_p`, `top_k` over what is left, and `top_p` over
    what is left then (as in vLLM). Of tokens with equal logits the lowest id counts as the
    likeliest. Log probabilities are of the logits as given.

    Args:
        logits: float32 [num_rows, vocab]; changed for the time of the call where rows ask for it.
        rows: the parameters of each row.
    """
    changes = [(index, row.edits) for index, row in enumerate(rows) if row.edits is not None]
    if changes:
        with edited(logits, changes) as changed:
            tokens, invalid = _draw_allowed(changed, rows)
    else:
        tokens, invalid = _draw(logits, rows)
    token_ids = tokens.tolist()
    logprobs: list[RowLogprobs | None] | None = None
    if any(row.num_logprobs is not None for row in rows):
        logprobs = [
            None if row.num_logprobs is None else row_logprobs(values, token, row.num_logprobs)
            for values, token, row in zip(logits, token_ids, rows, strict=True)
        ]
    return Sampled(token_ids, logprobs, tuple(sorted(invalid)))


def _draw_allowed(logits: Floats, rows: Sequence[RowParams]) -> tuple[Ids, set[int]]:
    """Draw a token a row, of the allowed ones where a row has such; see `_draw`.

    Rows of few allowed tokens are drawn from a narrow copy. Its width depends on the row alone, so
    that rounding is the same in any batch.
    """
    free: list[int] = []
    narrow: dict[int, list[tuple[int, Ids]]] = {}  # by width, a power of 2
    for index, row in enumerate(rows):
        if row.edits is None or row.edits.allowed is None:
            free.append(index)
        else:
            ids = row.edits.allowed
            narrow.setdefault(1 << len(ids).bit_length(), []).append((index, ids))
    if not narrow:
        return _draw(logits, rows)
    tokens = np.zeros(len(rows), np.int64)
    # Free rows are not copied: those drawn in vain are few, and their tokens are replaced below.
    invalid: set[int] = set()
    if free:
        tokens, invalid = _draw(logits, rows, free)
    for width, group in narrow.items():
        few = np.full((len(group), width), -np.inf, np.float32)
        for line, (index, ids) in enumerate(group):
            few[line, : len(ids)] = logits[index, ids]
        columns, failed = _draw(few, [rows[index] for index, _ in group])
        for line, (index, ids) in enumerate(group):
            tokens[index] = 0 if line in failed else ids[columns[line]]
        invalid |= {group[line][0] for line in failed}
    return tokens, invalid


def _draw(
    logits: Floats, rows: Sequence[RowParams], among: Sequence[int] | None = None
) -> tuple[Ids, set[int]]:
    """Draw a token a row.

    Args:
        logits: float32 [num_rows, vocab], not changed.
        rows: the parameters of each row.
        among: the rows that matter; None: all. The tokens of others are void.

    Returns:
        int64 [num_rows], and the rows that cannot be drawn from.
    """
    greedy = sample_greedy(logits)
    tokens = np.array(greedy.token_ids, np.int64)
    wanted = range(len(rows)) if among is None else among
    invalid = set(greedy.invalid) & set(wanted)
    valid = [row for row in wanted if row not in invalid]
    full = [r for r in valid if _is_random(rows[r]) and not _is_truncated(rows[r])]
    few = [r for r in valid if _is_random(rows[r]) and _is_truncated(rows[r])]
    for group, draw in ((full, _draw_full), (few, _draw_truncated)):
        for part in _parts(group, logits.shape[1]):
            tokens[part] = draw(logits[part], [rows[r] for r in part])
    return tokens, invalid


def row_logprobs(logits: Floats, token_id: int, count: int) -> RowLogprobs:
    """Return the log probability and rank of `token_id`, and of the `count` likeliest tokens.

    Args:
        logits: float32 [vocab], unscaled.
        token_id: the sampled token.
        count: how many of the likeliest tokens to report, 0 or more.
    """
    maximum = logits.max()
    log_sum = float(maximum) + float(np.log(np.exp(logits - maximum).sum()))
    value = logits[token_id]
    rank = int((logits > value).sum()) + int((logits[:token_id] == value).sum()) + 1
    top_ids: tuple[int, ...] = ()
    top_values: tuple[float, ...] = ()
    if count:
        values, ids = top_m(logits[None], min(count, logits.size))
        top_ids = tuple(ids[0].tolist())
        top_values = tuple((values[0].astype(np.float64) - log_sum).tolist())
    return RowLogprobs(token_id, float(value) - log_sum, rank, top_ids, top_values)


def _is_random(row: RowParams) -> bool:
    return row.temperature > 0.0 and row.top_k != 1


def _is_truncated(row: RowParams) -> bool:
    return row.top_k is not None or row.top_p < 1.0 or row.min_p > 0.0


def _parts(rows: list[int], vocab: int) -> list[list[int]]:
    """Split `rows` so that each part has about `BLOCK_ELEMENTS` logits."""
    size = max(1, BLOCK_ELEMENTS // vocab)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _weights(logits: Floats, rows: Sequence[RowParams]) -> Floats:
    """Return exp((logits - maximum) / temperature), float32 [num_rows, vocab]."""
    scale = np.array([1.0 / row.temperature for row in rows], np.float32)
    weights: Floats = logits - logits.max(axis=1, keepdims=True)
    np.multiply(weights, scale[:, None], out=weights)
    return np.exp(weights, out=weights)


def _draw_full(logits: Floats, rows: Sequence[RowParams]) -> NDArray[np.int64]:
    """Draw from the whole vocabulary: the token at which the cumulative sum passes the number.

    The chunk is found first, then the token inside it.
    """
    weights = _weights(logits, rows)
    vocab = weights.shape[1]
    sums = np.add.reduceat(weights, np.arange(0, vocab, CHUNK), axis=1)
    sums = np.cumsum(sums, axis=1, dtype=np.float64)
    targets = np.array([row.uniform for row in rows]) * sums[:, -1]
    chunks = (sums > targets[:, None]).argmax(axis=1)
    lines = np.arange(len(rows))
    targets -= np.where(chunks > 0, sums[lines, chunks - 1], 0.0)
    columns = chunks[:, None] * CHUNK + np.arange(CHUNK)
    inside = weights[lines[:, None], np.minimum(columns, vocab - 1)]
    inside[columns >= vocab] = 0.0
    sums = inside.cumsum(axis=1, dtype=np.float64)
    # Rounding may put the number just beyond the chunk: then its last possible token is meant.
    passed = sums > np.minimum(targets, np.nextafter(sums[:, -1], 0.0))[:, None]
    tokens: NDArray[np.int64] = columns[lines, passed.argmax(axis=1)]
    return tokens


def _draw_truncated(logits: Floats, rows: Sequence[RowParams]) -> NDArray[np.int64]:
    """Draw from the likeliest tokens that `min_p`, `top_k` and `top_p` leave."""
    vocab = logits.shape[1]
    floors = _floors(logits, rows)
    totals = np.full(len(rows), np.nan)  # sum of all weights; NaN: of the likeliest, as many as fit
    open_rows = [i for i, row in enumerate(rows) if row.top_k is None and row.min_p == 0.0]
    weights = _weights(logits[open_rows], [rows[index] for index in open_rows])
    totals[open_rows] = weights.sum(axis=1)
    limit = min(vocab, max([FIRST_NUCLEUS, *(row.top_k or 0 for row in rows)]))
    tokens, enough = _draw_among(logits, rows, totals, floors, limit)
    for index in np.flatnonzero(~enough).tolist():
        one = slice(index, index + 1)
        part = logits[one], rows[one], totals[one], floors[one]
        if rows[index].min_p > 0.0:
            size = int(np.count_nonzero(logits[index] >= floors[index]))
            tokens[one], _ = _draw_among(*part, size)
            continue
        wanted = rows[index].top_p * totals[index]
        size = _nucleus_size(weights[open_rows.index(index)], wanted)
        tokens[one], enough[one] = _draw_among(*part, size)
        if not enough[index]:  # by rounding
            tokens[one], _ = _draw_among(*part, vocab)
    return tokens


def _floors(logits: Floats, rows: Sequence[RowParams]) -> Floats:
    """Return the least logit that `min_p` keeps, float32 [num_rows]; -inf keeps all.

    p >= min_p * p_max is logit >= maximum + temperature * log(min_p) (Nguyen et al., Min-p
    Sampling, 2024, with the softmax taken away on both sides).
    """
    floors = np.full(len(rows), -np.inf, np.float32)
    for index, row in enumerate(rows):
        if row.min_p > 0.0:
            floors[index] = float(logits[index].max()) + row.temperature * math.log(row.min_p)
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
    logits: Floats,
    rows: Sequence[RowParams],
    totals: NDArray[np.float64],
    floors: Floats,
    limit: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw from the `limit` likeliest tokens.

    Returns:
        The tokens, and whether `limit` was enough for each row.
    """
    values, ids = top_m(logits, limit)
    scale = np.array([1.0 / row.temperature for row in rows])
    weights = np.exp((values - values[:, :1]) * scale[:, None])  # float64 [rows, limit]
    top_k = np.array([limit if row.top_k is None else row.top_k for row in rows])
    kept = values >= floors[:, None]
    weights[(np.arange(limit) >= top_k[:, None]) | ~kept] = 0.0
    sums = weights.cumsum(axis=1)
    cut_off = np.array([row.top_k is None and row.min_p > 0.0 for row in rows]) & kept[:, -1]
    totals = np.where(np.isnan(totals), sums[:, -1], totals)
    wanted = np.array([row.top_p for row in rows]) * totals
    weights[sums - weights >= wanted[:, None]] = 0.0  # tokens after the sum has reached top_p
    kept_sums = weights.cumsum(axis=1)
    enough = ((sums[:, -1] >= wanted) & ~cut_off) | (limit == logits.shape[1])
    targets = np.array([row.uniform for row in rows]) * kept_sums[:, -1]
    choice = (kept_sums > targets[:, None]).argmax(axis=1)
    return ids[np.arange(len(rows)), choice], enough
