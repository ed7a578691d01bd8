"""What log probabilities are of: the model's own logits, or what is left of them to draw from.

The kinds have vLLM's names. What is processed is made again here, in NumPy, for the rows that ask
for log probabilities and no others: the samplers never have it as a whole.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from onnxport.graphs.noise import LEAST_TEMPERATURE
from onnxport.serving.adapting import near_target, settled
from onnxport.serving.drawing import FIRST_NUCLEUS, thinned
from onnxport.serving.edits import Floats
from onnxport.serving.numpy_sampler import changed_row, only
from onnxport.serving.row_params import RowParams
from onnxport.serving.sampled import RowLogprobs
from onnxport.serving.topm import top_m

LOGITS: Final = ("raw_logits", "processed_logits")
PROCESSED: Final = ("processed_logprobs", "processed_logits")


def as_logits(row: RowLogprobs, logits: Floats) -> RowLogprobs:
    """Return a row's report with logits where it has log probabilities.

    Args:
        row: of the row.
        logits: float32 [vocab], of which it was made.
    """
    named = tuple(one._replace(logprob=float(logits[one.token_id])) for one in row.named)
    top = tuple(logits[list(row.top_ids)].tolist()) if row.top_ids else ()
    return row._replace(logprob=float(logits[row.token_id]), top_logprobs=top, named=named)


def processed(logits: Floats, row: RowParams, token_id: int) -> Floats:
    """Return the logits that a token is drawn from, float32 [vocab]; -inf where none is.

    They are changed and forbidden as the row's edits and mask say, divided by the temperature, and
    cut by `min_p`, `top_k`, `top_p`, Mirostat and the row's `thinning`. Of a row that is greedy by
    its temperature, 0, they are as they were before that, as in vLLM. Those of a row with a
    `target` are what adaptive-p makes of the probabilities of what is left.

    Args:
        logits: float32 [vocab], the model's own; not changed.
        row: how it was sampled.
        token_id: what came of that; it is left, however a border was rounded.
    """
    values = changed_row(logits, row)
    row = settled(values, row)
    if row.temperature == 0.0:
        return values
    if row.target is not None:
        return _near(values, row, token_id)
    if row.thinning is not None:
        ids, _ = thinned(values, row)
        values = only(values, np.append(ids, token_id))
    elif row.truncated:
        values = _cut(values, row, token_id)
    values /= np.float32(max(row.temperature, LEAST_TEMPERATURE))
    return values


def _near(values: Floats, row: RowParams, token_id: int) -> Floats:
    """Return the logits that a token is drawn from near the row's target; see `processed`."""
    ids, _, found = near_target(values, row)
    near = np.full(len(values), -np.inf, np.float32)
    near[token_id] = found.min()  # unless it is there
    near[ids] = found
    return near


def _cut(values: Floats, row: RowParams, token_id: int) -> Floats:
    """Return the values of the tokens that `min_p`, `top_k` and `top_p` leave; -inf for others.

    Each leaves some of the likeliest, of equals those of lower ids: see `drawing.draw`.

    Args:
        values: float32 [vocab], one of them finite.
        row: how it was sampled.
        token_id: what is left in any case, and all that is likelier.
    """
    size = len(values)
    if row.min_p > 0.0:
        floor = np.float32(float(values.max()) + row.temperature * math.log(row.min_p))
        size = int(np.count_nonzero(values >= floor))
    if row.top_k is not None:
        size = min(size, row.top_k)
    if row.top_p < 1.0:
        size = _nucleus_size(values, row, size)
    drawn = values[token_id]
    before = np.count_nonzero(values > drawn) + np.count_nonzero(values[:token_id] == drawn)
    _, [left] = top_m(values[None], max(size, int(before) + 1))
    return only(values, left)


def _nucleus_size(values: Floats, row: RowParams, size: int) -> int:
    """Return how many of the likeliest tokens have `top_p` of what the `size` likeliest weigh.

    Args:
        values: float32 [vocab].
        row: how it was sampled.
        size: how many are left before.
    """
    most, scale = values.max(), np.float32(1.0 / max(row.temperature, LEAST_TEMPERATURE))
    total = None
    if size == len(values):
        total = float(np.exp((values - most) * scale).sum(dtype=np.float64))
    looked_at = size if total is None else min(size, FIRST_NUCLEUS)
    while True:
        [ordered], _ = top_m(values[None], looked_at)
        sums = np.exp((ordered - most).astype(np.float64) * float(scale)).cumsum()
        wanted = row.top_p * (sums[-1] if total is None else total)
        if sums[-1] >= wanted or looked_at == size:
            return min(size, int(np.searchsorted(sums, wanted)) + 1)
        looked_at = min(size, 8 * looked_at)
