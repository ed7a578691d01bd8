"""Tiny artifacts, exported once a session."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from tests.conformance.make import export_options
from tests.exporter import checkpoints

ArtifactMaker = Callable[[str, str], Path]
WIDE_VOCAB = 20_011


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> ArtifactMaker:
    """Returns `make(case, precision) -> artifact folder`, of a case of `checkpoints.CASES`.

    The precision may be MXFP4, see `tests.conformance.make`.
    """
    made: dict[tuple[str, str], Path] = {}

    def make(case: str, precision: str) -> Path:
        if (case, precision) not in made:
            folder = tmp_path_factory.mktemp(f"{case}-{precision}")
            checkpoints.make(checkpoints.CASES[case], folder / "checkpoint")
            options = export_options(precision)
            made[case, precision] = export_model(
                folder / "checkpoint", folder / "artifact", options
            )
        return made[case, precision]

    return make


@pytest.fixture(scope="session")
def wide_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact in int4 with the vocabulary that a coarse head takes; its head is in int8.

    Its outputs differ in scale, so that some panels of the head hold all of the likeliest tokens.
    """
    folder = tmp_path_factory.mktemp("wide")
    case = checkpoints.Case("llama", {"vocab_size": WIDE_VOCAB})
    checkpoints.make(case, folder / "checkpoint")
    path = folder / "checkpoint" / "model.safetensors"
    weights = load_file(path)
    spread = np.random.default_rng(1).standard_normal((WIDE_VOCAB, 1)) / 2
    weights["lm_head.weight"] *= np.exp(spread).astype(np.float32)
    save_file(weights, path, {"format": "pt"})
    options = ExportOptions(precision="int4", group_size=32)
    return export_model(folder / "checkpoint", folder / "artifact", options)


@pytest.fixture(scope="session")
def alternating_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, every other one with a window of 20 tokens, which is in two or three blocks."""
    folder = tmp_path_factory.mktemp("alternating")
    case = checkpoints.CASES["gemma2"]
    sizes = {"num_hidden_layers": 4, "sliding_window": 20}
    checkpoints.make(replace(case, config={**case.config, **sizes}), folder / "checkpoint")
    return export_model(folder / "checkpoint", folder / "artifact", export_options("int8"))
