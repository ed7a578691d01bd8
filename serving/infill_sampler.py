"""llama.cpp's sampler `infill`: what is left of the likeliest tokens to fill a gap with.

A filling should rather be short than wrong. So it ends where ends of the text are likely enough
together; tokens that begin alike count as one, the likeliest of them; and of these, those stay that
are likely enough. https://github.com/ggml-org/llama.cpp/blob/master/src/llama-sampler.cpp has the
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.serving.adapting import settled
from onnxport.serving.drawing import thinned
from onnxport.serving.edits import Floats, Ids, RowEdits
from onnxport.serving.numpy_sampler import changed_row
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import RowParams, Thinning
from onnxport.serving.tokenizer import Tokenizer

LEAST = 0.2  # probability of a token that stays
MOST = 128  # likeliest tokens that are looked at, for each may begin with each


@dataclass(frozen=True, slots=True, eq=False)
class InfillRule:
    """What the sampler knows of tokens.

    Attributes:
        ends: tokens that end the sequence.
        piece: returns the text of a token in bytes; of special ones none.
    """

    ends: frozenset[int]
    piece: Callable[[int], bytes]


def filled(logits: Floats, row: RowParams) -> RowParams:
    """Return how a row is drawn of which the sampler leaves tokens out: of the others alone.

    Args:
        logits: float32 [vocab], the model's own; not changed.
        row: how it is sampled, with all else that leaves tokens out, which comes before.
    """
    rule = row.infill
    row = row._replace(infill=None)
    if rule is None or row.greedy:
        return row
    values = changed_row(logits, row)
    if not np.isfinite(values.max()):
        return row
    row = settled(values, row)
    if row.greedy:
        return row
    count = MOST if row.top_k is None else min(row.top_k, MOST)
    ids, weights = thinned(values, row._replace(top_k=count, thinning=row.thinning or Thinning()))
    kept = left(ids, weights / weights.sum(), rule)
    if not len(kept):  # an end, whichever the model likes best; another token, where none may come
        ends = np.array(sorted(one for one in rule.ends if one < len(values)), np.int64)
        ends = ends[values[ends] > -np.inf]
        kept = ends[[values[ends].argmax()]] if len(ends) else ids[:1]
    edits = (row.edits or RowEdits())._replace(allowed=np.sort(kept), addresses=None)
    return RowParams(row.temperature, uniform=row.uniform, edits=edits)._replace(
        num_logprobs=row.num_logprobs, target=row.target
    )


def left(ids: Ids, chances: NDArray[np.float64], rule: InfillRule) -> Ids:
    """Return the tokens that stay, the likeliest first; none, if only an end should come.

    Args:
        ids: [num_tokens], the likeliest first.
        chances: their probabilities.
        rule: what is known of tokens.
    """
    ends = np.isin(ids, list(rule.ends))
    end_chance = float(chances[ends].sum())
    if 3.0 * end_chance * len(ids) > float(chances[~ends].sum()):
        return ids[ends]
    chances = _merged(ids, chances, ends, rule)
    stay = ends | (chances >= LEAST)
    num_texts = int(np.count_nonzero(stay & ~ends))
    if not num_texts:
        return ids[:0]
    share = chances / chances[stay].sum()
    found: Ids = ids[stay & (ends | (share >= 1.0 / (num_texts + 1)))]
    return found


def _merged(
    ids: Ids, chances: NDArray[np.float64], ends: NDArray[np.bool_], rule: InfillRule
) -> NDArray[np.float64]:
    """Return probabilities in which tokens that begin with the text of another one count as one.

    The likelier of two has both, and the other none; they are compared in llama.cpp's order.
    """
    merged = chances.copy()
    known = zip(ids.tolist(), ends.tolist(), strict=True)
    longer = _extensions([b"" if is_end else rule.piece(one) for one, is_end in known])
    gone: set[int] = set()
    for first in sorted(longer):
        for second in longer[first]:
            if first in gone:
                break
            if second in gone:
                continue
            to, of = first, second
            if merged[second] > merged[first]:
                to, of = second, first
            merged[to] += merged[of]
            merged[of] = 0.0
            gone.add(of)
    return merged


def infill_rule(
    params: SamplingParams, tokenizer: Tokenizer | None, end_ids: frozenset[int]
) -> InfillRule | None:
    """Return what a request's sampler knows of tokens; None: it does not ask for it.

    Args:
        params: of the request.
        tokenizer: of the model.
        end_ids: tokens that would end it; with `ignore_eos` its own stop tokens alone do.

    Raises:
        RequestError: there is no tokenizer to tell which tokens begin alike.
    """
    if not params.infill:
        return None
    if tokenizer is None:
        raise RequestError("infill needs a tokenizer and this engine has none", "infill")

    def piece(token_id: int) -> bytes:
        return b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)

    return InfillRule(frozenset(params.stop_token_ids) if params.ignore_eos else end_ids, piece)


def _extensions(pieces: Sequence[bytes]) -> dict[int, list[int]]:
    """Return for each place whose text others begin with the places of these, in order.

    Sorted, they stand right behind it. An empty text has none, and of equal ones the first has the
    others: one of two is gone by the time that it would be the other way around.
    """
    order = sorted((place for place, piece in enumerate(pieces) if piece), key=pieces.__getitem__)
    found: dict[int, list[int]] = {}
    for at, place in enumerate(order):
        for other in order[at + 1 :]:
            if not pieces[other].startswith(pieces[place]):
                break
            found.setdefault(place, []).append(other)
    return {place: sorted(others) for place, others in found.items()}
