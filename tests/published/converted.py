"""Checkpoints that llama.cpp's converter made GGUF files of, and what becomes of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph
from tests.published.converting import convert

CONTEXT = 128  # of the checkpoints, where the converter writes what it knows of published ones
ALL: Mapping[str, checkpoints.Case] = {
    **checkpoints.CASES,
    **checkpoints.HYBRID,
    **checkpoints.SPACES,
    **checkpoints.SHORT_CONV,
    **checkpoints.UNGATED_EXPERTS,
}


@dataclass(frozen=True)
class Model:
    """A checkpoint, as a published one of its family is.

    Attributes:
        case: Of the parity tests, see `checkpoints`.
        config: What its configuration says otherwise, which GGUF has no key for, as llama.cpp knows
            the published models.
        published: Keys that published configurations have, and transformers neither needs nor
            writes.
        options: Of the converter.
        context_length: Of the export.
    """

    case: str
    config: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    context_length: int = CONTEXT


def check(model: Model, folder: Path) -> None:
    """Logits of the GGUF file's artifact are those of transformers."""
    case = ALL[model.case]
    case = replace(case, config={**case.config, **model.config})
    expected = checkpoints.make(case, folder / "checkpoint")
    path = convert(
        folder / "checkpoint", folder / "model.gguf", hparams=model.published, **model.options
    )
    options = ExportOptions(precision="fp32", threads=1, context_length=model.context_length)
    artifact = Artifact.read(export_model(path, folder / "artifact", options))
    token_ids = checkpoints.tokens()
    logits = checkpoints.logits(expected, token_ids)
    assert np.ptp(logits) > 2  # that say something
    has_experts = artifact.manifest.model.experts is not None
    graph = Graph(artifact, "split" if has_experts else "decomposed")
    np.testing.assert_allclose(graph.logits(token_ids), logits, atol=1e-4)
