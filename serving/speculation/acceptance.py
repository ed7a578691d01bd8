"""How often guesses are right."""

from __future__ import annotations

from dataclasses import dataclass

from onnxport.serving.request import Request

OWN_MEMORY = 0.95  # what the past of a request counts after each of its drafts
COMMON_MEMORY = 0.97  # likewise of all requests together
COMMON_WEIGHT = 6.0  # guesses that what is known of all requests counts as, for one of them
FIRST_RATE = 0.5  # of what is not known at all
FIRST_WEIGHT = 4.0  # guesses that this counts as
MOST_RATE = 0.98  # nothing is certain


@dataclass(slots=True)
class Record:
    """Guesses, the recent ones counting most."""

    num_right: float = 0.0
    num_tried: float = 0.0

    def note(self, num_right: int, num_tried: int, memory: float) -> None:
        """Add guesses; what is there counts `memory` times as much from now on."""
        self.num_right = memory * self.num_right + num_right
        self.num_tried = memory * self.num_tried + num_tried


class Acceptance:
    """The probability that a guess is right when all those before it in the draft were."""

    def __init__(self) -> None:
        self._common = Record()
        self._own: dict[Request, Record] = {}

    def note(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """The first `num_accepted` guesses were right; the one after them, if any, was wrong."""
        num_tried = min(num_drafted, num_accepted + 1)
        self._common.note(num_accepted, num_tried, COMMON_MEMORY)
        self._own.setdefault(request, Record()).note(num_accepted, num_tried, OWN_MEMORY)

    def rate(self, request: Request) -> float:
        """Return the probability for the next guesses of a request."""
        common = self._common
        right = common.num_right + FIRST_RATE * FIRST_WEIGHT
        rate = right / (common.num_tried + FIRST_WEIGHT)
        own = self._own.get(request)
        if own is not None:
            rate = (own.num_right + COMMON_WEIGHT * rate) / (own.num_tried + COMMON_WEIGHT)
        return min(MOST_RATE, rate)

    def num_tried(self, request: Request) -> float:
        """Return how much is known of a request itself, in guesses."""
        own = self._own.get(request)
        return 0.0 if own is None else own.num_tried

    def forget(self, request: Request) -> None:
        """Let go of a request; what was learned from it about all stays."""
        self._own.pop(request, None)
