"""In which order the workers of a parallel run begin files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest


def by_length(items: Sequence[pytest.Item], usual_timeout_s: float) -> list[pytest.Item]:
    """Sort tests so that no worker begins a long file when the others have nothing left to do.

    First come files with a test that may run longer than tests usually may, of which some compile
    kernels for minutes, then those with many tests. Within a file nothing changes its place.

    Args:
        items: What was collected, file by file.
        usual_timeout_s: What tests have that do not say.
    """
    counts = Counter(item.path for item in items)
    long = {item.path for item in items if _timeout_s(item) > usual_timeout_s}
    return sorted(items, key=lambda item: (item.path not in long, -counts[item.path], item.path))


def _timeout_s(item: pytest.Item) -> float:
    """The seconds that a test says it may take; 0: it does not say."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None else 0.0
