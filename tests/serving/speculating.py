"""Requests by themselves, and a machine that is made up: its clock, its steps, its luck."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from onnxport.serving.guesses import MOST_OWED, StateReader
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import TOKEN_ID_TYPECODE, Request
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.speculator import Speculator

GREEDY = SamplingParams(temperature=0.0)


def request(
    tokens: Sequence[int], params: SamplingParams = GREEDY, longest: int = 10**6, seed: int = 0
) -> Request:
    """A request that nobody runs."""
    return Request(
        "r", array(TOKEN_ID_TYPECODE, tokens), params, max_total_tokens=longest, seed=seed
    )


class Guesser:
    """A drafter that guesses 0 and takes its time; one of the machine's."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.is_cheap = machine.round_s == 0.0
        self.takes_s = 0.0  # each time that it is asked, besides the machine's times
        self.num_asked = 0
        self.budget = 1 << 30  # tokens to catch up with, in all of a call
        self.behind: dict[Request, int] = {}
        self.stuck: set[Request] = set()  # for whom it computes nothing
        self.forgotten: list[Request] = []
        self.closed = False

    def num_behind(self, request: Request) -> int:
        return 0 if self.is_cheap else max(1, self.behind.get(request, len(request.tokens)))

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        self.machine.now_s += self.takes_s
        if self.machine.fails:
            raise self.machine.fails.pop()
        self.num_asked += 1
        budget = self.budget
        guesses: list[Sequence[int]] = []
        for one, length in zip(requests, lengths, strict=True):
            if one in self.stuck:
                guesses.append(())
                continue
            late = self.num_behind(one)
            computed = min(late, budget)
            budget -= computed
            self.machine.now_s += self.machine.behind_s * computed
            self.behind[one] = late - computed
            guesses.append((0,) * length if computed == late else ())
        self.machine.now_s += self.machine.round_s * max(map(len, guesses))
        return guesses

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)
        self.behind.pop(request, None)

    def close(self) -> None:
        self.closed = True


class Eager(Speculator):
    """Guesses whenever it may, whether it pays or not."""

    def rests(self) -> bool:
        return False

    def propose(self, requests: Sequence[Request], budget: int) -> dict[Request, Sequence[int]]:
        if self._asker.drafter is None:
            return {}
        most = self._config.longest_draft
        lengths = []
        for one in requests:
            lengths.append(min(most, one.max_total_tokens - len(one.tokens) - 1, budget))
            budget -= lengths[-1]
        if not any(lengths):
            return {}
        found = self._asker.ask(requests, lengths)
        return {one: guess for one, guess in zip(requests, found, strict=True) if guess}


class Dozing(Eager):
    """Guesses whenever it may, and has the states of some steps told, by chance; not the first."""

    def __init__(self, *args: Any, seed: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.random = Random(seed)
        self.wakes: bool | None = None

    @property
    def reader(self) -> StateReader | None:
        return super().reader if self.wakes else None

    def rests(self) -> bool:
        first = self.wakes is None
        self.wakes = not first and self.random.random() < (0.7 if self.wakes else 0.4)
        return False


class Machine:
    """Steps of a made-up cost, in which a guess is right with a made-up probability."""

    def __init__(
        self,
        step_s: Callable[[int], float],
        rate: float,
        *,
        rows: int = 1,
        round_s: float = 0.0,
        behind_s: float = 0.0,
        config: SpeculationConfig | None = None,
        seed: int = 0,
        reader: StateReader | None = None,
        recomputes: bool = False,
    ) -> None:
        self.step_s = step_s
        self.recomputes = recomputes
        self.rate = rate
        self.round_s = round_s
        self.behind_s = behind_s
        self.random = Random(seed)
        self.now_s = 0.0
        self.fails: list[Exception] = []
        self.requests = [request([1]) for _ in range(rows)]
        self.guesser = Guesser(self)
        self.config = config or SpeculationConfig("ngram")
        clock = lambda: self.now_s  # noqa: E731
        self.speculator = Speculator(
            self.guesser, self.config, clock, reader, recomputes=recomputes
        )
        self.lengths: list[int] = []  # of the drafts of each step, together
        self.told: list[bool] = []  # whether the states of each step would be

    def run(self, steps: int) -> float:
        """Make steps; returns tokens a second."""
        start_s, tokens = self.now_s, 0
        for _ in range(steps):
            tokens += self.step()
        return tokens / (self.now_s - start_s)

    def answer(self, prompt: int, num_tokens: int) -> float:
        """Answer a request with a prompt of so many tokens; returns tokens a second."""
        one = request([1] * prompt)
        self.requests = [one]
        start_s = self.now_s
        while one.num_output_tokens < num_tokens:
            self.step()
        one.finish_reason = "length"
        self.speculator.forget(one)
        return one.num_output_tokens / (self.now_s - start_s)

    def step(self) -> int:
        """Make one step; returns how many tokens it brought."""
        rests = self.speculator.rests()
        asked = [one for one in self.requests if one.num_owed_tokens < MOST_OWED]
        guesses = {} if rests or not asked else self.speculator.propose(asked, 512)
        if guesses:
            self.speculator.note_planned(sum(map(len, guesses.values())))
        self.told.append(self.speculator.reader is not None)
        rows = tokens = len(self.requests)
        owed = sum(one.num_owed_tokens for one in self.requests)
        taken_s = self.step_s(tokens + owed + sum(map(len, guesses.values())))
        self.now_s += taken_s
        self.lengths.append(sum(map(len, guesses.values())))
        for one in self.requests:
            right, guess = 0, guesses.get(one, ())
            while self.grow(one) and right < len(guess):
                right += 1
            if guess:
                self.speculator.note_verified(one, len(guess), right)
            tokens += right
            again = 1 + right if self.recomputes and right < len(guess) else 0
            one.num_owed_tokens = one.num_owed_tokens + again if again else 0
        if (not rests and asked) or owed:
            self.speculator.note_step(rows, rows + owed + self.lengths[-1], taken_s)
        return tokens

    def grow(self, one: Request) -> bool:
        """Give a request its next token; returns whether it is the one that is always guessed."""
        right = self.random.random() < self.rate
        one.tokens.append(0 if right else 1)
        if one in self.guesser.behind:
            self.guesser.behind[one] += 1
        return right

    def best(self) -> float:
        """Tokens a second with the best fixed length there is, 0 included."""
        rows, speeds = len(self.requests), []
        for length in range(self.config.longest_draft + 1):
            tokens = rows * sum(self.rate**place for place in range(length + 1))
            taken_s = self.step_s(rows * (1 + length)) + self.round_s * length
            speeds.append(tokens / taken_s)
        return max(speeds)

    def plain(self) -> float:
        """Tokens a second without guesses."""
        rows = len(self.requests)
        return rows / self.step_s(rows)
