"""Sampling in NumPy, where the library was not built, and what that one is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxport.serving.adapting import drawn_near, settled, surprise
from onnxport.serving.drawing import draw
from onnxport.serving.edits import Floats, Ids, RowEdits, edited
from onnxport.serving.row_params import RowParams
from onnxport.serving.sampled import RowLogprobs, Sampled
from onnxport.serving.topm import top_m


def sample_greedy(logits: Floats) -> Sampled:
    """See `sampler.sample_greedy`."""
    tokens = logits.argmax(axis=1).tolist()
    # Of few rows each is looked at by itself in less time. argmax stops at the first NaN.
    maxima = map(logits.item, range(len(tokens)), tokens)
    invalid = tuple(row for row, value in enumerate(maxima) if not math.isfinite(value))
    return Sampled(tokens, None, invalid)


def sample(logits: Floats, rows: Sequence[RowParams]) -> Sampled:
    """See `sampler.sample`."""
    if any(row.adapting is not None or row.target is not None for row in rows):
        return _sample_adapting(logits, rows)
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
        logprobs = [None] * len(rows)
        for index, row in enumerate(rows):
            if row.num_logprobs is None or index in invalid:
                continue
            try:
                logprobs[index] = row_logprobs(logits[index], token_ids[index], row.num_logprobs)
            except FloatingPointError:
                invalid.add(index)
    return Sampled(token_ids, logprobs, tuple(sorted(invalid)))


def _sample_adapting(logits: Floats, rows: Sequence[RowParams]) -> Sampled:
    """See `sampler.sample`; some rows are drawn as their logits say."""
    fixed = list(rows)
    changed: dict[int, Floats] = {}
    surprises = [0.0] * len(rows)
    for index, row in enumerate(rows):
        if row.adapting is None and row.target is None:
            continue
        values = changed_row(logits[index], row)
        fixed[index] = row._replace(adapting=None, target=None)
        if not np.isfinite(values.max()):
            continue
        fixed[index] = settled(values, row)
        if row.target is not None:
            token_id, surprises[index] = drawn_near(values, fixed[index])
            only_it = RowEdits(allowed=np.array([token_id], np.int64))
            fixed[index] = RowParams(num_logprobs=row.num_logprobs, edits=only_it)
        elif row.adapting is not None and row.adapting.mirostat:
            changed[index] = values
    sampled = sample(logits, fixed)
    for index, values in changed.items():
        surprises[index] = surprise(values, fixed[index], sampled.token_ids[index])
    return replace(sampled, surprises=surprises if any(row.has_surprise for row in rows) else None)


def changed_row(logits: Floats, row: RowParams) -> Floats:
    """Return a copy of one row with its edits, float32 [vocab]; what must not come is -inf."""
    if row.edits is None:
        values = logits.copy()
    else:
        with edited(logits[None].copy(), [(0, row.edits)]) as changed:
            values = changed[0].copy()
    ids = allowed_ids(row, len(logits))
    return values if ids is None else only(values, ids)


def only(values: Floats, ids: Ids) -> Floats:
    """Return the values of some tokens; -inf for others."""
    kept = np.full(len(values), -np.inf, np.float32)
    kept[ids] = values[ids]
    return kept


def _draw_allowed(logits: Floats, rows: Sequence[RowParams]) -> tuple[Ids, set[int]]:
    """Draw a token a row, of the allowed ones where a row has such; see `_draw`.

    Rows of few allowed tokens are drawn from a narrow copy. Its width depends on the row alone, so
    that rounding is the same in any batch.
    """
    tokens = np.zeros(len(rows), np.int64)
    invalid: set[int] = set()
    free: list[int] = []
    narrow: dict[int, list[tuple[int, Ids]]] = {}  # by width, a power of 2
    for index, row in enumerate(rows):
        ids = allowed_ids(row, logits.shape[1])
        if ids is None:
            free.append(index)
        elif not row.truncated and not row.greedy:  # random numbers are of tokens, not of places
            own = np.full((1, logits.shape[1]), -np.inf, np.float32)
            own[0, ids] = logits[index, ids]
            [tokens[index]], failed = _draw(own, [row])
            invalid |= {index for _ in failed}
        else:
            narrow.setdefault(1 << len(ids).bit_length(), []).append((index, ids))
    if free:
        found, failed = _draw(logits, rows, free)
        tokens[free] = found[free]
        invalid |= failed
    for width, group in narrow.items():
        few = np.full((len(group), width), -np.inf, np.float32)
        for line, (index, ids) in enumerate(group):
            few[line, : len(ids)] = logits[index, ids]
        columns, failed = _draw(few, [rows[index] for index, _ in group])
        for line, (index, ids) in enumerate(group):
            tokens[index] = 0 if line in failed else ids[columns[line]]
        invalid |= {group[line][0] for line in failed}
    return tokens, invalid


def allowed_ids(row: RowParams, vocab: int) -> Ids | None:
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


def logprobs(logits: Floats, token_ids: Sequence[int], counts: Sequence[int]) -> list[RowLogprobs]:
    """See `sampler.logprobs`."""
    rows = zip(logits, token_ids, counts, strict=True)
    return [row_logprobs(row, token_id, count) for row, token_id, count in rows]


def row_logprobs(logits: Floats, token_id: int, count: int) -> RowLogprobs:
    """Return the log probabilities of one row, float32 [vocab]; see `sampler.logprobs`."""
    maximum = logits.max()
    if not np.isfinite(maximum):
        raise FloatingPointError("the model's logits are not finite numbers")
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
