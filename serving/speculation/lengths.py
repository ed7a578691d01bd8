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
    owed: Sequence[int] | None = None,
) -> Choice:
    """Choose the lengths that make the most tokens a second.

    The guess at place j of a draft is right with probability rate**j, if each is with the same
    rate, so a step of `n` rows makes n + sum(rate**j) tokens. For any number of guesses, the
    likeliest ones are the most worth, and those need no others than they bring along.

    Where a wrong guess makes a row compute its tokens again (`Request.num_owed_tokens`), a row that
    owes m computes m + 1 + r of them a second time when r of its guesses are right, and not all:
    place j of a draft adds rate**(j - 1) * (1 - rate) * (m + j) to what is expected of these. Each
    takes as long as a guess does, in the next step.

    Args:
        rates: of the requests, in [0, 1).
        limits: the longest draft of each.
        budget: most guesses in all, at least one.
        step_s: seconds of a step by how many guesses it checks, from none to as many as `limits`
            and `budget` allow; does not fall.
        round_s: seconds that guessing takes for each place of the longest draft.
        owed: tokens that each request computes a second time in this step; None: none ever does.
    """
    plain = len(rates) / step_s[0]
    best = plain
    token_s = (step_s[-1] - step_s[0]) / max(1, len(step_s) - 1)
    chosen: list[_Guess] = []
    near: list[_Guess] = []

    def choose(rounds_s: float) -> None:
        """Take the first of `near` that make more tokens a second than what was best."""
        nonlocal best, chosen
        expected = float(len(rates))
        enough = 0
        again = 0.0  # tokens that are to be computed a second time
        for number, (worth, row, place) in enumerate(near[:budget], 1):
            expected -= worth
            if owed is not None:
                again += -worth * (1.0 / rates[row] - 1.0) * (owed[row] + place)
            speed = expected / (step_s[number] + rounds_s + again * token_s)
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
