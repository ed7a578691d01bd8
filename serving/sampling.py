"""Sampling a step: from requests and logits to tokens, and what to do if that fails.

A token is drawn after each token that logits were computed for. Where a draft was computed, its
tokens are taken to follow the request's own, one after the other, for as long as each equals what
is drawn in its place; the token drawn after the last of them is one more. What is drawn at a
position depends on the logits there, the request and the position, and not on the draft. So a
request gets the tokens that it would have got one by one: the likeliest, or random ones with the
model's own distribution. For a draft that leaves nothing to chance, accepting a token that equals
the one drawn is rejection sampling (Leviathan et al., Fast Inference from Transformers via
Speculative Decoding, 2023): it happens with the token's probability, and what is drawn otherwise is
distributed as the rest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.grammar import failure_of
from onnxport.serving.infill_sampler import filled
from onnxport.serving.logprob_modes import LOGITS, PROCESSED, as_logits, processed
from onnxport.serving.named_logprobs import with_named
from onnxport.serving.outputs import Failure, Logprob, TokenLogprobs
from onnxport.serving.request import Request
from onnxport.serving.row_params import NOTHING_LEFT_OUT, RowParams, Thinning
from onnxport.serving.sampler import (
    RowLogprobs,
    Sampled,
    logprobs,
    sample,
    sample_greedy,
    uniform,
)
from onnxport.serving.step_plan import StepPlan

logger = logging.getLogger(__name__)
XTC_STREAM = 0x5851F42D4C957F2D  # makes of a request's seed that of other random numbers

Mask = NDArray[np.uint32]
Masks = Mapping[Request, Mask | Failure]  # what a grammar allows, or why it cannot say
Naming = Callable[[int], str]
NOT_FINITE = Failure("the model's logits are not finite numbers")
NOT_FINITE_STATES = Failure("what the model makes of the prompt are not finite numbers")
NOTHING_LEFT = (
    "no token is left to draw: {} forbid all of them; allow more"  # names what the request has
)


class Drawn(NamedTuple):
    """What one sequence got in a step."""

    request: Request
    token_ids: tuple[int, ...]  # the accepted ones of its draft, and the one after them
    logprobs: tuple[RowLogprobs, ...] | None = None  # one a token; None: not asked for
    failure: Failure | None = None  # why there is no token after `token_ids`
    surprise: float | None = None  # of its one token, for its `feedback`; None: it has none


class Position(NamedTuple):
    """One token to draw."""

    request: Request
    assumed: tuple[int, ...] = ()  # tokens of a draft that are taken to follow the request's own
    mask: Mask | None = None  # uint32 [ceil(vocab / 32)]; None: all tokens


def with_siblings(request: Request) -> tuple[Request, ...]:
    """Return a sequence and those that wait to fork from it."""
    return (request, *request.siblings)


def row_params(position: Position) -> RowParams:
    """Return how to draw a token."""
    request, assumed, mask = position
    row, tokens, rules = request.row, request.tokens, request.rules
    number = 0.0 if row.greedy else uniform(request.seed, len(tokens) + len(assumed))
    edits = None if rules is None else rules.edits(tokens, assumed)
    temperature, top_k, top_p, _, num_logprobs, min_p, _, _, thinning, adapting, infill, _ = row
    if thinning is not None and request.params.xtc_probability > 0.0:
        thinning = _with_chance(thinning, request, len(tokens) + len(assumed))
    choice = (temperature, top_k, top_p, number, num_logprobs, min_p)
    row = RowParams(*choice, edits, mask, thinning, adapting, infill)
    if request.feedback is None:
        return row
    assert not assumed  # nobody guesses ahead: what a guess would change is not known
    return request.feedback.applied(row)


def _with_chance(thinning: Thinning, request: Request, position: int) -> Thinning | None:
    """Return what is left out at a position: by chance what XTC would leave out."""
    if uniform(request.seed ^ XTC_STREAM, position) < request.params.xtc_probability:
        return thinning
    thinning = thinning._replace(xtc_threshold=NOTHING_LEFT_OUT)
    return None if thinning == Thinning() else thinning


def sample_step(
    plan: StepPlan,
    logits: NDArray[np.float32],
    masks: Masks,
    num_threads: int | None = None,
    summaries: NDArray[np.float32] | None = None,
    allowed: NDArray[np.int32] | None = None,
) -> list[Drawn]:
    """Draw the tokens of all sequences that reached their last one, but for beams.

    Args:
        plan: of the step.
        logits: float32 [sum(plan.num_logits), vocab]; as it was at the end.
        masks: of the sequences that have a grammar, uint32 [1 + drafted, ceil(vocab / 32)].
        num_threads: most that sample at once; None: as many as there are physical cores.
        summaries: what the model told of the logits, see `sampler.sample`.
        allowed: the masks as the model knows them, `narrowing.narrowed`.
    """
    likeliest = _likeliest(plan, logits, num_threads, summaries, allowed)
    if likeliest is not None:
        return likeliest
    drawn: list[Drawn] = []
    positions: list[Position] = []
    lines: list[int] = []  # of logits, one a position
    drafts: list[tuple[int, ...]] = []  # of the sequences that are sampled, in order
    ends = list(accumulate(plan.num_logits)) if plan.sampled else []
    for row in plan.sampled:
        if plan.requests[row].beams is not None:  # from which nothing is drawn
            continue
        draft = plan.drafts.get(row, ())
        first = ends[row] - 1 - len(draft)
        for request in with_siblings(plan.requests[row]):
            mask = masks.get(request) if request.grammar is not None else None
            if isinstance(mask, Failure):
                drawn.append(Drawn(request, (), None, mask))
                continue
            drafts.append(draft)
            for number in range(len(draft) + 1):
                allowed = None if mask is None else mask[number]
                positions.append(Position(request, draft[:number], allowed))
                lines.append(first + number)
    if not positions:
        return drawn
    if lines != list(range(len(logits))):
        logits = logits[lines]
        summaries = None if summaries is None else summaries[lines]
    sampled, failed = _sample(positions, logits, num_threads, summaries)
    return drawn + _accept(positions, drafts, sampled, failed)


def _likeliest(
    plan: StepPlan,
    logits: NDArray[np.float32],
    num_threads: int | None,
    summaries: NDArray[np.float32] | None,
    allowed: NDArray[np.int32] | None,
) -> list[Drawn] | None:
    """Draw the likeliest token of every row, if that is all that is asked; None if it is not.

    Also None if it fails: row by row it is found out whose fault that is.
    """
    requests = plan.requests
    if len(plan.sampled) != len(requests) or len(logits) != len(requests) or plan.drafts:
        return None
    if not all(one.plain and not one.siblings for one in requests):
        if allowed is None or not all(one.likeliest and not one.siblings for one in requests):
            return None
    else:
        allowed = None
    try:
        sampled = sample_greedy(logits, num_threads, summaries, allowed)
    except Exception:
        return None
    if sampled.invalid:
        return None
    rows = zip(requests, sampled.token_ids, strict=True)
    return [Drawn(request, (token_id,)) for request, token_id in rows]


def _accept(
    positions: Sequence[Position],
    drafts: Sequence[tuple[int, ...]],
    sampled: Sampled,
    failed: Mapping[int, Failure],
) -> list[Drawn]:
    """Keep of each sequence's tokens those up to the first that its draft did not guess."""
    drawn: list[Drawn] = []
    tokens = sampled.token_ids
    first = 0
    for draft in drafts:
        request, last = positions[first].request, first
        for guess in draft:
            if last in failed or tokens[last] != guess:
                break
            last += 1
        stop = last if last in failed else last + 1
        entries = None
        if sampled.logprobs is not None and request.row.num_logprobs is not None:
            entries = tuple(one for one in sampled.logprobs[first:stop] if one is not None)
        surprise = None
        if request.feedback is not None and sampled.surprises is not None and last not in failed:
            surprise = sampled.surprises[first]
        own = tuple(tokens[first:stop])
        drawn.append(Drawn(request, own, entries, failed.get(last), surprise))
        first += len(draft) + 1
    return drawn


