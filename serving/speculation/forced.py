"""Guessing what a grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence

from onnxport.serving.request import Request
from onnxport.serving.speculation.drafter import Drafter


class ForcedDrafter:
    """Guesses the text that the grammar of a request demands, such as the keys of an object.

    The text may be cut into tokens in more than one way; the usual one is guessed. Where a grammar
    demands nothing, or there is none, another drafter is asked.
    """

    def __init__(self, otherwise: Drafter | None = None) -> None:
        """Take over another drafter, a cheap one; None: nothing else is guessed."""
        assert otherwise is None or otherwise.is_cheap
        self._otherwise = otherwise

    @property
    def is_cheap(self) -> bool:
        """It is: a grammar looks at a few bytes."""
        return True

    def num_behind(self, request: Request) -> int:
        """Return 0: nothing has to be computed."""
        return 0

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """See `Drafter.propose`."""
        proposals: list[Sequence[int]] = [
            () if request.grammar is None else request.grammar.forced(request.tokens, length)
            for request, length in zip(requests, lengths, strict=True)
        ]
        free = [row for row, found in enumerate(proposals) if not found]
        if self._otherwise is not None and free:
            asked = [requests[row] for row in free]
            found = self._otherwise.propose(asked, [lengths[row] for row in free])
            for row, proposal in zip(free, found, strict=True):
                proposals[row] = proposal
        return proposals

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`."""
        if self._otherwise is not None:
            self._otherwise.forget(request)

    def close(self) -> None:
        """See `Drafter.close`."""
        if self._otherwise is not None:
            self._otherwise.close()
