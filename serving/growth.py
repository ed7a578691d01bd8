"""What a step adds to one sequence: its next tokens and their text, up to the one that ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxport.serving.outputs import FinishReason, TokenLogprobs
from onnxport.serving.request import Request
from onnxport.serving.sampling import Drawn, token_logprobs

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
    error: str | None = None  # why `reason` is "error"


def grow(drawn: Drawn, eos_token_ids: frozenset[int], name: Naming) -> Growth:
    """Append the tokens that were drawn, up to one that ends the sequence.

    Args:
        drawn: the tokens.
        eos_token_ids: end tokens of the model, which are no reason worth telling.
        name: returns the text of a token.
    """
    request = drawn.request
    text = ""
    for count, token_id in enumerate(drawn.token_ids, 1):
        request.tokens.append(token_id)
        ends = token_id in request.stop_token_ids
        stop: str | None = None
        if request.text and (not ends or request.params.include_stop_str_in_output):
            piece, stop = request.text.add(token_id)
            text += piece
        if (reason := _end_reason(request, ends, stop)) is not None:
            stop_reason: int | str | None = stop
            if stop is None and ends and token_id not in eos_token_ids:
                stop_reason = token_id
            tokens = drawn.token_ids[:count]
            return Growth(text, tokens, _entries(drawn, count, name), reason, stop_reason)
    entries = _entries(drawn, len(drawn.token_ids), name)
    failed: FinishReason | None = None if drawn.failure is None else "error"
    return Growth(text, drawn.token_ids, entries, failed, None, drawn.failure)


def prompt_logprobs(request: Request, name: Naming) -> PromptLogprobs | None:
    """Return the log probabilities of the prompt, once, when all are there."""
    if request.scores is None or request.scores_missing:
        return None
    scores, request.scores = request.scores, None
    return (None, *(token_logprobs(one, name) for one in scores))


def _end_reason(request: Request, ends: bool, stop: str | None) -> FinishReason | None:
    """Return why a sequence ends with its last token, if it does."""
    if ends or stop is not None:
        return "stop"
    if request.grammar is not None and request.grammar.is_complete(request.tokens):
        return "stop"
    return "length" if len(request.tokens) >= request.max_total_tokens else None


def _entries(drawn: Drawn, count: int, name: Naming) -> tuple[TokenLogprobs, ...] | None:
    """Return the logprobs of the first `count` tokens, if they were asked for."""
    if drawn.logprobs is None:
        return None
    return tuple(token_logprobs(one, name) for one in drawn.logprobs[:count])
