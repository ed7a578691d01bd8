"""What a step adds to one sequence: its next tokens, up to the one that ends it, and their text.

Which tokens are added, and whether the sequence goes on, has to be known before the next step can
be planned. Their text has not, but where stop strings end it: the rest of a `Growth` can be worked
out while the model runs again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.grammar import failure_of
from onnxport.serving.outputs import (
    CompletionDelta,
    Failure,
    FinishReason,
    PromptProgress,
    TokenLogprobs,
)
from onnxport.serving.repetition import STOP_REASON
from onnxport.serving.request import Request
from onnxport.serving.sampler import RowLogprobs
from onnxport.serving.sampling import Drawn, token_logprobs
from onnxport.serving.text import TextStream

logger = logging.getLogger(__name__)

Naming = Callable[[int], str]


@dataclass(slots=True)
class Growth:
    """What was appended to a sequence. Not to be changed; frozen it would be slow to make."""

    request_id: str
    index: int
    num_cached_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[RowLogprobs, ...] | None = None  # one a token; None: not asked for
    scores: list[RowLogprobs] | None = None  # of the prompt, once all are there
    text: str = ""  # as far as it is made
    stream: TextStream | None = None  # makes the rest
    num_spelled: int = 0  # tokens that it makes text of, the first ones
    reason: FinishReason | None = None  # why the sequence ends here; None: it goes on
    stop_reason: int | str | None = None  # stop token or string that ends it, or `STOP_REASON`
    failure: Failure | None = None  # why `reason` is "error"
    times: tuple[float, float, float] | None = None  # see `CompletionDelta`
    drafts: tuple[int, int] | None = None  # see `CompletionDelta`
    cumulative_logprob: float | None = None  # see `CompletionDelta`
    embedding: NDArray[np.float32] | None = None  # see `CompletionDelta`
    progress: PromptProgress | None = None  # see `CompletionDelta`

    def delta(self, name: Naming) -> CompletionDelta:
        """Return it with its text; once, and in order. Any thread may, while steps go on.

        If the text cannot be made, a sequence that goes on ends with the next step.

        Args:
            name: returns the text of a token.
        """
        text, reason, failure = self.text, self.reason, self.failure
        if self.stream is not None:
            text = self._spell(self.stream)
            if self.stream.failure is not None and reason is not None:
                reason, failure = "error", self.stream.failure
        entries = None
        if self.logprobs is not None:
            entries = tuple(token_logprobs(one, name) for one in self.logprobs)
        scores: tuple[TokenLogprobs | None, ...] | None = None
        if self.scores is not None:
            scores = (None, *(token_logprobs(one, name) for one in self.scores))
        return CompletionDelta(
            self.request_id,
            self.index,
            text,
            self.token_ids,
            entries,
            reason,
            self.stop_reason,
            self.num_cached_tokens,
            failure,
            scores,
            self.times,
            self.drafts,
            self.cumulative_logprob,
            self.embedding,
            self.progress,
        )

    def _spell(self, stream: TextStream) -> str:
        """Return the text, "" if it cannot be made."""
        if stream.failure is not None:
            return ""
        try:
            text = "".join([stream.add(one)[0] for one in self.token_ids[: self.num_spelled]])
            return text if self.reason in (None, "error") else text + stream.finish()[0]
        except Exception as error:
            logger.error("the text of request %s failed", self.request_id, exc_info=error)
            stream.failure = Failure.of(error)
            return ""


class End(NamedTuple):
    """Why a sequence ends with its last token."""

    reason: FinishReason
    stop_reason: int | str | None = None
    failure: Failure | None = None


class Added(NamedTuple):
    """What one token is to a sequence."""

    text: str = ""  # of a stream that looks for stop strings
    is_text: bool = True
    end: End | None = None  # why the sequence ends with it; None: it goes on


GOES_ON = Added()


def grow(drawn: Drawn, eos_token_ids: frozenset[int]) -> Growth:
    """Append the tokens that were drawn, up to one that ends the sequence.

    Where one cannot be taken, as by a grammar that forbids it, the sequence fails, and keeps those
    before it.

    Args:
        drawn: the tokens.
        eos_token_ids: end tokens of the model.
    """
    request = drawn.request
    stream = request.text
    if stream is not None and stream.failure is not None:
        return _growth(drawn, 0, "", 0, End("error", None, stream.failure))
    text, num_spelled = "", 0
    for count, token_id in enumerate(drawn.token_ids, 1):
        try:
            added = _append(request, token_id, eos_token_ids)
        except Exception as error:
            logger.error("request %s failed", request.request_id, exc_info=error)
            end = End("error", None, failure_of(error))
            return _growth(drawn, count - 1, text, num_spelled, end)
        if request.feedback is not None and drawn.surprise is not None:
            request.feedback.note(drawn.surprise)
        text += added.text
        num_spelled += added.is_text
        if added.end is not None:
            return _growth(drawn, count, text, num_spelled, added.end)
    last = None if drawn.failure is None else End("error", None, drawn.failure)
    return _growth(drawn, len(drawn.token_ids), text, num_spelled, last)


def ending(request: Request, reason: FinishReason, failure: Failure | None = None) -> Growth:
    """Return the end of a sequence that gets no more tokens.

    Args:
        request: the sequence.
        reason: why it ends.
        failure: why `reason` is "error".
    """
    return _growth(Drawn(request, ()), 0, "", 0, End(reason, None, failure))


def progress(request: Request, now_s: float) -> Growth:
    """Return how much of the prompt of a sequence without output is computed."""
    scheduled_s = request.times.scheduled_s
    assert scheduled_s is not None, "a step has computed a part of it"
    growth = Growth(request.request_id, request.index, request.num_cached_tokens)
    growth.progress = PromptProgress(request.num_computed_tokens, now_s - scheduled_s)
    return growth


def _append(request: Request, token_id: int, eos_token_ids: frozenset[int]) -> Added:
    """Append a token."""
    request.tokens.append(token_id)
    ends = token_id in request.stop_token_ids
    is_text = not ends or request.params.include_stop_str_in_output
    piece, stop = "", None
    if is_text and request.text is not None and request.text.may_stop:
        piece, stop = request.text.add(token_id)
    if stop is not None:
        return Added(piece, is_text, End("stop", stop))
    if ends:
        # As in vLLM, an end of the model is told only where it was asked for as a stop token alone.
        told = request.params.ignore_eos or token_id not in eos_token_ids
        return Added(piece, is_text, End("stop", token_id if told else None))
    if request.grammar is not None and request.grammar.is_complete(request.tokens):
        return Added(piece, is_text, End("stop"))
    if len(request.tokens) >= request.max_total_tokens:
        return Added(piece, is_text, End("length"))
    if _is_stuck(request):
        return Added(piece, is_text, End("repetition", STOP_REASON))
    return Added(piece, is_text) if piece else GOES_ON


def _is_stuck(request: Request) -> bool:
    """Whether a sequence ends because its output repeats itself."""
    if request.repetition is None or not request.repetition.is_stuck(request.tokens):
        return False
    return request.num_output_tokens >= request.params.min_tokens


def _growth(drawn: Drawn, count: int, text: str, num_spelled: int, end: End | None) -> Growth:
    """Return what the first `count` of the tokens that were drawn add; some of them are text."""
    request = drawn.request
    stream = request.text
    reason, stop_reason, failure = end or (None, None, None)
    if stream is not None and stream.may_stop:
        has_stopped = reason == "stop" and isinstance(stop_reason, str)
        if reason not in (None, "error") and not has_stopped:
            rest, stop = stream.finish()
            text += rest
            if stop is not None:
                reason, stop_reason = "stop", stop
        stream = None
    logprobs = drawn.logprobs
    return Growth(
        request.request_id,
        request.index,
        request.num_cached_tokens,
        drawn.token_ids[:count],
        None if logprobs is None else logprobs[:count],
        _take_scores(request),
        text,
        stream,
        num_spelled,
        reason,
        stop_reason,
        failure,
        _times(request),
        request.drafts,
    )


def _times(request: Request) -> tuple[float, float, float] | None:
    """Return when the first step began, and the first and the last token came, if any has."""
    times = request.times
    if times.scheduled_s is None or times.first_token_s is None or times.last_token_s is None:
        return None
    return times.scheduled_s, times.first_token_s, times.last_token_s


def _take_scores(request: Request) -> list[RowLogprobs] | None:
    """Return the log probabilities of the prompt, once, when all are there."""
    if request.scores is None or request.scores_missing:
        return None
    scores, request.scores = request.scores, None
    return scores