def _sample(
    positions: Sequence[Position],
    logits: NDArray[np.float32],
    num_threads: int | None,
    summaries: NDArray[np.float32] | None,
) -> tuple[Sampled, dict[int, Failure]]:
    """Draw a token for each position.

    Returns:
        The tokens, and by number why some positions have none.
    """
    try:
        sampled = sample_positions(positions, logits, num_threads, summaries)
    except Exception as error:
        logger.error("sampling failed; its rows are tried one by one", exc_info=error)
        return _sample_one_by_one(positions, logits, num_threads)
    return sampled, _failures(positions, logits, sampled)


def sample_positions(
    positions: Sequence[Position],
    logits: NDArray[np.float32],
    num_threads: int | None = None,
    summaries: NDArray[np.float32] | None = None,
) -> Sampled:
    """Draw a token for each position.

    Args:
        positions: in the order of the rows.
        logits: float32 [num_positions, vocab]; as it was at the end.
        num_threads: see `sample_step`.
        summaries: likewise.
    """
    if all(one.request.plain for one in positions):
        return sample_greedy(logits, num_threads, summaries)
    rows = [row_params(one) for one in positions]
    if any(row.infill is not None for row in rows):
        pairs = zip(logits, rows, strict=True)
        rows = [row if row.infill is None else filled(own, row) for own, row in pairs]
    if all(row.num_logprobs is None for row in rows):
        return sample(logits, rows, num_threads, summaries)
    drawn = [
        row._replace(num_logprobs=None) if one.request.logprobs_mode in PROCESSED else row
        for one, row in zip(positions, rows, strict=True)
    ]
    sampled = sample(logits, drawn, num_threads, summaries)
    found = sampled.logprobs or [None] * len(rows)
    for index, (position, row) in enumerate(zip(positions, rows, strict=True)):
        if row.num_logprobs is not None and index not in sampled.invalid:
            token_id = sampled.token_ids[index]
            own = (logits[index], token_id, found[index])
            found[index] = _reported(position.request, row, *own)
    return replace(sampled, logprobs=found)


