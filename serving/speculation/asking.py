"""Asking a drafter: what that takes, and what happens when it fails."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from onnxport.errors import DeviceLostError
from onnxport.serving.request import Request
from onnxport.serving.speculation.costs import MOST_SAMPLES, StepCosts
from onnxport.serving.speculation.drafter import Drafter

logger = logging.getLogger(__name__)

MOST_FAILURES = 3  # of the drafter in a row, before it is given up


class Asker:
    """Asks a drafter, for as long as it works.

    Attributes:
        drafter: the one; None once it was closed, or given up because it fails.
        spent_s: what a draft model has taken so far.
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
        """Ask for guesses; a drafter that fails makes none, and is given up if that goes on."""
        assert self.drafter is not None
        try:
            found = self.drafter.propose(requests, lengths)
        except Exception as error:
            self._note_failure(self.drafter, requests, error)
            return [()] * len(requests)
        self._num_failures = 0
        return found

    def ask_model(self, lengths: Mapping[Request, int]) -> dict[Request, Sequence[int]]:
        """Ask for so many guesses of each request, and note what that takes."""
        drafter = self.drafter
        assert drafter is not None
        wanted = {one: length for one, length in lengths.items() if length}
        some = list(wanted)
        late = [drafter.num_behind(one) for one in some]
        start_s = self._clock()
        found = self.ask(some, list(wanted.values()))
        elapsed_s = self._clock() - start_s
        self.spent_s += elapsed_s
        longest = max(map(len, found))
        if longest:
            self._bounds_s.append(elapsed_s / longest)
        if max(late) > self._ordinary:  # which was weighed, and is no part of what comes
            if self.drafter is not None:
                computed = sum(late) - sum(drafter.num_behind(one) for one in some)
                others = max(0, longest - 1)  # places that came after it had caught up
                place_s = self.seconds_a_place(len(some), elapsed_s / (others + 1))
                # Which takes no less than a place, whatever the places happened to take this time.
                caught_up_s = max(elapsed_s / (others + 1), elapsed_s - others * place_s)
                self._behind_s.append(caught_up_s / max(1, computed))
        elif longest:
            self._places.note(len(some), 0, elapsed_s / longest)
        return {one: guess for one, guess in zip(some, found, strict=True) if guess}

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
