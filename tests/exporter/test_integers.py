"""Checkpoints in integers: what they stand for, and that they are kept wherever they can be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions, fitting_group
from onnxport.exporter.packed import raised, unpack
from onnxport.exporter.quantize import BlockFormat, quantize_rows
from onnxport.graphs.artifact import Artifact
from onnxport.providers.cpu.library import find_library
from tests.exporter import checkpoints, integers
from tests.exporter.run_graphs import Graph

WRITTEN: dict[str, Callable[[Path], integers.Tensors]] = {
    "gptq": integers.store_gptq,
    "gptq in 8 bits": lambda folder: integers.store_gptq(folder, bits=8),
    "gptq in 2 bits": lambda folder: integers.store_gptq(folder, bits=2, group_size=16),
    "gptq in 2 bits with zeros": lambda folder: integers.store_gptq(
        folder, bits=2, group_size=16, symmetric=False
    ),
    "gptq by rows": lambda folder: integers.store_gptq(folder, group_size=-1),
    "gptq in ragged groups": lambda folder: integers.store_gptq(folder, group_size=40),
    "gptq with zeros": lambda folder: integers.store_gptq(folder, symmetric=False),
    "gptq in 8 bits with zeros": lambda folder: integers.store_gptq(
        folder, bits=8, symmetric=False
    ),
    "gptq in another order": lambda folder: integers.store_gptq(folder, order=True),
    "gptq_v2": lambda folder: integers.store_gptq(folder, symmetric=False, second=True),
    "awq": integers.store_awq,
    "auto-round as gptq": lambda folder: integers.store_auto_round(folder, "gptq"),
    "auto-round as awq": lambda folder: integers.store_auto_round(folder, "awq"),
    "packed in another order": integers.store_in_order,
}
BY_LIBRARY: dict[str, dict[str, Any]] = {
    "packed": {"form": "pack-quantized"},
    "packed with zeros": {"form": "pack-quantized", "symmetric": False},
    "packed by rows": {"form": "pack-quantized", "group_size": None},
    "packed in 8 bits": {"form": "pack-quantized", "bits": 8},
    "bytes": {"form": "int-quantized", "bits": 8, "group_size": None},
    "bytes with zeros": {
        "form": "int-quantized",
        "bits": 8,
        "group_size": None,
        "symmetric": False,
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["llama"], path)
    return path


def golden_logits(artifact: Path) -> NDArray[np.float32]:
    with np.load(artifact / "golden.npz") as golden:
        logits: NDArray[np.float32] = golden["logits"]
        return logits


def exported(folder: Path, destination: Path, precision: str, **options: Any) -> Path:
    """An artifact with a float16 head, if it is not of float32."""
    head = "same" if precision == "fp32" else "fp16"
    chosen = ExportOptions(precision=precision, head_precision=head, threads=2, **options)
    return export_model(folder, destination, chosen)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_artifact_is_that_of_the_numbers(folder: Path, tmp_path: Path, name: str) -> None:
    meant = WRITTEN[name](folder)
    found = exported(folder, tmp_path / "found", "fp32")
    checkpoints.edit_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match="lacks 14 of 21 tensors"):  # as nothing says how
        exported(folder, tmp_path / "refused", "fp32")
    save_file(meant, folder / integers.FILE)
    expected = exported(folder, tmp_path / "expected", "fp32")
    for file in ("model.onnx", "model.onnx.data", "golden.npz"):
        assert (found / file).read_bytes() == (expected / file).read_bytes()


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_logits_are_those_of_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    model = integers.store_compressed(folder, **BY_LIBRARY[name])
    artifact = Artifact.read(exported(folder, tmp_path / "artifact", "fp32"))
    with np.load(artifact.path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "precision", "group_size"),
    [
        ("gptq", "int4", 32),
        ("gptq", "int8", 32),
        ("gptq in 8 bits", "int8", 32),
        ("gptq by rows", "int4", 128),
        ("gptq with zeros", "int4", 32),
        ("gptq with zeros", "int8", 32),
        ("gptq in 8 bits with zeros", "int8", 32),
        ("gptq_v2", "int4", 32),
        ("gptq_v2", "int8", 32),
        ("awq", "int4", 32),
        ("awq", "int8", 32),
        ("auto-round as gptq", "int4", 32),
        ("auto-round as awq", "int4", 32),
        ("packed", "int4", 32),
        ("packed by rows", "int4", 128),
        ("packed with zeros", "int4", 32),
        ("packed with zeros", "int8", 32),
        ("packed in 8 bits", "int8", 32),
        ("bytes", "int8", 128),
        ("bytes with zeros", "int8", 128),
    ],
)
def test_integers_are_kept(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    precision: str,
    group_size: int,
) -> None:
    store(folder, name)
    floats = exported(folder, tmp_path / "floats", "fp32")
    with caplog.at_level(logging.INFO):
        artifact = Artifact.read(exported(folder, tmp_path / "artifact", precision))
    assert "blocks of integers are stored as they are" in caplog.text
    assert "were quantized again" not in caplog.text
    assert artifact.manifest.group_size == group_size
    # Scales, norms, the embedding and the head have float16's digits, the projections all of theirs
    off = np.abs(golden_logits(artifact.path) - golden_logits(floats)).max()
    assert off < 0.05
    token_ids = checkpoints.tokens()
    logits = Graph(artifact, "decomposed").logits(token_ids)
    expected = Graph(Artifact.read(floats), "decomposed").logits(token_ids)
    np.testing.assert_allclose(logits, expected, atol=0.05)


@pytest.mark.parametrize(
    ("name", "precision", "options", "share"),
    [
        ("gptq in 8 bits", "int4", {}, 0.9),
        ("gptq in 8 bits with zeros", "int4", {}, 0.9),
        ("gptq in another order", "int8", {}, 1.0),
        ("packed in another order", "int4", {}, 1.0),
        ("gptq in ragged groups", "int8", {}, 1.0),
        ("gptq", "int4", {"group_size": 64}, 1.0),
        ("awq", "int4", {"group_size": 64}, 1.0),
        ("packed in 8 bits", "int4", {}, 0.9),
    ],
)
def test_what_cannot_be_kept_is_told(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    precision: str,
    options: dict[str, Any],
    share: float,
) -> None:
    store(folder, name)
    floats = golden_logits(exported(folder, tmp_path / "floats", "fp32"))
    with caplog.at_level(logging.WARNING):
        artifact = exported(folder, tmp_path / "artifact", precision, **options)
    (told,) = [one for one in caplog.records if "were quantized again" in one.msg]
    assert isinstance(told.args, tuple)
    count, changed = told.args[:2]
    assert isinstance(count, int)
    assert isinstance(changed, int)
    assert share <= changed / count <= 1
    off = np.abs(golden_logits(artifact) - floats).max()
    assert 0.1 < off < 3.2  # more than what the test above allows


def store(folder: Path, name: str) -> None:
    if name in WRITTEN:
        WRITTEN[name](folder)
    else:
        integers.store_compressed(folder, **BY_LIBRARY[name])


@pytest.mark.parametrize("by_library", [False, True])
def test_the_graphs_of_a_kernel_agree(folder: Path, tmp_path: Path, by_library: bool) -> None:
    library = find_library()
    if library is None:
        pytest.skip("the C++ kernel was not built")
    store(folder, "packed" if by_library else "gptq")
    artifact = Artifact.read(exported(folder, tmp_path / "artifact", "int4"))
    token_ids = checkpoints.tokens()
    expected = Graph(artifact, "decomposed").logits(token_ids)
    found = Graph(artifact, "custom", library).logits(token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_an_embedding_in_integers(folder: Path, tmp_path: Path) -> None:
    """Golden logits are of the table that is stored, whose steps are the checkpoint's."""
    integers.store_compressed(folder, **BY_LIBRARY["bytes"])
    tensors = load_file(folder / integers.FILE)
    name = "model.embed_tokens.weight"
    weight = tensors[name].float()
    scales = weight.abs().amax(1, keepdim=True) / 3  # 127 levels of their own would be off
    tensors |= {name: torch.round(weight / scales).to(torch.int8), f"{name}_scale": scales}
    save_file(tensors, folder / integers.FILE)
    options = ExportOptions(precision="int8", threads=2)
    artifact = Artifact.read(export_model(folder, tmp_path / "artifact", options))
    with np.load(artifact.path / "golden.npz") as golden:
        found = Graph(artifact, "decomposed").logits(golden["token_ids"])
        np.testing.assert_allclose(found[golden["logits_indices"]], golden["logits"], atol=2e-4)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_model_of_experts(tmp_path: Path, method: str) -> None:
    """Each expert's tensors are in integers of their own."""
    folder = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["qwen3-moe"], folder)
    meant = WRITTEN[method](folder)
    found = exported(folder, tmp_path / "found", "fp16")
    checkpoints.edit_config(folder, quantization_config=None)
    save_file(meant, folder / integers.FILE)
    expected = exported(folder, tmp_path / "expected", "fp16")
    data = "model.onnx.data"
    assert (found / data).read_bytes() == (expected / data).read_bytes()


