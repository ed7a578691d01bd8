"""Offsets of blocks: what keeps GGUF's Q4_1 and Q4_K, in both graphs, and nowhere else."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from onnxport.errors import CheckpointError, ExportError
from onnxport.exporter import export
from onnxport.exporter.export import export_model
from onnxport.exporter.gguf import minima
from onnxport.exporter.offsets import OffsetBlocks, keep_minima, quantize_offsets
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.quantize import BlockFormat
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints, ggufs
from tests.exporter.run_graphs import check_golden
from tests.exporter.test_expert_offsets import EXPERTS
from tests.exporter.test_gguf import WIDE, by_matrix, case, made, meant, stored
from tests.exporter.test_quantize import weights
from tests.exporter.test_zero_points import products

BLOCK = BlockFormat(4, 32)
ROLES = ("0.qkv", "0.o", "0.gate_up", "0.down", "1.qkv", "1.o", "1.gate_up", "1.down")


def room(n: int, blocks: int) -> OffsetBlocks:
    """Where n rows go."""
    halves = (np.empty((n, blocks), np.float16) for _ in range(2))
    return OffsetBlocks(np.empty((n, blocks, 16), np.uint8), *halves)


class Kept:
    """What is made of levels [n, blocks, 32], a step and a minimum of each block."""

    def __init__(self, levels: Any, steps: Any, least: Any) -> None:
        self.steps, self.least = (np.asarray(one, np.float32) for one in (steps, least))
        values = np.asarray(levels, np.float32) * self.steps[..., None] + self.least[..., None]
        self.values = values.reshape(len(values), -1)
        self.out = room(*self.steps.shape)
        self.meant = np.empty_like(self.values)
        self.count = keep_minima(self.values, self.steps, self.least, self.out, self.meant)

    @property
    def levels(self) -> NDArray[np.uint8]:
        """Unpacked, [n, blocks, 32]."""
        quants = self.out.quants
        return np.stack([quants & 15, quants >> 4], -1).reshape(*self.steps.shape, -1)


def test_levels_stay_and_halves_are_all_that_is_rounded() -> None:
    random = np.random.default_rng(0)
    levels = random.integers(0, 16, (40, 6, 32))
    steps = random.uniform(0.001, 0.1, (40, 6))
    least = -steps * random.uniform(-3, 20, (40, 6))
    kept = Kept(levels, steps, least)
    np.testing.assert_array_equal(kept.levels, levels)
    assert kept.count == steps.size
    half = 2.0**-11  # what float16 rounds by, at most
    error = np.abs(kept.meant - kept.values).reshape(40, 6, 32).max(-1)
    bound = half * (8 * kept.steps + np.abs(kept.least + 8 * kept.steps))
    assert (error <= bound * 1.01).all()
    np.testing.assert_array_equal(kept.out.meant(), kept.meant)


def test_what_float16_has_comes_back_bit_by_bit() -> None:
    levels = np.arange(32)[None, None] % 16
    kept = Kept(levels, [[0.25]], [[-1.5]])
    np.testing.assert_array_equal(kept.meant, kept.values)
    np.testing.assert_array_equal(kept.out.offsets, [[0.5]])


def test_blocks_without_a_step_are_their_minimum() -> None:
    kept = Kept(np.ones((1, 2, 32)), [[0.0, 0.5]], [[-0.375, 0.0]])
    np.testing.assert_array_equal(kept.meant, kept.values)
    np.testing.assert_array_equal(kept.levels[0, 0], np.full(32, 8))
    assert kept.count == 2


def test_steps_below_zero() -> None:
    """No file of llama.cpp has any, and nothing forbids them."""
    kept = Kept(np.arange(32)[None, None] % 16, [[-0.25]], [[1.0]])
    np.testing.assert_array_equal(kept.meant, kept.values)


def test_steps_that_float16_has_few_digits_of_are_not_counted() -> None:
    kept = Kept(np.arange(32)[None, None] % 16, [[3.3e-7]], [[-2e-6]])
    assert kept.count == 0
    np.testing.assert_allclose(kept.meant, kept.values, atol=3e-7)


@pytest.mark.parametrize(("step", "least"), [(np.nan, 0), (0.1, np.inf), (1e5, 0), (1, -1e5)])
def test_what_is_not_finite_shows(step: float, least: float) -> None:
    kept = Kept(np.ones((1, 1, 32)), [[step]], [[least]])
    assert not np.isfinite(kept.out.scales + kept.out.offsets).any()


@pytest.mark.parametrize("is_asymmetric", [False, True])
def test_rows_beside_them_are_as_in_a_matrix_of_their_own(is_asymmetric: bool) -> None:
    """Their offsets are what zero points amount to: none without, and none without any."""
    values = weights(5, 96) + np.float32(0.02)
    out, found = room(5, 3), np.empty((5, 96), np.float32)
    quantize_offsets(values, BlockFormat(4, 32, is_asymmetric=is_asymmetric), out, found)
    np.testing.assert_array_equal(found, out.meant())
    assert bool(out.offsets.any()) == is_asymmetric
    symmetric = np.empty_like(found)
    quantize_offsets(values, BLOCK, room(5, 3), symmetric)
    errors = [np.square(one - values).sum() for one in (found, symmetric)]
    assert (errors[0] < 0.9 * errors[1]) == is_asymmetric


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q4_K])
@pytest.mark.parametrize("precision", [None, "int4"])
def test_the_artifact_is_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Kind, precision: str | None
) -> None:
    """To a hundredth of a step, where quantizing again would be off by a third of one."""
    path = made(tmp_path, kind, **WIDE)
    options = ExportOptions(precision=precision, threads=2)
    with caplog.at_level(logging.INFO):
        artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
    assert "blocks of integers are stored as they are" in caplog.text
    head = "stored in " + kind.name + ", 2 of them"  # and the embedding, which have 8 bits
    assert caplog.text.count("quantized again") == caplog.text.count(head) == 1
    manifest = artifact.manifest
    assert (manifest.precision, manifest.group_size, manifest.head_precision) == (
        "int4",
        32,
        "int8",
    )
    assert (manifest.offsets, manifest.zero_points, manifest.int8_matrices) == (True, None, None)
    qkv = [("attn_q", 4), ("attn_k", 2), ("attn_v", 0)]
    for role, parts in (("qkv", qkv), ("down", [("ffn_down", 0)])):
        expected = np.concatenate([meant(path, f"blk.1.{one}.weight", at) for one, at in parts])
        found = stored(artifact, f"layers.1.{role}")
        reader = {one.name: one for one in gguf.GGUFReader(path).tensors}
        data = np.concatenate([reader[f"blk.1.{one}.weight"].data for one, _ in parts])
        largest = minima.read(kind.name, data.view(np.uint8)).steps.max()
        assert np.abs(found - expected).max() < 0.01 * largest
    check_golden(artifact)


def test_graphs_have_them_beside_their_products(tmp_path: Path) -> None:
    """With a bias, which is added last, and in what has two leading dimensions."""
    path = made(tmp_path, Kind.Q4_1, "qwen2", num_key_value_heads=2)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact"))
    for graph in ("paged", "gqa"):
        model = artifact.load_graph(graph)
        tensors = {one.name: one for one in model.graph.initializer}
        found = products(model)
        assert {len(inputs) for inputs in found.values()} == {3}
        assert sorted(one for one in tensors if one.endswith(".offsets")) == sorted(
            f"layers.{role}.offsets" for role in ROLES
        )
        for role in ROLES:
            scales, offsets = (tensors[f"layers.{role}.{one}"] for one in ("scales", "offsets"))
            assert (scales.dims, scales.data_type) == (offsets.dims, offsets.data_type)
    check_golden(artifact)


def test_a_mixture_has_bits_by_matrix(tmp_path: Path) -> None:
    """Four where all parts of a matrix are in Q4_K, and eight where one needs more."""
    path = made(tmp_path, by_matrix, **WIDE)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact"))
    model = artifact.load_graph("paged")
    bits = {
        node.name.removeprefix("layers.").replace("/", "."): attribute.i
        for node in model.graph.node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    kinds = {role.partition(".")[2]: found for role, found in bits.items() if role != "head"}
    assert kinds == {"qkv": 8, "o": 4, "gate_up": 4, "down": 8}
    assert (artifact.manifest.precision, artifact.manifest.int8_matrices) == ("int4", 4)
    names = [one.name for one in model.graph.initializer if one.name.endswith(".offsets")]
    assert names == [f"layers.{one}.offsets" for one in ("0.o", "0.gate_up", "1.o", "1.gate_up")]


def test_where_all_need_eight_bits_all_have_them(tmp_path: Path) -> None:
    """As where queries, keys and values are one matrix, and all others are in Q8_0."""

    def pick(name: str, _: object) -> Kind:
        return Kind.Q4_1 if ".attn_q." in name else Kind.Q8_0

    artifact = Artifact.read(export_model(made(tmp_path, pick), tmp_path / "artifact"))
    assert (artifact.manifest.precision, artifact.manifest.int8_matrices) == ("int8", None)
    assert artifact.manifest.offsets is None


def test_matrices_in_floats_are_not_rounded_to_four_bits(tmp_path: Path) -> None:
    def pick(name: str, _: object) -> Kind:
        return Kind.F16 if ".ffn_down." in name else Kind.Q4_0

    path = made(tmp_path, pick)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact"))
    assert (artifact.manifest.precision, artifact.manifest.int8_matrices) == ("int4", 2)
    expected = meant(path, "blk.0.ffn_down.weight")
    off = np.linalg.norm(stored(artifact, "layers.0.down") - expected)
    assert off < 0.01 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_blocks_that_another_order_cuts_get_eight_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    """Heads of 16 columns take turns there, so no block of 32 stays together."""
    one = case("qwen3.5")
    config = {**one.config, "linear_value_head_dim": 16}
    checkpoints.make(replace(one, config=config), tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", kind)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", ExportOptions(threads=2)))
    assert (artifact.manifest.precision, artifact.manifest.int8_matrices) == ("int4", 3)
    assert "to int4" not in caplog.text
    check_golden(artifact)


@pytest.mark.parametrize("rest", [Kind.Q8_0, Kind.BF16])
def test_experts_that_stay_in_mxfp4_are_no_int4(tmp_path: Path, rest: Kind) -> None:
    """As gpt-oss's files are, whose other matrices all become int8."""

    def pick(name: str, _: object) -> Kind:
        return Kind.MXFP4 if "_exps" in name else rest

    path = made(tmp_path, pick, "qwen3_moe", **EXPERTS)
    found = {}
    for kept in ("mxfp4", "same"):
        options = ExportOptions(expert_precision=kept, threads=2)
        manifest = Artifact.read(export_model(path, tmp_path / kept, options)).manifest
        found[kept] = (manifest.precision, manifest.head_precision, manifest.int8_matrices)
    assert found == {"mxfp4": ("int8", "int8", None), "same": ("int4", "int8", 4)}


