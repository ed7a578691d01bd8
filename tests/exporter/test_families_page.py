"""docs/families.md names every family, and every architecture of GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

from onnxport.exporter.families import FAMILIES
from onnxport.exporter.gguf.architectures import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def test_the_page_names_what_is_exported_and_nothing_else() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [line.split("|")[2:4] for line in lines if "model_type" not in line]
    types, architectures = ([re.findall("`([^`]+)`", row[i]) for row in rows] for i in (0, 1))
    assert sorted(name for (name,) in types) == sorted(one.name for one in FAMILIES)
    assert {name for names in architectures for name in names} == set(ARCHITECTURES)