PREFIX = "model.layers.1.self_attn.v_proj."
Change = Callable[[torch.Tensor], torch.Tensor] | None  # None: the tensor goes


def damage(folder: Path, key: str, change: Change) -> None:
    """Change a tensor of one matrix; where there is none, make one of a single zero."""
    tensors = load_file(folder / integers.FILE)
    old = tensors.pop(PREFIX + key, torch.zeros(1))
    if change is not None:
        tensors[PREFIX + key] = change(old)
    save_file(tensors, folder / integers.FILE)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("scales", None, "lacks .*v_proj.scales, which belongs to a matrix in integers"),
        ("qzeros", None, "lacks .*v_proj.qzeros"),
        ("scales", lambda one: one[:, :-1].contiguous(), r"v_proj.scales is F16 \[2, 31\], exp"),
        ("qzeros", lambda one: one[:1].contiguous(), r"v_proj.qzeros is I32 \[1, 4\], expected"),
        ("qzeros", lambda one: one.float(), "v_proj.qzeros is F32 .*, expected I32"),
        ("g_idx", lambda one: one + 1, "v_proj.g_idx names the groups 1 to 2, of 2"),
        ("g_idx", lambda one: one[:48].contiguous(), "has integers of 5 bits"),
        ("weight", lambda _: torch.zeros(32, 64), "holds .*v_proj.weight and .*v_proj.qweight"),
        ("weight_shape", lambda _: torch.tensor([32, 65]), r"is \[32, 65\], and .* is \[32, 8\]"),
        ("weight_shape", lambda _: torch.tensor([32]), "not two numbers"),
        ("weight_shape", lambda one: one.to(torch.int16), "not two numbers"),
        (
            "weight_scale",
            lambda one: one[:, :0].contiguous(),
            r"is F32 \[32, 0\], expected numbers",
        ),
        ("weight_shape", None, "lacks .*weight_shape"),
        ("weight_scale", lambda one: one[:5].contiguous(), "read are scales of the matrix, of row"),
        ("weight_scale", lambda one: one[:, :1].repeat(1, 3), r"is \[4, 2\], expected \[4, 3\]"),
        (
            "weight_zero_point",
            lambda one: one[:2].contiguous(),
            r"zero_point is \[2, 2\], expected",
        ),
    ],
)
def test_a_damaged_matrix_is_refused(
    folder: Path, tmp_path: Path, key: str, change: Change, message: str
) -> None:
    """Of GPTQ, and of compressed-tensors, whose tensors' names begin with "weight_"."""
    store(folder, "packed with zeros" if key.startswith("weight_") else "gptq")
    damage(folder, key, change)
    with pytest.raises(CheckpointError, match=message):
        exported(folder, tmp_path / "artifact", "fp32")


