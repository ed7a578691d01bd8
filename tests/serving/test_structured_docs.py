"""The page about structured output says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from onnxport.serving.structured.compiler import CompileLimits
from onnxport.serving.structured.schema import (
    ANNOTATIONS,
    ENFORCED,
    FORMATS,
    MAX_MULTIPLE,
    ROOT_ONLY,
)
from onnxport.serving.structured.spec import MAX_CHARS, MAX_CHOICES
from onnxport.serving.structured.structural import FORMATS as OF_TAGS
from onnxport.serving.structured.structural import MAX_DEPTH as TAGS_DEEP
from onnxport.serving.structured.structural import MAX_FORMATS, MAX_TIMES, REFUSED, SILENT

PAGE = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text()


def listed(heading: str) -> list[str]:
    """Return the names in the paragraph after a heading."""
    [paragraph] = re.findall(rf"^{heading}.*:\n((?:.+\n)+)", PAGE, re.MULTILINE)
    return re.findall(r"`([^`]+)`", paragraph)


def test_keywords_and_formats() -> None:
    assert listed("Enforced") == list(ENFORCED)
    assert listed("Formats") == list(FORMATS)
    assert listed("Annotations") == [*ANNOTATIONS, *ROOT_ONLY]


def test_formats_of_structural_tags() -> None:
    _, section = PAGE.split("## Structural tags")
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", section.split("\n## ")[0], re.MULTILINE)
    told = {}
    for kinds, members in rows:
        told |= {kind: re.findall("`([^`]+)`", members) for kind in re.findall("`(.+?)`", kinds)}
    assert told == {
        kind: [*needed, *(name for name in others if name != "style")]
        for kind, (needed, others) in OF_TAGS.items()
    }


def test_what_structural_tags_have_not() -> None:
    _, section = PAGE.split("## Structural tags")
    refused = section.split("\n## ")[0].split("\nRefused are: ")[1].split("\nBeside tools")[0]
    silent = {name for members in SILENT.values() for name in members}
    assert {*REFUSED, *silent} <= set(re.findall("`([^`]+)`", refused))


def test_limits() -> None:
    limits = CompileLimits()
    for number in (
        MAX_CHARS,
        MAX_CHOICES,
        MAX_FORMATS,
        MAX_TIMES,
        TAGS_DEEP,
        MAX_MULTIPLE,
        limits.max_entries,
        limits.max_cached_chars,
        limits.timeout_s,
        round(limits.refused_s),
    ):
        assert re.search(rf"\b{number}\b", PAGE), number
