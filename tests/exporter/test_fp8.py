"""Checkpoints in FP8: the same artifact as of the numbers that their weights stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.checkpoint import Checkpoint
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from tests.exporter import checkpoints

LARGEST = 448.0  # of E4M3
Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}


def compressed(**weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": kind, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def blocks(weight: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of blocks, and each number's own."""
    rows, columns = weight.shape
    counts = (-(-rows // height), -(-columns // width))
    scales = torch.empty(counts)
    own = torch.empty_like(weight)
    for i in range(counts[0]):
        for j in range(counts[1]):
            where = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = weight[where].abs().max() / LARGEST
            own[where] = scales[i, j]
    return scales, own


def in_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales, own = blocks(weight, 24, 40)  # which divide neither side
    return {"_scale_inv": scales}, own


def as_one(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().max() / LARGEST).bfloat16()
    return {"_scale_inv": scale}, scale.float().expand(weight.shape)


def by_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST).bfloat16()
    return {"_scale": scales}, scales.float().expand(weight.shape)


def by_powers(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales, own = blocks(weight, 24, 40)
    exponents = (torch.log2(scales).ceil() + 127).to(torch.uint8)
    own = torch.exp2(torch.log2(own).ceil())
    return {"_scale_inv": exponents.view(torch.float8_e8m0fnu)}, own


Scaling = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
CASES: dict[str, tuple[Scaling, dict[str, Any]]] = {
    "blocks": (in_blocks, {**FP8, "weight_block_size": [24, 40]}),
    "blocks of powers": (
        by_powers,
        {**FP8, "weight_block_size": [24, 40], "scale_fmt": "ue8m0"},
    ),
    "tensors": (as_one, {**FP8, "activation_scheme": "static"}),
    "rows": (by_rows, compressed(strategy="channel")),
}


def quantize(folder: Path, scaling: Scaling, activations: str | None) -> tuple[Tensors, Tensors]:
    """A checkpoint's tensors with projections in FP8, and the numbers that they stand for."""
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = meant[name] = tensor
            continue
        scales, own = scaling(tensor.float())
        numbers = (tensor.float() / own).to(torch.float8_e4m3fn)
        stored[name] = numbers
        stored.update({name + suffix: scale for suffix, scale in scales.items()})
        if activations is not None:
            stored[name.removesuffix("weight") + activations] = torch.ones(())
        meant[name] = numbers.float() * own
    return stored, meant


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "llama") for name in CASES),
        *(("blocks", "qwen3-next"), ("rows", "qwen3-next")),  # whose rows lie together by heads
    ],
)
def test_the_artifact_is_that_of_the_numbers(tmp_path: Path, name: str, model: str) -> None:
    scaling, quantization = CASES[name]
    folder = tmp_path / "checkpoint"
    checkpoints.make({**checkpoints.CASES, **checkpoints.HYBRID}[model], folder)
    activations = {"tensors": "activation_scale", "rows": "input_scale"}.get(name)
    stored, meant = quantize(folder, scaling, activations)
    options = ExportOptions(precision="fp32", threads=2)
    save_file(meant, folder / "model.safetensors")
    expected = export_model(folder, tmp_path / "expected", options)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises((CheckpointError, UnsupportedModelError)):  # as nothing says how
        export_model(folder, tmp_path / "refused", options)
    checkpoints.edit_config(folder, quantization_config=quantization)
    found = export_model(folder, tmp_path / "found", options)
    for file in ("model.onnx", "model.onnx.data", "golden.npz"):
        assert (found / file).read_bytes() == (expected / file).read_bytes()


def test_every_number_of_eight_bits(tmp_path: Path) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
    tensors = {"w": numbers, "w_scale": torch.tensor([[0.5], [2.0]])}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names == {"w"}
        expected = numbers.float() * tensors["w_scale"]
        np.testing.assert_array_equal(checkpoint.read("w"), expected.numpy())
        np.testing.assert_array_equal(checkpoint.read_rows("w", 1, 2), expected[1:].numpy())


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({}, "quantized with None; read are 'fp8'"),
        ({**FP8, "weight_block_size": [128]}, "must be two positive integers"),
        ({**FP8, "weight_block_size": [0, 128]}, "must be two positive integers"),
        (compressed(num_bits=3, type="int"), "group 'group_0' is"),
        (compressed(num_bits=4), "group 'group_0' is"),
        (compressed(num_bits=[4], type="int"), "group 'group_0' is"),
        (compressed(type="int", dynamic=True), "group 'group_0' is"),
        (compressed(symmetric=False), "group 'group_0' is"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        ({**compressed(), "format": "marlin-24"}, "group 'group_0' is"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "and sparse"),
        ({**compressed(), "transform_config": {"config_groups": {"R1": {}}}}, "rotated by a"),
        ("fp8", "expected a value of type dict"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    folder = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["llama-one-layer"], folder)
    checkpoints.edit_config(folder, quantization_config=quantization)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        export_model(folder, tmp_path / "artifact")


def test_scales_of_another_shape_do_not_belong(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["llama-one-layer"], folder)
    stored, _ = quantize(folder, in_blocks, None)
    save_file(stored, folder / "model.safetensors")
    checkpoints.edit_config(folder, quantization_config={**FP8, "weight_block_size": [128, 128]})
    with pytest.raises(CheckpointError, match="is F8_E4M3"):
        export_model(folder, tmp_path / "artifact")


def test_a_model_of_experts_in_blocks(tmp_path: Path) -> None:
    """Each expert's tensors have scales of their own."""
    folder = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["qwen3-moe"], folder)
    stored, meant = quantize(folder, lambda weight: in_blocks(weight), None)
    options = ExportOptions(precision="fp16", threads=2)
    save_file(meant, folder / "model.safetensors")
    expected = export_model(folder, tmp_path / "expected", options)
    save_file(stored, folder / "model.safetensors")
    quantization = {**FP8, "weight_block_size": [24, 40]}
    checkpoints.edit_config(folder, quantization_config=quantization)
    found = export_model(folder, tmp_path / "found", options)
    assert json.loads((found / "manifest.json").read_text())["model"]["family"] == "qwen3_moe"
    data = "model.onnx.data"
    assert (found / data).read_bytes() == (expected / data).read_bytes()