def test_experts_in_mxfp4_are_the_same_in_int8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = made(tmp_path, Kind.MXFP4, "qwen3_moe", **EXPERTS)
    for precision, changes in (("int8", False), ("int4", True)):
        caplog.clear()
        options = ExportOptions(precision=precision, threads=2)
        artifact = Artifact.read(export_model(path, tmp_path / precision, options))
        found = stored(artifact, "layers.1.experts.down")
        expected = meant(path, "blk.1.ffn_down_exps.weight").reshape(found.shape)
        assert (found != expected).any() == changes
        assert ("experts are stored in MXFP4 and are quantized again" in caplog.text) == changes


def test_asymmetric_blocks_are_for_what_is_not_kept(tmp_path: Path) -> None:
    path = made(tmp_path, by_matrix, **WIDE)
    options = ExportOptions(asymmetric=True, threads=2)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
    manifest = artifact.manifest
    assert (manifest.precision, manifest.offsets, manifest.zero_points) == ("int4", True, True)
    expected = meant(path, "blk.1.attn_output.weight")
    assert np.abs(stored(artifact, "layers.1.o") - expected).max() < 1e-3
    check_golden(artifact)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_bits_by_matrix_are_of_integers(precision: str) -> None:
    with pytest.raises(ExportError, match=f"bits by matrix are 4 or 8.*is {precision}"):
        ExportOptions(precision=precision, by_matrix=True)