def test_biases_of_zeros_are_left_out(folder: Path, tmp_path: Path) -> None:
    """Older GPTQ checkpoints have one beside every matrix, whether the model has biases or not."""
    integers.store_gptq(folder)
    plain = exported(folder, tmp_path / "plain", "int4")
    tensors = load_file(folder / integers.FILE)
    for name in [one for one in tensors if one.endswith(".scales")]:
        tensors[name.replace("scales", "bias")] = torch.zeros(tensors[name].shape[1]).half()
    save_file(tensors, folder / integers.FILE)
    found = exported(folder, tmp_path / "found", "int4")
    data = "model.onnx.data"
    assert (found / data).read_bytes() == (plain / data).read_bytes()
    tensors[PREFIX + "bias"][3] = 1
    save_file(tensors, folder / integers.FILE)
    with pytest.raises(CheckpointError, match=r"does not use: .*v_proj.bias\."):
        exported(folder, tmp_path / "refused", "int4")


def test_columns_that_did_not_move(folder: Path, tmp_path: Path) -> None:
    """Of these compressed-tensors may say that they are in group -1."""
    integers.store_compressed(folder, form="pack-quantized")
    plain = exported(folder, tmp_path / "plain", "int4")
    tensors = load_file(folder / integers.FILE)
    for name in [one for one in tensors if one.endswith(".weight_packed")]:
        columns = int(tensors[name.replace("packed", "shape")][1])
        tensors[name.replace("packed", "g_idx")] = torch.full((columns,), -1, dtype=torch.int32)
    save_file(tensors, folder / integers.FILE)
    found = exported(folder, tmp_path / "found", "int4")
    data = "model.onnx.data"
    assert (found / data).read_bytes() == (plain / data).read_bytes()


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "'gptq' to 3 bits; read are"),
        ({"quant_method": "gptq"}, "bits of 'gptq' are None"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "format": ["gptq"]}, "in the format"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "bits are 8"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp'"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:gptq"},
            "is 'auto_round:gptq'",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "rotation_config": {"hadamard_type": "x"}},
            "and rotation_config is there",
        ),
        ({"quant_method": "bitsandbytes"}, "with 'bitsandbytes'; read are 'fp8', 'mxfp4', 'gptq'"),
    ],
)
def test_what_is_not_read_is_refused(
    folder: Path, tmp_path: Path, quantization: dict[str, Any], message: str
) -> None:
    checkpoints.edit_config(folder, quantization_config=quantization)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        exported(folder, tmp_path / "artifact", "fp32")


