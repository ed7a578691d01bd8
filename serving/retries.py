"""What becomes of the requests of a step that failed: who is tried again, with whom, how far."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from onnxport.serving.request import Request
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.step_plan import Guess, StepPlan

logger = logging.getLogger(__name__)

GOOD_STEPS = 256  # of a lowered budget or of fewer rows, until more is tried again


class Retries:
    """Tries the requests of a failed step in halves, until the one that fails is alone.

    A device that has no memory for a single prompt's chunk gets half the chunk, and steps of all
    requests get no more than that either, until they have gone well for a while. One that has none
    for so many rows gets as many as went well together, until then too.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._suspects: list[tuple[frozenset[Request], int | None]] = []  # and their budget
        self._budget: int | None = None  # tokens of every step; None: all that the engine allows
        self._rows: int | None = None  # of every step; None: all that the engine allows
        self._too_many_rows = 0  # the most of a step that had no memory
        self._failed_rows = 0  # likewise, while its requests are tried again; 0: none is
        self._good_rows = 0  # the most of their steps that went well
        self._good_steps = 0

    @property
    def budget_tokens(self) -> int:
        """Most tokens of a step now."""
        return self._budget or self._max_num_batched_tokens

    @property
    def most_rows(self) -> int | None:
        """Most rows of a step now; None: as many as there are."""
        return self._rows

    @property
    def careful(self) -> bool:
        """Whether a step failed a short while ago, so that the next do no more than is due."""
        return bool(self._suspects) or self._budget is not None or self._rows is not None

    def next_plan(
        self,
        scheduler: Scheduler,
        loading: Collection[Request],
        guess: Guess | None,
    ) -> StepPlan:
        """Plan the next step: with suspects of a failed one alone, as long as there are any.

        Nobody is asked to `guess` for those, nor while rows are few. A step of more rows than there
        is memory for becomes several, one after the other; one for which others yield is tried as
        it is, for that stays if it fails.
        """
        if (plan := self._next_suspects(scheduler, loading)) is not None:
            return plan
        self._settle_rows()
        if self._rows is None:
            return scheduler.plan(None, loading, self._budget, guess)
        plan = scheduler.plan(None, loading, self._budget)
        if len(plan.requests) <= self._rows or plan.preempted:
            return plan
        for start in reversed(range(0, len(plan.requests), self._rows)):
            part = plan.requests[start : start + self._rows]
            self._suspects.append((frozenset(part), None))
        return self._next_suspects(scheduler, loading) or plan

    def _next_suspects(self, scheduler: Scheduler, loading: Collection[Request]) -> StepPlan | None:
        while self._suspects:
            requests, budget = self._suspects.pop()
            plan = scheduler.plan(requests, loading, budget or self._budget)
            if plan.requests:
                return plan
        return None

    def _settle_rows(self) -> None:
        """All requests of a step without memory were tried: keep to what went well.

        Rows differ, so as many others may not. Where that shows, half of these are tried.
        """
        if self._failed_rows and self._good_rows:
            rows = self._good_rows
            if self._rows is None:
                self._too_many_rows = self._failed_rows
            elif self._failed_rows <= self._rows:
                rows = min(rows, max(1, self._failed_rows // 2))
            else:  # one for which others yielded, which says nothing of fewer rows
                rows = max(rows, self._rows)
            if rows != self._rows:
                self._rows = rows
                self._good_steps = 0
                logger.warning("steps have at most %d rows for now", self._rows)
        self._failed_rows = self._good_rows = 0

    def split(self, requests: Sequence[Request], *, had_no_memory: bool) -> None:
        """Several requests failed together: try each half by itself."""
        if had_no_memory:
            self._failed_rows = max(self._failed_rows, len(requests))
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
        self._failed_rows = self._good_rows = 0  # it was not for the number of rows
        half = num_tokens // 2
        if not half:
            return False
        self._suspects.append((frozenset((request,)), half))
        self._budget = min(max(half, max_num_seqs), self.budget_tokens)
        self._good_steps = 0
        return True

    def note_good(self, num_rows: int) -> None:
        """A step of so many rows was committed."""
        if self._failed_rows:
            self._good_rows = max(self._good_rows, num_rows)
        if self._budget is None and self._rows is None:
            return
        self._good_steps += 1
        if self._good_steps < GOOD_STEPS:
            return
        self._good_steps = 0
        if self._budget is not None:
            more = 2 * self._budget
            self._budget = more if more < self._max_num_batched_tokens else None
        if self._rows is not None:
            more = 2 * self._rows
            self._rows = more if more < self._too_many_rows else None

    def clear(self, max_num_batched_tokens: int) -> None:
        """Forget everything: what failed has been replaced by what takes so many tokens."""
        self._max_num_batched_tokens = max_num_batched_tokens
        self._suspects.clear()
        self._budget = self._rows = None
        self._failed_rows = self._good_rows = self._good_steps = 0