def test_other_groups_and_bits_have_none(tmp_path: Path) -> None:
    path = made(tmp_path, Kind.Q4_1)
    for options in (ExportOptions(precision="int8"), ExportOptions(group_size=64)):
        folder = tmp_path / f"{options.precision}-{options.group_size}"
        artifact = Artifact.read(export_model(path, folder, options))
        assert artifact.manifest.offsets is None
        assert "offsets" not in (folder / "manifest.json").read_text()


@pytest.mark.parametrize("field", [0, 2])
def test_a_scale_or_minimum_that_is_no_number(tmp_path: Path, field: int) -> None:
    path = made(tmp_path, Kind.Q4_1)
    (tensor,) = [one for one in gguf.GGUFReader(path).tensors if one.name == "blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.data_offset + field)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight holds values that are not"):
        export_model(path, tmp_path / "artifact")


def test_the_room_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    writer = export.ArtifactWriter

    def make(*args: Any, expected_bytes: int, **options: Any) -> Any:
        asked.append(expected_bytes)
        return writer(*args, expected_bytes=expected_bytes, **options)

    monkeypatch.setattr(export, "ArtifactWriter", make)
    path = made(tmp_path, Kind.Q4_1)
    plain = ExportOptions(precision="int4", group_size=64)  # which has no offsets
    for options in (ExportOptions(group_size=32), plain):
        artifact = Artifact.read(export_model(path, tmp_path / f"{options.group_size}", options))
        least = sum(
            artifact.read_tensor(one).nbytes
            for one in artifact.load_graph("paged").graph.initializer
            if "constant" not in one.name
        )
        assert asked[-1] == pytest.approx(least, rel=0.05)
