"""What `make fast` leaves out of tests that try many cases; all of them run otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

ALL_EXAMPLES = 100  # of hypothesis's own profile, which is that of the full tier
FAST_EXAMPLES = 16
FULL_PROFILE, FAST_PROFILE = "full", "fast"


def register_profile() -> None:
    """Let `--hypothesis-profile=fast` try fewer examples.

    No profile has a deadline: on a busy machine an example may stall for any time.
    """
    settings.register_profile(FULL_PROFILE, deadline=None)
    settings.register_profile(FAST_PROFILE, deadline=None, max_examples=FAST_EXAMPLES)
    settings.load_profile(FULL_PROFILE)


def examples(count: int) -> int:
    """Return how many examples a test tries: `count`, or its share of them in the fast profile."""
    return max(1, count * settings.default.max_examples // ALL_EXAMPLES)


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of which every `step`-th runs in `make fast`, the first one among them."""
    return [
        value if index % step == 0 else pytest.param(value, marks=pytest.mark.slow)
        for index, value in enumerate(values)
    ]


def crossed(step: int, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return all pairs of parameters, of which one in `step` runs in `make fast`.

    They lie on diagonals, so that each parameter is in one, if the other list has `step` of them.
    """
    return [
        pytest.param(one, other, marks=[] if (row + column) % step == 0 else pytest.mark.slow)
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