def _reported(
    request: Request,
    row: RowParams,
    logits: NDArray[np.float32],
    token_id: int,
    found: RowLogprobs | None,
) -> RowLogprobs:
    """Return the log probabilities of one position, as they are told.

    Args:
        request: that asks for them.
        row: how its token was drawn.
        logits: float32 [vocab], the model's own.
        token_id: that was drawn.
        found: what the sampler reports of them; None where they are not about these logits.
    """
    if found is None:
        assert row.num_logprobs is not None
        logits = processed(logits, row, token_id)
        [found] = logprobs(logits[None], [token_id], [row.num_logprobs], 1)
    named = request.params.logprob_token_ids
    if named is not None:
        found = with_named(found, logits, named)
    return as_logits(found, logits) if request.logprobs_mode in LOGITS else found


def _failures(
    positions: Sequence[Position], logits: NDArray[np.float32], sampled: Sampled
) -> dict[int, Failure]:
    """Return why some positions have no token, by their number."""
    return {
        index: nothing_drawn(positions[index].request, logits[index]) for index in sampled.invalid
    }


def nothing_drawn(request: Request, logits: NDArray[np.float32]) -> Failure:
    """Return why nothing can be drawn from `logits`, float32 [vocab]."""
    if not np.isfinite(logits.max()) or (request.rules is None and request.grammar is None):
        return NOT_FINITE
    params = request.params
    parts = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "logit_bias": -math.inf in dict(params.logit_bias).values(),
        "min_tokens": params.min_tokens > 0,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "the grammar": request.grammar is not None,
    }
    named = " and ".join(name for name, given in parts.items() if given)
    return Failure(NOTHING_LEFT.format(named), refused=True)


def _sample_one_by_one(
    positions: Sequence[Position], logits: NDArray[np.float32], num_threads: int | None
) -> tuple[Sampled, dict[int, Failure]]:
    """Draw each token by itself, so that the one that cannot be drawn fails alone."""
    tokens: list[int] = []
    logprobs: list[RowLogprobs | None] = []
    surprises: list[float] = []
    failed: dict[int, Failure] = {}
    for index, position in enumerate(positions):
        row = logits[index : index + 1]
        try:
            one = sample_positions([position], row, num_threads)
        except Exception as error:
            one = Sampled([0], None, ())
            failed[index] = Failure.of(error)
        if one.invalid:
            failed[index] = _failures([position], row, one)[0]
        tokens += one.token_ids
        logprobs += one.logprobs or [None]
        surprises += one.surprises or [0.0]
    return Sampled(tokens, logprobs, tuple(failed), surprises), failed


def grammar_masks(plan: StepPlan) -> dict[Request, Mask | Failure]:
    """Return what the grammars of a plan's sequences allow; see `sample_step`. Never raises."""
    masks: dict[Request, Mask | Failure] = {}
    for row in plan.sampled:
        first = plan.requests[row]
        for request in with_siblings(first) if first.beams is None else (first,):
            if request.grammar is None:
                continue
            try:
                masks[request] = request.grammar.masks(request.tokens, plan.drafts.get(row, ()))
            except Exception as error:
                logger.error("the grammar of %s failed", request.request_id, exc_info=error)
                masks[request] = failure_of(error)
    return masks


def token_logprobs(row: RowLogprobs, name: Naming) -> TokenLogprobs:
    """Return the logprobs of one position: the likeliest tokens, those named, the sampled one.

    Each is there once, where it comes first.

    Args:
        row: of the position.
        name: returns the text of a token.
    """
    pairs = zip(row.top_ids, row.top_logprobs, strict=True)
    result = {
        token_id: Logprob(value, rank, name(token_id))
        for rank, (token_id, value) in enumerate(pairs, 1)
    }
    for one in row.named:
        if one.token_id not in result:
            result[one.token_id] = Logprob(one.logprob, one.rank, name(one.token_id))
    return result | {row.token_id: Logprob(row.logprob, row.rank, name(row.token_id))}
