"""Long files come first where several workers run the tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.order import by_length


def item(name: str, path: str, timeout_s: float | None = None) -> Any:
    mark = None if timeout_s is None else pytest.mark.timeout(timeout_s).mark
    return SimpleNamespace(name=name, path=Path(path), get_closest_marker=lambda _: mark)


def test_files_that_may_take_long_come_first_then_those_with_many_tests() -> None:
    items = [
        item("a", "few.py"),
        item("b", "many.py"),
        item("d", "many.py", timeout_s=60),
        item("c", "many.py"),
        item("y", "slow.py"),
        item("x", "slow.py", timeout_s=601),
        item("z", "other.py"),
    ]
    assert [each.name for each in by_length(items, 600)] == ["y", "x", "b", "d", "c", "a", "z"]
