"""What draft models took to catch up with requests, until it has come back or is lost."""

from __future__ import annotations

from collections.abc import Iterable

from onnxport.serving.request import Request
from onnxport.serving.speculation.ledger import Ledger


class Debts:
    """Seconds that a draft model took to catch up with each request.

    A request has until its end to bring them in again; what is missing then is charged to the
    ledger. Once it has got guesses it may not owe more: what comes on top is charged at once.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Charge `ledger`."""
        self._ledger = ledger
        self._open_s: dict[Request, float] = {}
        self._guessed: set[Request] = set()  # those who owe something, and have got guesses

    def add(self, request: Request, cost_s: float) -> None:
        """A draft model has caught up with a request, or come nearer."""
        if request in self._guessed:
            self._ledger.charge(cost_s)
        elif cost_s > 0.0:
            self._open_s[request] = self._open_s.get(request, 0.0) + cost_s

    def note_guessed(self, requests: Iterable[Request]) -> None:
        """These have got guesses."""
        self._guessed.update(self._open_s.keys() & set(requests))

    def pay(self, saved_s: float) -> None:
        """So much was saved that nobody needs: the oldest debts are paid of it."""
        for request in list(self._open_s):
            if saved_s <= 0.0:
                return
            owed_s = self._open_s[request]
            saved_s -= owed_s
            if saved_s >= 0.0:
                del self._open_s[request]
                self._guessed.discard(request)
            else:
                self._open_s[request] = -saved_s

    def charge(self, request: Request) -> None:
        """What a request owes has not come back."""
        self._ledger.charge(self._open_s.pop(request, 0.0))
        self._guessed.discard(request)
