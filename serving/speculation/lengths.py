"""How many tokens to guess: arithmetic on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
        budget: most guesses in all.
        step_s: seconds of a step by how many guesses it checks, from none to as many as `limits`
            and `budget` allow; does not fall.
        round_s: seconds that guessing takes for each place of the longest draft.
    """
    num_rows = len(rates)
    guesses: list[tuple[float, int, int]] = []
    for row, limit in enumerate(limits):
        worth = rate = rates[row]
        for place in range(1, limit + 1 if rate > 0.0 else 1):
            guesses.append((-worth, row, place))
            worth *= rate
    guesses.sort()
    plain = num_rows / step_s[0]
    best = plain
    chosen: list[tuple[float, int, int]] = []
    most = max(limits, default=0)
    for longest in range(1, most + 1) if round_s else (most,):
        near = [guess for guess in guesses if guess[2] <= longest] if round_s else guesses
        expected = float(num_rows)
        rounds_s = longest * round_s
        enough = 0
        for number, (worth, _, _) in enumerate(near[:budget], 1):
            expected -= worth
            speed = expected / (step_s[number] + rounds_s)
            if speed > best:
                best, enough = speed, number
        if enough:
            chosen = near[:enough]
    lengths = [0] * num_rows
    for _, row, _ in chosen:
        lengths[row] += 1
    return Choice(lengths, best / plain)
