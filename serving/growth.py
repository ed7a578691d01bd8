"""What a step adds to one sequence: its next tokens and their text, up to the one that ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from onnxport.serving.grammar import failure_of
from onnxport.serving.outputs import Failure, FinishReason, TokenLogprobs
from onnxport.serving.request import Request
from onnxport.serving.sampling import Drawn, token_logprobs

logger = logging.getLogger(__name__)

Naming = Callable[[int], str]
PromptLogprobs = tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """What was appended to a sequence."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token; None: not asked for
    reason: FinishReason | None = None  # why the sequence ends here; None: it goes on
    stop_reason: int | str | None = None  # the stop token or stop string that ends it
    failure: Failure | None = None  # why `reason` is "error"


class End(NamedTuple):
    """Why a sequence ends with its last token."""

    reason: FinishReason
    stop_reason: int | str | None = None
    failure: Failure | None = None


def grow(drawn: Drawn, eos_token_ids: frozenset[int], name: Naming) -> Growth:
    """Append the tokens that were drawn, up to one that ends the sequence.

    Where one cannot be taken, as by a grammar that forbids it, the sequence fails, and keeps those
    before it.

    Args:
        drawn: the tokens.
        eos_token_ids: end tokens of the model.
        name: returns the text of a token.
    """
    request = drawn.request
    text = ""
    for count, token_id in enumerate(drawn.token_ids, 1):
        try:
            piece, end = _append(request, token_id, eos_token_ids)
        except Exception as error:
            logger.error("request %s failed", request.request_id, exc_info=error)
            return _growth(drawn, count - 1, name, text, End("error", None, failure_of(error)))
        text += piece
        if end is not None:
            return _growth(drawn, count, name, text, end)
    end = None if drawn.failure is None else End("error", None, drawn.failure)
    return _growth(drawn, len(drawn.token_ids), name, text, end)


def prompt_logprobs(request: Request, name: Naming) -> PromptLogprobs | None:
    """Return the log probabilities of the prompt, once, when all are there."""
    if request.scores is None or request.scores_missing:
        return None
    scores, request.scores = request.scores, None
    return (None, *(token_logprobs(one, name) for one in scores))


def _append(
    request: Request, token_id: int, eos_token_ids: frozenset[int]
) -> tuple[str, End | None]:
    """Append a token; returns its text, and why the sequence ends with it, if it does."""
    request.tokens.append(token_id)
    ends = token_id in request.stop_token_ids
    piece, stop = "", None
    if request.text and (not ends or request.params.include_stop_str_in_output):
        piece, stop = request.text.add(token_id)
    if stop is not None:
        return piece, End("stop", stop)
    if ends:
        # As in vLLM, an end of the model is told only where it was asked for as a stop token alone.
        told = request.params.ignore_eos or token_id not in eos_token_ids
        return piece, End("stop", token_id if told else None)
    if request.grammar is not None and request.grammar.is_complete(request.tokens):
        return piece, End("stop")
    return piece, End("length") if len(request.tokens) >= request.max_total_tokens else None


def _growth(drawn: Drawn, count: int, name: Naming, text: str, end: End | None) -> Growth:
    """Return what the first `count` of the tokens that were drawn add."""
    entries = None
    if drawn.logprobs is not None:
        entries = tuple(token_logprobs(one, name) for one in drawn.logprobs[:count])
    tokens = drawn.token_ids[:count]
    if end is None:
        return Growth(text, tokens, entries)
    return Growth(text, tokens, entries, end.reason, end.stop_reason, end.failure)
