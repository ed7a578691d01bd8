"""What the engine tells of its work: events of requests, records of steps.

All times are of `time.monotonic`'s clock, in seconds. Listeners are called in the engine's thread,
in order, and must return quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from onnxport.serving.outputs import FinishReason, RequestMetrics

EventKind = Literal["queued", "scheduled", "preempted", "first_token", "finished"]


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Something happened to one sequence of a request.

    "queued" comes once a sequence; "scheduled" when its first step begins, and again after each
    "preempted"; "finished" is the last. Of a request with `n > 1`, sequence 0 alone is queued and
    computes the prompt; the others begin with "scheduled", when they fork from it, and have
    "finished" alone if that never happens.
    """

    kind: EventKind
    request_id: str
    index: int  # which completion of the request
    time_s: float
    finished: FinishedRecord | None = None  # of "finished"


@dataclass(frozen=True, slots=True)
class FinishedRecord:
    """The sum of one sequence's life."""

    reason: FinishReason
    metrics: RequestMetrics
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens that came from the prefix cache
    num_preemptions: int
    max_tokens: int | None  # as the request asked
    n: int  # as the request asked
    num_sequences: int  # of the request, which may be more than it returns


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that was committed."""

    start_s: float
    end_s: float
    num_rows: int
    num_tokens: int  # computed
    num_sampled: int  # tokens that requests got
    inter_token_s: tuple[float, ...]  # since the previous token of its sequence, one a later token


class Listener(Protocol):
    """Hears what happens in the engine."""

    def on_request(self, event: RequestEvent) -> None:
        """Something happened to a request."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """A step was committed."""
        ...