@pytest.mark.parametrize(
    ("widths", "size"),
    [([], 128), ([128, 256], 128), ([64, 128], 64), ([96], 32), ([16], 32), ([32, 64], 32)],
)
def test_groups_that_fit(widths: list[int], size: int) -> None:
    assert fitting_group(widths) == size


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_are_raised_as_they_were_lowered(bits: int) -> None:
    """By whole words, so that one below 0 has borrowed from the next."""
    levels = torch.randint(0, 1 << bits, (64, 64), generator=torch.Generator().manual_seed(bits))
    levels[:, ::3] = 0
    none = torch.zeros(1, 1)
    stored = integers.as_gptq(integers.Numbers(levels.T, none, levels.T, none), bits, 1)
    lowered = stored["qzeros"].numpy()
    assert (unpack(lowered, bits) == (1 << bits) - 1).any()
    np.testing.assert_array_equal(unpack(raised(lowered, 1, bits), bits), levels.numpy())
    assert raised(lowered, 0, bits) is lowered


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_are_unpacked(bits: int) -> None:
    levels = torch.randint(0, 2**bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    np.testing.assert_array_equal(unpack(integers.words(levels, bits).numpy(), bits), levels)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("turned", [False, True])
def test_steps_are_scales_where_quants_suffice(bits: int, turned: bool) -> None:
    """All levels but the lowest, or but the highest, in float16 or where it has few digits."""
    end = 2 ** (bits - 1)
    generator = np.random.default_rng(0)
    levels = generator.integers(-end, end, (4, 64))
    levels[:, :2] = [-end, end - 1]
    if turned:
        levels = -levels
    steps = np.full((4, 2), 0.0123, np.float16).astype(np.float32)
    steps[2] = 3e-8  # which float16 has no digits of
    values = (levels * np.repeat(steps, 32, axis=1)).astype(np.float32)
    quants = np.empty((4, 2, 32 * bits // 8), np.uint8)
    scales, meant = np.empty((4, 2), np.float16), np.empty((4, 64), np.float32)
    kept = quantize_rows(values, BlockFormat(bits, 32), quants, scales, meant, steps)
    rows = [0, 1, 3]
    if turned and bits == 8:  # which has no scales below zero: the first blocks have 128 steps
        assert kept == 3
        return
    assert kept == 6
    np.testing.assert_array_equal(scales[rows].astype(np.float32), (1 - 2 * turned) * steps[rows])
    np.testing.assert_array_equal(meant[rows], values[rows])
