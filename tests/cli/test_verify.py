"""The comparison behind `onnxport verify` finds what is wrong, and only that."""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from onnxport.errors import ArtifactError
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.verify import EXACT, Golden, compare, read_golden, run

from .conftest import onnxport

LOGITS = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32) * 3


def test_equal_logits() -> None:
    found = compare(LOGITS, LOGITS)
    assert (found.max_diff, found.max_kl, found.top1_agreement) == (0, 0, 1)
    assert EXACT.allows(found)


def test_an_offset_moves_logits_but_not_probabilities() -> None:
    found = compare(LOGITS, LOGITS + 1)
    assert found.max_diff == pytest.approx(1 / LOGITS.std(), rel=1e-4)
    assert found.max_kl < 1e-9


def test_divergence_is_that_of_the_worst_row() -> None:
    changed = LOGITS.copy()
    changed[2, changed[2].argmin()] += 20
    found = compare(LOGITS, changed)
    p = np.exp(LOGITS[2]) / np.exp(LOGITS[2]).sum()
    q = np.exp(changed[2]) / np.exp(changed[2]).sum()
    assert found.max_kl == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-4)
    assert found.top1_agreement == 0.75
    assert not EXACT.allows(found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_fails(value: float) -> None:
    changed = LOGITS.copy()
    changed[0, 0] = value
    assert not EXACT.allows(compare(LOGITS, changed))


@pytest.mark.parametrize("first", [1, 5, 19, 20])
def test_steps_of_any_size_give_the_same_rows(first: int) -> None:
    golden = Golden(np.arange(20), np.array([3, 4, 11, 19], np.int32), LOGITS)
    options = NullOptions(vocab_size=50, block_size=4)
    whole = run(NullModel(options), golden, 20)
    assert whole.shape == (4, 50)
    assert np.array_equal(run(NullModel(options), golden, first), whole)


def change_golden(artifact: Path, folder: Path, **changes: np.ndarray) -> Path:
    """Return a copy of an artifact with another golden file, which its manifest vouches for."""
    shutil.copytree(artifact, folder)
    with np.load(folder / "golden.npz") as file:
        arrays = dict(file)
    buffer = io.BytesIO()
    np.savez(buffer, **(arrays | changes))
    (folder / "golden.npz").write_bytes(buffer.getvalue())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["golden.npz"] = {
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "size": len(buffer.getvalue()),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_other_logits_fail(artifact: Path, tmp_path: Path) -> None:
    logits = read_golden(artifact).logits
    logits[:, 0] += 0.1
    done = onnxport("verify", change_golden(artifact, tmp_path / "changed", logits=logits))
    assert done.returncode == 1
    assert "cpu, float32 arithmetic: FAILED" in done.stdout


@pytest.mark.parametrize(
    "changes",
    [
        {"logits": np.zeros((3, 5), np.float32)},
        {"logits_indices": np.array([0, 1, 2, 99], np.int32)},
        {"token_ids": np.array([None])},
    ],
)
def test_a_golden_file_that_is_none(
    artifact: Path, tmp_path: Path, changes: dict[str, np.ndarray]
) -> None:
    with pytest.raises(ArtifactError, match=r"golden\.npz"):
        read_golden(change_golden(artifact, tmp_path / "changed", **changes))
