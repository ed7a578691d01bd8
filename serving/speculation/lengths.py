"""How many tokens to guess: arithmetic on numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """How many tokens to guess for each request, and what that is worth."""

    lengths: list[int]
    speedup: float  # tokens a second, as a multiple of those without guesses; 1: none


def choose_lengths(
    rates: Sequence[float],
    limits: Sequence[int],
    budget: int,
    step_s: Callable[[int], float],
    round_s: float = 0.0,
) -> Choice:
    """Choose the lengths that make the most tokens a second.

    The guess at place j of a draft is right with probability rate**j, if each is with the same
    rate, so a step of `n` rows makes n + sum(rate**j) tokens. Guesses are taken by their own
    probability, the likeliest first: for any number of guesses no other ones are worth more.

    Args:
        rates: of the requests, in [0, 1).
        limits: the longest draft of each.
        budget: most guesses in all.
        step_s: seconds of a step by how many tokens it computes; does not fall.
        round_s: seconds that guessing takes for each place of the longest draft.
    """
    num_rows = len(rates)
    guesses = sorted(
        (-(rate**place), row, place)
        for row, (rate, limit) in enumerate(zip(rates, limits, strict=True))
        for place in range(1, limit + 1)
        if rate > 0.0
    )
    plain = num_rows / step_s(num_rows)
    best, taken = plain, 0
    expected, longest = float(num_rows), 0
    for number, (worth, _, place) in enumerate(guesses[:budget], 1):
        expected -= worth
        longest = max(longest, place)
        speed = expected / (step_s(num_rows + number) + longest * round_s)
        if speed > best:
            best, taken = speed, number
    lengths = [0] * num_rows
    for _, row, _ in guesses[:taken]:
        lengths[row] += 1
    return Choice(lengths, best / plain)
