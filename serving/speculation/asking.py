"""Asking a drafter: what that takes, and what happens when it fails."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from onnxport.errors import DeviceLostError
from onnxport.serving.guesses import possible
from onnxport.serving.request import Request
from onnxport.serving.speculation.costs import MOST_SAMPLES, StepCosts
from onnxport.serving.speculation.drafter import Drafter

logger = logging.getLogger(__name__)

MOST_FAILURES = 3  # of the drafter in a row, before it is given up
# Tokens caught up with at once, from which on they tell what one takes: of fewer it is mostly what
# any run takes, the first and cold one above all, and longer texts would never seem worth it.
LEAST_CAUGHT_UP = 32


class Asked(NamedTuple):
    """What came of asking a draft model."""

    guesses: dict[Request, Sequence[int]]  # none of them is empty
    num_caught_up: dict[Request, int]  # tokens that it computed of those that were far behind
    longest: int  # places of the longest draft, what is not possible included; 0: nothing came


class Asker:
    """Asks a drafter, for as long as it works.

    Attributes:
        drafter: the one; None once it was closed, or given up because it fails.
        spent_s: what a draft model has taken so far, unless nothing came of it.
    """

    def __init__(
        self, drafter: Drafter, num_speculative_tokens: int, clock: Callable[[], float]
    ) -> None:
        """Take over `drafter`; `close` closes it.

        Args:
            drafter: guesses.
            num_speculative_tokens: the most at once.
            clock: the time in seconds.
        """
        self.drafter: Drafter | None = drafter
        self.spent_s = 0.0
        self._ordinary = num_speculative_tokens + 1
        self._clock = clock
        self._places = StepCosts()  # of a place of drafts, by how many requests have one
        self._bounds_s: deque[float] = deque(maxlen=MOST_SAMPLES)  # what a place took at most
        self._behind_s: deque[float] = deque(maxlen=MOST_SAMPLES)  # one token that was missing
        self._num_failures = 0

    def ask(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """Ask for guesses; a drafter that fails makes none, and is given up if that goes on.

        What cannot follow is cut off.
        """
        found = self._ask(requests, lengths)
        return [possible(one, guess) for one, guess in zip(requests, found, strict=True)]

    def _ask(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        assert self.drafter is not None
        try:
            found = self.drafter.propose(requests, lengths)
        except Exception as error:
            self._note_failure(self.drafter, requests, error)
            return [()] * len(requests)
        self._num_failures = 0
        return found

    def ask_model(self, lengths: Mapping[Request, int]) -> Asked:
        """Ask for so many guesses of each request, and note what that takes."""
        drafter = self.drafter
        assert drafter is not None
        some = [one for one, length in lengths.items() if length]
        late = [drafter.num_behind(one) for one in some]
        start_s = self._clock()
        found = self._ask(some, [lengths[one] for one in some])
        elapsed_s = self._clock() - start_s
        longest = max(map(len, found))
        caught_up: dict[Request, int] = {}
        if not self._num_failures:  # or what it had computed is forgotten
            for one, before in zip(some, late, strict=True):
                computed = before - drafter.num_behind(one)
                if before > self._ordinary and computed > 0:
                    caught_up[one] = computed
        self._note_times(len(some), longest, sum(caught_up.values()), elapsed_s)
        cut = {one: possible(one, guess) for one, guess in zip(some, found, strict=True)}
        guesses = {one: guess for one, guess in cut.items() if guess}
        in_vain = not guesses and not caught_up
        if not in_vain or self._num_failures:
            self.spent_s += elapsed_s
        return Asked(guesses, caught_up, 0 if in_vain else longest)

    def _note_times(self, rows: int, longest: int, caught_up: int, elapsed_s: float) -> None:
        """Note what drafts took, the longest of which has so many places.

        Args:
            rows: requests that were asked about.
            longest: places.
            caught_up: tokens that were computed of requests that were far behind.
            elapsed_s: what it took.
        """
        if longest:
            self._bounds_s.append(elapsed_s / longest)
        if caught_up:  # which was weighed, and is no part of what comes
            others = max(0, longest - 1)  # places that came after it had caught up
            place_s = self.seconds_a_place(rows, elapsed_s / (others + 1))
            # Which takes no less than a place, whatever the places happened to take this time.
            caught_up_s = max(elapsed_s / (others + 1), elapsed_s - others * place_s)
            if caught_up >= LEAST_CAUGHT_UP:
                self._behind_s.append(caught_up_s / caught_up)
        elif longest:
            self._places.note(rows, 0, elapsed_s / longest)

    def seconds_a_place(self, rows: int, unknown_s: float) -> float:
        """Return what a place takes in drafts of so many requests.

        Args:
            rows: the requests.
            unknown_s: what it is taken to take as long as that was not measured, or less where it
                took less in any drafts, of however many requests, catching up included.
        """
        if self._places.knows(rows):
            return self._places.seconds(rows)
        return min([unknown_s, *self._bounds_s])

    def seconds_to_catch_up(self, request: Request, unknown_s: float) -> float:
        """Return what it takes until a request can be guessed for, beyond the ordinary.

        Args:
            request: the one.
            unknown_s: what a token takes as long as that was not measured.
        """
        assert self.drafter is not None
        late = self.drafter.num_behind(request)
        return 0.0 if late <= self._ordinary else late * self.seconds_a_token(unknown_s)

    def seconds_a_token(self, unknown_s: float) -> float:
        """Return what each token takes that a draft model has to catch up with, or `unknown_s`."""
        return min(self._behind_s) if self._behind_s else unknown_s

    def forget(self, request: Request) -> None:
        """Let go of a request."""
        if self.drafter is not None:
            self.drafter.forget(request)

    def close(self) -> None:
        """Free the drafter. Idempotent."""
        drafter, self.drafter = self.drafter, None
        if drafter is not None:
            drafter.close()

    def _note_failure(
        self, drafter: Drafter, requests: Sequence[Request], error: Exception
    ) -> None:
        self._num_failures += 1
        if not isinstance(error, DeviceLostError) and self._num_failures < MOST_FAILURES:
            logger.warning("guessing failed, and is tried again: %s", error)
            for request in requests:
                drafter.forget(request)
            return
        logger.error("speculation is off from now on: guessing failed", exc_info=error)
        try:
            self.close()
        except Exception as failure:
            logger.warning("closing the drafter failed too, and may leak memory: %s", failure)
