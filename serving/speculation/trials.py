"""Guesses that no step checks: what comes shows whether they were right."""

from __future__ import annotations

from collections.abc import Sequence

from onnxport.serving.guesses import num_equal
from onnxport.serving.request import Request
from onnxport.serving.speculation.acceptance import Acceptance

MOST_LENGTH = 64


class Trials:
    """Learns how often guesses are right without a token that the model computes for it.

    Attributes:
        length: of the next guess on trial, where longer ones cost more: it doubles with each that
            was right to its end.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        """Tell `acceptance` how trials ended."""
        self.length = 1
        self._acceptance = acceptance
        self._open: dict[Request, tuple[int, Sequence[int]]] = {}  # where, and what is guessed

    def add(self, request: Request, guess: Sequence[int]) -> None:
        """Watch whether `guess` comes; no second one of a request at a time."""
        if guess and request not in self._open:
            self._open[request] = len(request.tokens), guess

    def judge(self) -> bool | None:
        """Look at what has come; whether any guess was right to its end. None: too early to say."""
        verdict = None
        for request in list(self._open):
            right, come = self._compare(request)
            if right < come or come == len(self._open[request][1]):
                verdict = verdict or right == come
                self._end(request, right, come)
        return verdict

    def forget(self, request: Request) -> None:
        """The request has ended: what has come of it is all that there will be."""
        if request in self._open:
            self._end(request, *self._compare(request))

    def _compare(self, request: Request) -> tuple[int, int]:
        """Return how many guesses were right, of how many whose place is known."""
        start, guess = self._open[request]
        tokens = request.tokens[start : start + len(guess)]
        return num_equal(tokens, guess), len(tokens)

    def _end(self, request: Request, right: int, come: int) -> None:
        del self._open[request]
        if come:
            self.length = min(MOST_LENGTH, 2 * self.length) if right == come else 1
            self._acceptance.note(request, come, right)
