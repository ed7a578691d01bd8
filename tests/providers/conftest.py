"""Tiny artifacts, exported once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from tests.exporter import checkpoints

ArtifactMaker = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> ArtifactMaker:
    """Returns `make(case, precision) -> artifact folder`, of a case of `checkpoints.CASES`."""
    made: dict[tuple[str, str], Path] = {}

    def make(case: str, precision: str) -> Path:
        if (case, precision) not in made:
            folder = tmp_path_factory.mktemp(f"{case}-{precision}")
            checkpoints.make(checkpoints.CASES[case], folder / "checkpoint")
            options = ExportOptions(precision=precision, group_size=32)
            made[case, precision] = export_model(
                folder / "checkpoint", folder / "artifact", options
            )
        return made[case, precision]

    return make
