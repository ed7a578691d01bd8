"""What `make fast` leaves out of tests that try many cases; all of them run otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest
from hypothesis import settings

ALL_EXAMPLES = 100  # of hypothesis's own profile, which is that of the full tier
FAST_EXAMPLES = 16
FULL_PROFILE, FAST_PROFILE = "full", "fast"
LONG_TESTS: Final = Path(__file__).with_name("long_tests.txt")  # `make tiers` writes it
FAST_BUDGET_S: Final = 150.0  # of all tests of `make fast`, one after the other


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


def mark_long(items: Iterable[pytest.Item], recorded: Path | None = None) -> None:
    """Mark as slow what `make tiers` found to take longest of what was not.

    Args:
        items: All tests.
        recorded: The file that names them; None: that of the variable LONG_TESTS, or the recorded
            one.
    """
    recorded = recorded or Path(os.environ.get("LONG_TESTS", LONG_TESTS))
    long = set(recorded.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)


def longest(seconds: Mapping[str, float], budget_s: float = FAST_BUDGET_S) -> list[str]:
    """Choose which tests to leave out, so that the others take no longer than there is time for.

    The quickest test of each file stays, however long it takes.

    Args:
        seconds: Node id of a test -> what it took.
        budget_s: What those that stay may take together.

    Returns:
        Node ids in their order.
    """
    kept_of_file: dict[str, str] = {}
    for test in sorted(seconds, key=lambda test: (seconds[test], test)):
        kept_of_file.setdefault(test.partition("::")[0], test)
    kept = set(kept_of_file.values())
    left_out: list[str] = []
    rest = sum(seconds.values())
    for test in sorted(seconds.keys() - kept, key=lambda test: (-seconds[test], test)):
        if rest <= budget_s:
            break
        left_out.append(test)
        rest -= seconds[test]
    return sorted(left_out)


def read_report(report: Path) -> dict[str, float]:
    """Read pytest's JUnit report: node id of a test -> the seconds that it took."""
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
            case.attrib["time"]
        )
        for case in cases
    }


if __name__ == "__main__":
    LONG_TESTS.write_text("\n".join([*longest(read_report(Path(sys.argv[1]))), ""]), "utf-8")
