"""Sampling: one token a row of logits.

Rows are independent of each other: what a row yields depends on its logits, its parameters and
its own random number, never on what else is in the batch. The random number is a hash of the
request's seed and the position, so nothing has to be kept between steps, and a request that is
preempted, or moved to another row, goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxport.serving.drawing import RowParams, draw
from onnxport.serving.edits import Floats, Ids, edited
from onnxport.serving.topm import top_m

MASK_64 = (1 << 64) - 1


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
    elif any(row.mask is not None for row in rows):
        tokens, invalid = _draw_allowed(logits, rows)
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
        ids = _allowed_ids(row, logits.shape[1])
        if ids is None:
            free.append(index)
        else:
            narrow.setdefault(1 << len(ids).bit_length(), []).append((index, ids))
    if not narrow:
        return _draw(logits, rows)
    tokens = np.zeros(len(rows), np.int64)
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


def _allowed_ids(row: RowParams, vocab: int) -> Ids | None:
    """Return the tokens that both `allowed` and `mask` allow, ascending; None: all."""
    ids = None if row.edits is None else row.edits.allowed
    if row.mask is None:
        return ids
    if ids is not None:
        shifts = (ids % 32).astype(np.uint32)
        both: Ids = ids[(row.mask[ids // 32] >> shifts) & 1 == 1]
        return both
    bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")
    found: Ids = np.flatnonzero(bits[:vocab]).astype(np.int64)
    return found


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
    if random := [row for row in wanted if row not in invalid and not rows[row].greedy]:
        tokens[random] = draw(logits, rows, random)[random]
    return tokens, invalid


def row_logprobs(logits: Floats, token_id: int, count: int) -> RowLogprobs:
    """Return the log probability and rank of `token_id`, and of the `count` likeliest tokens.

    Args:
        logits: float32 [vocab], unscaled.
        token_id: the sampled token.
        count: how many of the likeliest tokens to report, 0 or more.
    """
    maximum = logits.max()
    weights = logits - maximum
    log_sum = float(maximum) + float(np.log(np.exp(weights, out=weights).sum()))
    value = logits[token_id]
    before = int(np.count_nonzero(logits > value))  # and, of equals, those of lower ids
    rank = before + int(np.count_nonzero(logits[:token_id] == value)) + 1
    top_ids: tuple[int, ...] = ()
    top_values: tuple[float, ...] = ()
    if count:
        values, ids = top_m(logits[None], min(count, logits.size))
        top_ids = tuple(ids[0].tolist())
        top_values = tuple((values[0].astype(np.float64) - log_sum).tolist())
    return RowLogprobs(token_id, float(value) - log_sum, rank, top_ids, top_values)
