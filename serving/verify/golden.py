"""The logits that the export recorded, and the same rows computed by a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ArtifactError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import Model
from onnxport.serving.verify.sequence import LoneSequence

GOLDEN_FILE = "golden.npz"


@dataclass(frozen=True, slots=True)
class Golden:
    """The reference, computed in float32 from the weights as they are stored."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    logits_indices: NDArray[np.int32]  # [num_logits], indices into token_ids, ascending
    logits: NDArray[np.float32]  # [num_logits, vocab]


def read_golden(artifact: Artifact) -> Golden:
    """Read the golden file of an artifact. Raises ArtifactError."""
    path = artifact.path / GOLDEN_FILE
    golden = _read(path)
    vocab = artifact.manifest.model.vocab_size
    if (
        golden.logits.shape[1] != vocab
        or not 0 <= golden.token_ids.min() <= golden.token_ids.max() < vocab
    ):
        raise ArtifactError(
            f"{path} is not of this model, which has {vocab} tokens. Export the model again."
        )
    return golden


def _read(path: Path) -> Golden:
    try:
        with np.load(path, allow_pickle=False) as file:
            golden = Golden(file["token_ids"], file["logits_indices"], file["logits"])
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ArtifactError(f"cannot read {path}: {error}. Export the model again.") from error
    rows, tokens = golden.logits_indices, golden.token_ids
    if golden.logits.ndim != 2 or len(golden.logits) != len(rows) or not len(rows):
        raise ArtifactError(f"{path} has logits of shape {golden.logits.shape}. Export again.")
    if rows.min() < 0 or rows.max() >= len(tokens):
        raise ArtifactError(f"{path} has logits of tokens that it does not hold. Export again.")
    return golden


def run(model: Model, golden: Golden, first: int) -> NDArray[np.float32]:
    """Return the logits of the golden rows, [num_logits, vocab].

    The first `first` tokens are one step; each of the others is a step of its own.
    """
    return rows_of(model, golden.token_ids, golden.logits_indices.tolist(), first)


def rows_of(
    model: Model, token_ids: NDArray[np.int64], rows: list[int], first: int
) -> NDArray[np.float32]:
    """Return the logits of some rows of one sequence, [len(rows), vocab].

    Args:
        model: that computes them.
        token_ids: of the sequence, [num_tokens].
        rows: indices into `token_ids`, ascending.
        first: tokens of the first step; each of the others is a step of its own.

    Raises:
        CapacityError: the sequence does not fit the KV cache.
        ProviderError: the device failed.
    """
    total = len(token_ids)
    sequence = LoneSequence(model, total)
    bounds = [0, *range(first, total), total] if first < total else [0, total]
    found: list[NDArray[np.float32]] = []
    for start, stop in pairwise(bounds):
        asked = [row - start for row in rows if start <= row < stop]
        logits = sequence.step(token_ids[start:stop], asked or [stop - start - 1])
        if asked:
            found.extend(logits.copy())
    return np.stack(found)
