"""Choosing few cases so that every two values of different axes meet in one of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations

Case = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]  # (axis, value) twice, axes in order


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    return set(combinations(case.items(), 2))


def covering_cases(axes: Mapping[str, Sequence[str]], seed: int = 0, tries: int = 30) -> list[Case]:
    """Return cases that hold every pair of values; greedy, the same for a seed.

    A case begins with a pair that is still missing. Of several ways to fill it up, each value
    chosen by how many missing pairs it brings, the one with the most new pairs is taken.
    """
    dice = random.Random(seed)
    missing = {
        ((one, left), (other, right))
        for one, other in combinations(axes, 2)
        for left in axes[one]
        for right in axes[other]
    }
    cases: list[Case] = []
    while missing:
        first = min(missing)
        candidates = [_filled(axes, first, missing, dice) for _ in range(tries)]
        best = max(candidates, key=lambda case: len(missing & pairs_of(case)))
        cases.append(best)
        missing -= pairs_of(best)
    return cases


def _filled(
    axes: Mapping[str, Sequence[str]], first: Pair, missing: set[Pair], dice: random.Random
) -> Case:
    chosen = dict(first)
    order = [axis for axis in axes if axis not in chosen]
    dice.shuffle(order)
    places = {axis: place for place, axis in enumerate(axes)}
    for axis in order:
        counts = []
        for value in axes[axis]:
            new = 0
            for other in chosen.items():
                pair = sorted([(axis, value), other], key=lambda item: places[item[0]])
                new += (pair[0], pair[1]) in missing
            counts.append((new, dice.random(), value))
        chosen[axis] = max(counts)[2]
    return {axis: chosen[axis] for axis in axes}
