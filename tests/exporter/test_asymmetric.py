"""Asymmetric blocks: zero points and scales that change values less, where they are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from onnxport.errors import ExportError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.quantize import BlockFormat, quantize_rows
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints, integers
from tests.exporter.run_graphs import check_golden
from tests.exporter.test_quantize import weights
from tests.exporter.test_zero_points import products
from tests.tiers import examples

SIZE = 32
SYMMETRIC, ASYMMETRIC = BlockFormat(4, SIZE), BlockFormat(4, SIZE, is_asymmetric=True)


class Rounded:
    """What `quantize_rows` makes of values [n, K]."""

    def __init__(self, values: NDArray[np.float32], block: BlockFormat) -> None:
        n, k = values.shape
        blocks = block.num_blocks(k)
        self.quants = np.empty((n, blocks, block.blob_bytes), np.uint8)
        self.scales = np.empty((n, blocks), np.float16)
        self.meant = np.empty((n, k), np.float32)
        self.zero_points = np.empty((n, blocks), np.uint8)
        quantize_rows(
            values,
            block,
            self.quants,
            self.scales,
            self.meant,
            zero_points=self.zero_points if block.is_asymmetric else None,
        )

    def errors(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """The sum of squares of each block."""
        n, k = values.shape
        squares = np.zeros((n, self.scales.shape[1] * SIZE))
        squares[:, :k] = (self.meant - values).astype(np.float64) ** 2
        return np.asarray(squares.reshape(n, -1, SIZE).sum(-1))


@settings(max_examples=examples(60), deadline=None)
@given(
    values=arrays.arrays(
        np.float32, (3, 80), elements=st.floats(-4, 4, width=32, allow_subnormal=False)
    ),
    shift=st.sampled_from([0.0, 1.0, -3.0]),
)
def test_no_block_changes_more(values: NDArray[np.float32], shift: float) -> None:
    values = values + np.float32(shift)
    symmetric, found = (Rounded(values, block) for block in (SYMMETRIC, ASYMMETRIC))
    before, after = symmetric.errors(values), found.errors(values)
    assert (after <= before * (1 + 1e-4) + 1e-9).all()
    levels = np.stack([found.quants & 15, found.quants >> 4], -1).reshape(3, -1, SIZE)
    centred = levels.astype(np.float32) - found.zero_points[..., None].astype(np.float32)
    meant = (centred * found.scales[..., None].astype(np.float32)).reshape(3, -1)
    np.testing.assert_array_equal(found.meant, meant[:, :80])
    assert not meant[:, 80:].any()  # what fills up the last block is zero


def test_values_on_one_side_change_far_less() -> None:
    values = np.abs(weights(8, 256, seed=2))
    before, after = (Rounded(values, one).errors(values).sum() for one in (SYMMETRIC, ASYMMETRIC))
    assert after < before / 2.5


def test_normal_values_change_less() -> None:
    values = weights(64, 512, seed=3)
    before, after = (Rounded(values, one).errors(values).sum() for one in (SYMMETRIC, ASYMMETRIC))
    assert after < 0.95 * before


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_is_not_finite_shows(value: float) -> None:
    values = weights(2, 64, seed=4)
    values[1, 40] = value
    found = Rounded(values, ASYMMETRIC)
    assert np.isfinite(found.scales).tolist() == [[True, True], [True, False]]


def test_zeros_stay_zeros() -> None:
    assert not Rounded(np.zeros((2, 64), np.float32), ASYMMETRIC).meant.any()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["qwen2"], path)
    return path


def exported(folder: Path, destination: Path) -> Artifact:
    options = ExportOptions(asymmetric=True, group_size=SIZE, threads=2)
    return Artifact.read(export_model(folder, destination, options))


def test_projections_have_them_and_the_head_has_none(folder: Path, tmp_path: Path) -> None:
    artifact = exported(folder, tmp_path / "artifact")
    for role, inputs in products(artifact.load_graph("paged")).items():
        assert len(inputs) == (3 if role == "head" else 4), role
    check_golden(artifact)
    assert artifact.manifest.zero_points


def test_experts_have_none(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["qwen3-moe"], tmp_path / "checkpoint")
    model = exported(tmp_path / "checkpoint", tmp_path / "artifact").load_graph("paged")
    found = [one.name for one in model.graph.initializer if "zero_points" in one.name]
    assert found
    assert not any("experts" in name for name in found)


def test_integers_of_a_checkpoint_stay(folder: Path, tmp_path: Path) -> None:
    """Also the symmetric ones, that would otherwise be given other scales."""
    integers.store_gptq(folder, group_size=SIZE)
    options = ExportOptions(group_size=SIZE, threads=2)
    plain = Artifact.read(export_model(folder, tmp_path / "plain", options))
    found = exported(folder, tmp_path / "artifact")
    for file in ("model.onnx.data", "model.onnx", "model_gqa.onnx"):
        assert (found.path / file).read_bytes() == (plain.path / file).read_bytes()


@pytest.mark.parametrize("precision", ["int8", "fp16", "fp32"])
def test_other_precisions_are_refused(precision: str) -> None:
    with pytest.raises(ExportError, match=f"asymmetric.*int4, and the precision is {precision}"):
        ExportOptions(precision=precision, asymmetric=True)
