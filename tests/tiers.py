"""What `make fast` leaves out of tests that try many cases; all of them run otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

ALL_EXAMPLES = 100  # of hypothesis's own profile, which is that of the full tier
FAST_EXAMPLES = 25
FAST_PROFILE = "fast"


def register_profile() -> None:
    """Let `--hypothesis-profile=fast` try fewer examples."""
    settings.register_profile(FAST_PROFILE, max_examples=FAST_EXAMPLES)


def examples(count: int) -> int:
    """Return how many examples a test tries: `count`, or its share of them in the fast profile."""
    return max(1, count * settings.default.max_examples // ALL_EXAMPLES)


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of which every `step`-th runs in `make fast`, the first one among them."""
    return [
        value if index % step == 0 else pytest.param(value, marks=pytest.mark.slow)
        for index, value in enumerate(values)
    ]
