"""What becomes of the requests of a step that failed: who is tried again, with whom, how far."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnxport.serving.draft import Guess, StepPlan
from onnxport.serving.request import Request
from onnxport.serving.scheduler import Scheduler

GOOD_STEPS = 256  # of a lowered budget, until more is tried again


class Retries:
    """Tries the requests of a failed step in halves, until the one that fails is alone.

    A device that has no memory for a single prompt's chunk gets half the chunk, and steps of all
    requests get no more than that either, until they have gone well for a while.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._suspects: list[tuple[frozenset[Request], int | None]] = []  # and their budget
        self._budget: int | None = None  # tokens of every step; None: all that the engine allows
        self._good_steps = 0

    @property
    def budget_tokens(self) -> int:
        """Most tokens of a step now."""
        return self._budget or self._max_num_batched_tokens

    @property
    def careful(self) -> bool:
        """Whether a step failed a short while ago, so that the next do no more than is due."""
        return bool(self._suspects) or self._budget is not None

    def next_plan(
        self,
        scheduler: Scheduler,
        loading: Collection[Request],
        guess: Guess | None,
    ) -> StepPlan:
        """Plan the next step: with suspects of a failed one alone, as long as there are any.

        Nobody is asked to `guess` for those.
        """
        while self._suspects:
            requests, budget = self._suspects.pop()
            plan = scheduler.plan(requests, loading, budget or self._budget)
            if plan.requests:
                return plan
        return scheduler.plan(None, loading, self._budget, guess)

    def split(self, requests: Sequence[Request]) -> None:
        """Several requests failed together: try each half by itself."""
        half = len(requests) // 2
        self._suspects += [(frozenset(requests[half:]), None), (frozenset(requests[:half]), None)]

    def repeat(self, request: Request) -> None:
        """A step of one request failed, and had more to do than it must: try it with less."""
        self._suspects.append((frozenset((request,)), None))

    def shorten(self, request: Request, num_tokens: int, max_num_seqs: int) -> bool:
        """A step of one request had not the memory for `num_tokens`; False if it cannot be less.

        Args:
            request: the one.
            num_tokens: that it was to compute.
            max_num_seqs: tokens that a step of all requests must have room for.
        """
        half = num_tokens // 2
        if not half:
            return False
        self._suspects.append((frozenset((request,)), half))
        self._budget = min(max(half, max_num_seqs), self.budget_tokens)
        self._good_steps = 0
        return True

    def note_good(self) -> None:
        """A step was committed."""
        if self._budget is None:
            return
        self._good_steps += 1
        if self._good_steps >= GOOD_STEPS:
            self._good_steps = 0
            more = 2 * self._budget
            self._budget = more if more < self._max_num_batched_tokens else None

    def clear(self, max_num_batched_tokens: int) -> None:
        """Forget everything: what failed has been replaced by what takes so many tokens."""
        self._max_num_batched_tokens = max_num_batched_tokens
        self._suspects.clear()
        self._budget = None
        self._good_steps = 0
