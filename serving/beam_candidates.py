"""What may follow a beam: from logits to the likeliest tokens and their log probabilities.

Logits are changed as the request says before that, forbidden tokens are left out, and the rest is
divided by the temperature. So what texts are compared by are the log probabilities that tokens
would be drawn with, all of them; what is reported has the engine's `logprobs_mode`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.noise import LEAST_TEMPERATURE
from onnxport.serving.beams import Candidate
from onnxport.serving.edits import Floats
from onnxport.serving.logprob_modes import LOGITS, PROCESSED, as_logits, processed
from onnxport.serving.named_logprobs import with_named
from onnxport.serving.outputs import Failure
from onnxport.serving.request import Request
from onnxport.serving.row_params import RowParams
from onnxport.serving.sampled import RowLogprobs
from onnxport.serving.sampler import logprobs
from onnxport.serving.sampling import Mask, Masks, nothing_drawn
from onnxport.serving.step_plan import StepPlan

logger = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """A beam that a step has computed up to its end."""

    request: Request
    candidates: tuple[Candidate, ...] = ()  # the likeliest first; none where they are known already
    failure: Failure | None = None  # why there are none


def arrivals(
    plan: StepPlan, logits: NDArray[np.float32], masks: Masks, num_threads: int | None = None
) -> list[Arrival]:
    """Return what may follow the beams of a step. Never raises: who fails does so alone.

    Args:
        plan: of the step.
        logits: float32 [sum(plan.num_logits), vocab].
        masks: of the sequences that have a grammar; see `sampling.sample_step`.
        num_threads: likewise.
    """
    rows = [row for row in plan.sampled if plan.requests[row].beams is not None]
    if not rows:
        return []
    ends = list(accumulate(plan.num_logits))
    return [_arrival(plan.requests[row], logits[ends[row] - 1], masks, num_threads) for row in rows]


def _arrival(request: Request, logits: Floats, masks: Masks, num_threads: int | None) -> Arrival:
    assert request.beams is not None
    if request.beams.behind:
        return Arrival(request)
    mask = masks.get(request) if request.grammar is not None else None
    if isinstance(mask, Failure):
        return Arrival(request, (), mask)
    try:
        own = None if mask is None else mask[0]
        return Arrival(request, _candidates(request, logits, own, num_threads))
    except FloatingPointError:
        return Arrival(request, (), nothing_drawn(request, logits))
    except Exception as error:
        logger.error("a beam of request %s failed", request.request_id, exc_info=error)
        return Arrival(request, (), Failure.of(error))


def _candidates(
    request: Request, logits: Floats, mask: Mask | None, num_threads: int | None
) -> tuple[Candidate, ...]:
    """Return the likeliest tokens, the likeliest first.

    They are twice as many as there are beams, as in vLLM; more where so many of these end the text
    that there are fewer others than beams.

    Raises:
        FloatingPointError: the logits are no numbers, or all tokens are forbidden.
    """
    assert request.beams is not None
    edits = None if request.rules is None else request.rules.edits(request.tokens)
    values = logits
    if edits is not None or mask is not None:
        values = processed(logits, RowParams(edits=edits, mask=mask), 0)
    values = _tempered(values, request.params.temperature)
    width, vocab = request.beams.width, len(logits)
    count = min(2 * width, vocab)
    likeliest = int(values.argmax())
    while True:
        [found] = logprobs(values[None], [likeliest], [count], num_threads)
        pairs = zip(found.top_ids, found.top_logprobs, strict=True)
        kept = [(token_id, min(one, 0.0)) for token_id, one in pairs if one > -np.inf]
        going = sum(token_id not in request.stop_token_ids for token_id, _ in kept)
        if going >= width or len(kept) < count or count == vocab:
            break
        count = min(2 * count, vocab)
    told: Mapping[int, RowLogprobs] = {}
    if request.params.logprobs is not None:
        told = _told(request, logits, values, tuple(one for one, _ in kept), num_threads)
    return tuple(Candidate(token_id, one, told.get(token_id)) for token_id, one in kept)


def _tempered(values: Floats, temperature: float) -> Floats:
    """Return logits divided by a temperature, but for what all have in common; of 0 as they are."""
    if temperature in (0.0, 1.0):
        return values
    most = values.max()
    if not np.isfinite(most):
        return values
    with np.errstate(over="ignore"):  # what is that unlikely may be impossible
        tempered: Floats = (values - most) / np.float32(max(temperature, LEAST_TEMPERATURE))
    return tempered


def _told(
    request: Request,
    logits: Floats,
    values: Floats,
    token_ids: tuple[int, ...],
    num_threads: int | None,
) -> dict[int, RowLogprobs]:
    """Return what is reported of each of some tokens, if it comes next.

    Args:
        request: that asks for it.
        logits: float32 [vocab], the model's own.
        values: float32 [vocab], what is left of them.
        token_ids: the tokens.
        num_threads: see `arrivals`.
    """
    params, mode = request.params, request.logprobs_mode
    assert params.logprobs is not None
    of = values if mode in PROCESSED else logits
    [found] = logprobs(of[None], [int(of.argmax())], [params.logprobs], num_threads)
    asked = params.logprob_token_ids
    named = with_named(found, of, asked).named if asked else ()
    told = {}
    # Ranks of likely tokens are found faster than those of any, hence by themselves.
    for own in with_named(found, of, token_ids).named:
        row = RowLogprobs(*own, found.top_ids, found.top_logprobs, named)
        told[own.token_id] = as_logits(row, of) if mode in LOGITS else row
    return told
