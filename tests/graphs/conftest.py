"""A small artifact on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graphs.artifacts import write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")
