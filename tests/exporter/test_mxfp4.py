"""Tensors in MXFP4: what their bytes mean, and which tensors are some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from onnxport.errors import CheckpointError
from onnxport.exporter import mxfp4
from onnxport.exporter.checkpoint import Checkpoint


def test_numbers_of_a_block() -> None:
    blocks = np.zeros((1, 1, 16), np.uint8)
    blocks[0, 0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    numbers = mxfp4.decode(blocks, np.array([[128]], np.uint8))
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = 2 * np.array([*magnitudes, *(-one for one in magnitudes)])
    np.testing.assert_array_equal(numbers[0, :16], expected)
    assert not numbers[0, 16:].any()


def test_every_scale_is_a_power_of_two_but_the_last() -> None:
    scales = np.arange(256, dtype=np.uint8)[:, None]
    numbers = mxfp4.decode(np.full((256, 1, 16), 0x22, np.uint8), scales)
    np.testing.assert_array_equal(numbers[:255, 0], np.ldexp(1.0, np.arange(255) - 127))
    assert np.isnan(numbers[255]).all()


def stored(rows: int = 24, columns: int = 96) -> dict[str, torch.Tensor]:
    """Two matrices of random numbers."""
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, rows, columns // 32, 16), generator=random)
    scales = torch.randint(110, 130, (2, rows, columns // 32), generator=random)
    return {"w_blocks": blocks.to(torch.uint8), "w_scales": scales.to(torch.uint8)}


def test_a_checkpoint_reads_them_as_transformers_does(tmp_path: Path) -> None:
    tensors = stored()
    expected = convert_moe_packed_tensors(
        tensors["w_blocks"], tensors["w_scales"], dtype=torch.float32
    )
    save_file({**tensors, "other": torch.ones(3)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names == {"w_blocks", "other"}
        checkpoint.require({"w_blocks": (2, 24, 96)})
        found = checkpoint.read("w_blocks")
        # transformers returns what is multiplied from the left
        np.testing.assert_array_equal(found.swapaxes(1, 2), expected.numpy())
        rows = checkpoint.read_rows("w_blocks", 20, 30)
        np.testing.assert_array_equal(rows, found.reshape(48, 96)[20:30])
        assert checkpoint.size_bytes("w_blocks") == found.nbytes


@pytest.mark.parametrize(
    "change",
    [
        {"w_scales": torch.zeros(2, 24, 4, dtype=torch.uint8)},
        {"w_scales": torch.zeros(2, 24, 3)},
        {"w_blocks": torch.zeros(2, 24, 3, 16)},
        {"w_blocks": torch.zeros(2, 24, 3, 8, dtype=torch.uint8)},
    ],
    ids=["other shape", "floats", "float blocks", "blocks of 16 numbers"],
)
def test_what_does_not_go_together_stays_apart(
    tmp_path: Path, change: dict[str, torch.Tensor]
) -> None:
    save_file({**stored(), **change}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names == {"w_blocks", "w_scales"}
        with pytest.raises(CheckpointError):
            checkpoint.require({"w_blocks": (2, 24, 96)})
