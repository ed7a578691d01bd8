"""A guesser that knows the future, and may be told to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onnxport.serving.guesses import possible
from onnxport.serving.request import Request
from onnxport.serving.stats import SpeculationCounters


class Prophet:
    """Guesses the tokens that a request is going to get.

    Attributes:
        length: of its guesses.
        errs: 0: never; n: its tokens number n - 1, 2n - 1 and so on are wrong.
        odd: whether only every other request has a guess.
    """

    def __init__(self, future: Callable[[Request], Sequence[int]], length: int = 4) -> None:
        self.future = future
        self.length = length
        self.errs = 0
        self.odd = False
        self.closed = False
        self.num_drafts = 0
        self.num_drafted = self.num_accepted = 0
        self.num_proposed = self.num_dropped = 0  # tokens, for the step in hand and in all
        self.forgotten: list[tuple[str, int]] = []
        self.steps: list[tuple[int, int]] = []  # rows and tokens
        self.budgets: list[int] = []  # each time that it was asked

    @property
    def counters(self) -> SpeculationCounters:
        return SpeculationCounters(self.num_drafts, self.num_drafted, self.num_accepted, ())

    @property
    def reader(self) -> None:
        return None

    def rests(self) -> bool:
        return False

    def propose(self, requests: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        assert budget >= 1
        self.budgets.append(budget)
        guesses: dict[Request, Sequence[int]] = {}
        for number, request in enumerate(requests):
            assert request.finish_reason is None
            if self.odd and number % 2 == 0:
                continue
            if budget < 1:
                break
            start = request.num_output_tokens
            assert start >= 1
            right = [*self.future(request)[start : start + self.length], 0, 1, 2, 3][: self.length]
            guess = [
                token_id + 1 if self.errs and place % self.errs == self.errs - 1 else token_id
                for place, token_id in enumerate(right)
            ]
            if guess := possible(request, guess[:budget]):
                guesses[request] = guess
                budget -= len(guess)
        self.num_proposed = sum(map(len, guesses.values()))
        return guesses

    def note_planned(self, num_drafted: int) -> None:
        assert 0 <= num_drafted <= self.num_proposed
        self.num_dropped += self.num_proposed - num_drafted
        self.num_proposed = 0

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted
        assert num_drafted >= 1
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def note_step(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        assert elapsed_s >= 0
        self.steps.append((num_rows, num_tokens))

    def forget(self, request: Request) -> None:
        self.forgotten.append((request.request_id, request.index))

    def close(self) -> None:
        self.closed = True
