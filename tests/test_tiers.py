"""What `make fast` leaves out, by what tests took."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.tiers import longest, mark_long, read_report

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest">
<testcase classname="tests.kv.test_pool" name="test_a[1-b.c]" time="0.25" />
<testcase classname="tests.test_x" name="test_b" time="2.5"><skipped message="no" /></testcase>
</testsuite></testsuites>
"""


def test_a_report_is_read_as_the_ids_of_tests(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert read_report(tmp_path / "report.xml") == {
        "tests/kv/test_pool.py::test_a[1-b.c]": 0.25,
        "tests/test_x.py::test_b": 2.5,
    }


def test_the_longest_are_left_out_until_the_rest_fits() -> None:
    seconds = {"a.py::x": 5.0, "a.py::y": 1.0, "b.py::x": 3.0, "b.py::y": 2.0}
    assert longest(seconds, 11) == []
    assert longest(seconds, 6.5) == ["a.py::x"]
    assert longest(seconds, 3) == ["a.py::x", "b.py::x"]


def test_each_file_keeps_its_quickest_test() -> None:
    assert longest({"a.py::x": 5.0, "a.py::y": 4.0, "b.py::x": 9.0}, 0) == ["a.py::x"]


def test_what_was_recorded_is_marked(tmp_path: Path) -> None:
    recorded = tmp_path / "long_tests.txt"
    recorded.write_text("a.py::x\nb.py::gone\n")
    marked: list[str] = []
    items: list[Any] = [
        SimpleNamespace(nodeid=name, add_marker=lambda mark, name=name: marked.append(name))
        for name in ("a.py::x", "a.py::y")
    ]
    mark_long(items, recorded)
    assert marked == ["a.py::x"]
