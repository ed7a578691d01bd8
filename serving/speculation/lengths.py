"""How many tokens to guess: arithmetic on numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_Guess = tuple[float, int, int]  # how likely it is that it is right, below 0; its row, its place


class Choice(NamedTuple):
    """How many tokens to guess for each request, and what that is worth."""

    lengths: list[int]
    speedup: float  # tokens a second, as a multiple of those without guesses; 1: none


def choose_lengths(
    rates: Sequence[float],
    limits: Sequence[int],
    budget: int,
    step_s: Sequence[float],
    round_s: float = 0.0,
) -> Choice:
    """Choose the lengths that make the most tokens a second.

    The guess at place j of a draft is right with probability rate**j, if each is with the same
    rate, so a step of `n` rows makes n + sum(rate**j) tokens. For any number of guesses, the
    likeliest ones are the most worth, and those need no others than they bring along.

    Args:
        rates: of the requests, in [0, 1).
        limits: the longest draft of each.
        budget: most guesses in all, at least one.
        step_s: seconds of a step by how many guesses it checks, from none to as many as `limits`
            and `budget` allow; does not fall.
        round_s: seconds that guessing takes for each place of the longest draft.
    """
    plain = len(rates) / step_s[0]
    best = plain
    chosen: list[_Guess] = []
    near: list[_Guess] = []

    def choose(rounds_s: float) -> None:
        """Take the first of `near` that make more tokens a second than what was best."""
        nonlocal best, chosen
        expected = float(len(rates))
        enough = 0
        for number, (worth, _, _) in enumerate(near[:budget], 1):
            expected -= worth
            speed = expected / (step_s[number] + rounds_s)
            if speed > best:
                best, enough = speed, number
        if enough:
            chosen = near[:enough]

    for longest, guesses in enumerate(_places(rates, limits), 1):
        # One place more has to bring more than the best speed does in the time that it takes, and
        # each one brings less than the one before.
        if -sum(worth for worth, _, _ in guesses) <= best * round_s:
            break
        if len(near) >= budget and min(guesses) > near[budget - 1]:
            break
        near += guesses
        if round_s or len(near) >= budget:
            near.sort()
            del near[budget:]
        if round_s:
            choose(longest * round_s)
    if not round_s:
        near.sort()
        choose(0.0)
    lengths = [0] * len(rates)
    for _, row, _ in chosen:
        lengths[row] += 1
    return Choice(lengths, best / plain)


def _places(rates: Sequence[float], limits: Sequence[int]) -> Iterator[list[_Guess]]:
    """Yield the guesses at each place of the drafts, from the first on, which may be right."""
    worths = list(rates)
    for place in range(1, max(limits, default=0) + 1):
        yield [
            (-worth, row, place)
            for row, (worth, limit) in enumerate(zip(worths, limits, strict=True))
            if place <= limit and worth > 0.0
        ]
        worths = [worth * rate for worth, rate in zip(worths, rates, strict=True)]
