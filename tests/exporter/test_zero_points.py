"""Zero points: written where integers of a checkpoint need them, and nowhere else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from onnx import TensorProto
from safetensors.torch import load_file, save_file

from onnxport.exporter import export
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.packed import unpack
from onnxport.exporter.plan_parts import MatrixPlan, Part
from onnxport.exporter.quantize import BlockFormat, pack_zero_points, quantize_rows
from onnxport.exporter.target import Target
from onnxport.graphs import ops
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.builder import GraphBuilder
from tests.exporter import checkpoints, integers
from tests.exporter.run_graphs import check_golden
from tests.exporter.test_quantize import weights
from tests.tiers import examples

Levels = NDArray[np.int64]


class Kept:
    """What `quantize_rows` makes of levels [n, K], times a step for each block."""

    def __init__(self, levels: Levels, block: BlockFormat, *, may_move_zero: bool = True) -> None:
        n, k = levels.shape
        blocks = block.num_blocks(k)
        self.steps = np.linspace(0.01, 0.02, n * blocks).reshape(n, blocks).astype(np.float16)
        wide = np.repeat(self.steps.astype(np.float32), block.block_size, axis=1)[:, :k]
        self.values = levels.astype(np.float32) * wide
        self.quants = np.empty((n, blocks, block.blob_bytes), np.uint8)
        self.scales = np.empty((n, blocks), np.float16)
        self.meant = np.empty((n, k), np.float32)
        self.zero_points = np.empty((n, blocks), np.uint8) if may_move_zero else None
        self.count = quantize_rows(
            self.values,
            block,
            self.quants,
            self.scales,
            self.meant,
            self.steps.astype(np.float32),
            self.zero_points,
        )

    def quants_of(self, bits: int) -> NDArray[np.uint8]:
        """Unpacked, [n, blocks, block_size]."""
        if bits == 8:
            return self.quants
        return np.stack([self.quants & 15, self.quants >> 4], -1).reshape(*self.scales.shape, -1)


def some_levels(low: int, high: int, k: int = 96) -> Levels:
    """One row, both ends in each block of 32."""
    found = np.random.default_rng(0).integers(low, high + 1, (1, k))
    found[:, 1::32], found[:, 2::32] = low, high
    return found


@pytest.mark.parametrize(
    ("bits", "low", "high", "zero_point"),
    [
        (4, -3, 12, 3),
        (4, -3, 9, 6),  # the nearest to 8 of 3 to 6
        (4, -11, 2, 11),
        (4, 0, 15, 0),
        (4, -15, 0, 15),
        (4, 9, 15, 0),  # without a zero, for which there is room
        (4, -15, -9, 15),
        (8, -100, 155, 100),
        (8, -90, 150, 105),
        (8, -200, 20, 200),
        (8, 0, 255, 0),
        (8, -255, 0, 255),
        (8, -127, 128, 127),  # 8 bits have no scales below zero
    ],
)
def test_a_block_has_the_nearest_zero_point(
    bits: int, low: int, high: int, zero_point: int
) -> None:
    levels = some_levels(low, high)
    kept = Kept(levels, BlockFormat(bits, 32))
    assert kept.count == 3
    np.testing.assert_array_equal(kept.zero_points, np.full((1, 3), zero_point))
    np.testing.assert_array_equal(kept.scales, kept.steps)
    np.testing.assert_array_equal(kept.meant, kept.values)
    np.testing.assert_array_equal(kept.quants_of(bits).ravel(), (levels + zero_point).ravel())


@pytest.mark.parametrize(
    ("bits", "low", "high", "count"),
    [
        (4, -8, 7, 3),
        (4, -7, 8, 3),  # turned, which goes before a zero point of 7
        (4, -8, 8, 0),  # too wide
        (4, 1, 16, 0),  # and with a zero
        (4, -16, -1, 0),
        (8, -128, 127, 3),
        (8, -128, 128, 0),
        (8, -256, -1, 0),
    ],
)
def test_what_needs_none_or_does_not_fit_is_as_without(
    bits: int, low: int, high: int, count: int
) -> None:
    found = Kept(some_levels(low, high), BlockFormat(bits, 32))
    expected = Kept(some_levels(low, high), BlockFormat(bits, 32), may_move_zero=False)
    assert found.count == expected.count == count
    assert (found.zero_points == 2 ** (bits - 1)).all()
    for name in ("quants", "scales", "meant"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_a_row_are_apart(bits: int) -> None:
    """A moved zero, a symmetric block, and one that is too wide to be kept."""
    top = 2**bits - 1
    levels = np.concatenate([some_levels(*one, 32) for one in ((0, top), (-3, 3), (-9, top))], 1)
    kept = Kept(levels, BlockFormat(bits, 32))
    half = 2 ** (bits - 1)
    np.testing.assert_array_equal(kept.zero_points, [[0, half, half]])
    assert kept.count == 2
    np.testing.assert_array_equal(kept.meant[:, :64], kept.values[:, :64])


@pytest.mark.parametrize("bits", [4, 8])
def test_padding_stays_zero(bits: int) -> None:
    """A ragged block without the level 0 has quants for it all the same."""
    top = 2**bits - 1
    kept = Kept(some_levels(top - 6, top, 40), BlockFormat(bits, 32))
    assert kept.zero_points is not None
    assert kept.count == 2
    np.testing.assert_array_equal(kept.zero_points, [[0, 0]])
    np.testing.assert_array_equal(kept.meant, kept.values)
    assert not kept.quants_of(bits)[0, 1, 8:].any()
    beyond = Kept(some_levels(top - 6, top + 1, 40), BlockFormat(bits, 32))
    assert beyond.count == 0


def test_without_steps_they_are_all_alike() -> None:
    """As of a part of a joined matrix that is not in integers."""
    block = BlockFormat(4, 32)
    quants, scales = np.empty((3, 2, 16), np.uint8), np.empty((3, 2), np.float16)
    zero_points = np.zeros((3, 2), np.uint8)
    quantize_rows(weights(3, 64), block, quants, scales, zero_points=zero_points)
    assert (zero_points == 8).all()


def test_rows_that_take_turns_have_their_own() -> None:
    """Parts of an interleaved matrix are converted into every other row."""
    block = BlockFormat(4, 32)
    target = Target(
        MatrixPlan((Part("gate", 2), Part("up", 2)), 64),
        block,
        np.dtype(np.float16),
        may_move_zero=True,
    )
    for at, (low, high) in enumerate([(0, 15), (-15, 0)]):
        part = Kept(np.repeat(some_levels(low, high, 64), 2, axis=0), block)
        where = slice(at, at + 4, 2)
        assert target.convert("part", part.values, where, None, part.steps.astype("f4")) == 4
    np.testing.assert_array_equal(target.zero_points, [[0x00], [0xFF], [0x00], [0xFF]])


def test_they_are_packed_as_weights_are() -> None:
    found = np.array([[1, 2, 3], [8, 8, 15]], np.uint8)
    packed = pack_zero_points(found, BlockFormat(4, 32))
    np.testing.assert_array_equal(packed, [[0x21, 0x83], [0x88, 0x8F]])
    packed = pack_zero_points(found[:, :2], BlockFormat(4, 32))
    np.testing.assert_array_equal(packed, [[0x21], [0x88]])
    packed = pack_zero_points(found, BlockFormat(8, 32))
    np.testing.assert_array_equal(packed, found)
    for bits in (4, 8):
        alike = np.full((2, 3), 2 ** (bits - 1), np.uint8)
        assert pack_zero_points(alike, BlockFormat(bits, 32)) is None


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_whatever_fits_is_exact(data: st.DataObject) -> None:
    """Integers of any span that the quants have, which a zero is in, in any number of blocks."""
    block = BlockFormat(data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from([32, 64])))
    n, k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 300))
    top = 2**block.bits - 1
    blocks = block.num_blocks(k)
    zeros = data.draw(arrays.arrays(np.int64, (n, blocks), elements=st.integers(0, top)))
    stored = data.draw(arrays.arrays(np.int64, (n, k), elements=st.integers(0, top)))
    levels = stored - np.repeat(zeros, block.block_size, axis=1)[:, :k]
    kept = Kept(levels, block)
    assert kept.zero_points is not None
    assert kept.count == n * blocks
    np.testing.assert_array_equal(kept.meant, kept.values)
    moved = kept.quants_of(block.bits) - kept.zero_points[..., None].astype(np.float32)
    found = (moved * kept.scales[..., None].astype(np.float32)).reshape(n, -1)
    np.testing.assert_array_equal(found[:, :k], kept.values)
    assert not found[:, k:].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [256, 200, 48, 90])
def test_matmul_nbits_multiplies_with_what_is_meant(bits: int, k: int) -> None:
    n, block, top = 24, BlockFormat(bits, 32), 2**bits - 1
    generator = np.random.default_rng(0)
    zeros = np.repeat(generator.integers(0, top + 1, (n, block.num_blocks(k))), 32, axis=1)
    kept = Kept(generator.integers(0, top + 1, (n, k)) - zeros[:, :k], block)
    assert kept.zero_points is not None
    zero_points = pack_zero_points(kept.zero_points, block)
    assert zero_points is not None
    assert zero_points.nbytes == block.zero_point_bytes(n, k)
    g = GraphBuilder("one")
    y = ops.matmul_nbits(
        g,
        g.input("x", TensorProto.FLOAT, ["m", k]),
        g.constant(kept.quants),
        g.constant(kept.scales.astype(np.float32)),
        k=k,
        n=n,
        bits=bits,
        block_size=32,
        zero_points=g.constant(zero_points),
        accuracy_level=1,
    )
    g.node("Identity", [y], outputs=[g.output("y", TensorProto.FLOAT, ["m", n])])
    session = ort.InferenceSession(g.build().SerializeToString())
    rows = weights(5, k, seed=1)
    expected = rows @ kept.meant.T
    np.testing.assert_allclose(session.run(None, {"x": rows})[0], expected, atol=1e-5, rtol=1e-5)


def exported(folder: Path, destination: Path, precision: str = "int4") -> Artifact:
    options = ExportOptions(precision=precision, threads=2)
    return Artifact.read(export_model(folder, destination, options))


def products(model: onnx.ModelProto) -> dict[str, list[str]]:
    """The inputs of each MatMulNBits."""
    return {one.name: list(one.input) for one in model.graph.node if one.op_type == "MatMulNBits"}


def store(folder: Path, name: str) -> None:
    if name == "awq":
        integers.store_awq(folder)
    elif name == "gptq":
        integers.store_gptq(folder, symmetric=False)
    elif name == "gptq in 8 bits":
        integers.store_gptq(folder, symmetric=False, bits=8)
    else:
        integers.store_compressed(folder, form="pack-quantized", symmetric=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["llama"], path)
    return path


@pytest.mark.parametrize(
    ("name", "precision"),
    [("awq", "int4"), ("gptq", "int4"), ("packed", "int4"), ("gptq in 8 bits", "int8")],
)
def test_graphs_compute_with_them(folder: Path, tmp_path: Path, name: str, precision: str) -> None:
    """Projections of 2 and of 3 blocks a row, joined ones among them; the head has none."""
    store(folder, name)
    artifact = exported(folder, tmp_path / "artifact", precision)
    for graph in ("paged", "gqa"):
        model = artifact.load_graph(graph)
        tensors = {one.name: one for one in model.graph.initializer}
        found = products(model)
        assert len(found) == 9
        for role, inputs in found.items():
            if role == "head":
                assert len(inputs) == 3
                continue
            quants, scales, zero_points = (tensors[one] for one in inputs[1:])
            assert zero_points.name == scales.name.replace(".scales", ".zero_points")
            assert zero_points.data_type == TensorProto.UINT8
            n, blocks = scales.dims
            bits = 4 if precision == "int4" else 8
            assert list(zero_points.dims) == [n, -(-blocks * bits // 8)]
            assert list(quants.dims)[:2] == [n, blocks]
    check_golden(artifact)
    assert artifact.manifest.zero_points


def test_numbers_of_the_checkpoint_come_back(folder: Path, tmp_path: Path) -> None:
    """Of joined matrices each part's rows, as the file has them."""
    meant = integers.store_awq(folder)
    artifact = exported(folder, tmp_path / "artifact")
    tensors = {one.name: one for one in artifact.load_graph("paged").graph.initializer}
    prefix = "model.layers.0."
    parts = {
        "qkv": [f"self_attn.{one}_proj.weight" for one in "qkv"],
        "o": ["self_attn.o_proj.weight"],
        "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "down": ["mlp.down_proj.weight"],
    }
    for role, names in parts.items():
        quants, scales, zero_points = (
            artifact.read_tensor(tensors[f"layers.0.{role}.{one}"])
            for one in ("weight", "scales", "zero_points")
        )
        levels = np.stack([quants & 15, quants >> 4], -1).reshape(*scales.shape, -1)
        zeros = np.stack([zero_points & 15, zero_points >> 4], -1).reshape(len(zero_points), -1)
        if scales.shape[1] % 2:
            assert (zeros[:, -1] == 8).all()
        zeros = zeros[:, : scales.shape[1], None]
        found = (levels - zeros.astype(np.float32)) * scales[..., None].astype(np.float32)
        expected = np.concatenate([meant[prefix + name].numpy() for name in names])
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_ones_have_none(folder: Path, tmp_path: Path, bits: int) -> None:
    integers.store_gptq(folder, bits=bits)
    model = exported(folder, tmp_path / "artifact", f"int{bits}").load_graph("paged")
    assert {len(inputs) for inputs in products(model).values()} == {3}
    assert Artifact.read(tmp_path / "artifact").manifest.zero_points is None
    assert "zero_points" not in (tmp_path / "artifact" / "manifest.json").read_text()
    assert not [one.name for one in model.graph.initializer if "zero_points" in one.name]


def test_experts_have_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are rounded again, and counted; projections beside them are kept."""
    folder = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["qwen3-moe"], folder)
    integers.store_awq(folder)
    with caplog.at_level(logging.WARNING):
        model = exported(folder, tmp_path / "artifact").load_graph("paged")
    assert "experts have zero points" in caplog.text
    found = [one.name for one in model.graph.initializer if "zero_points" in one.name]
    assert found == [
        f"layers.{role}.zero_points"
        for role in ("0.qkv", "0.o", "0.gate_up", "0.down", "1.qkv", "1.o")
    ]


def test_the_room_that_is_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows with zero points, which a checkpoint in floats has none of."""
    asked = []
    writer = export.ArtifactWriter

    def make(*args: Any, expected_bytes: int, **options: Any) -> Any:
        asked.append(expected_bytes)
        return writer(*args, expected_bytes=expected_bytes, **options)

    monkeypatch.setattr(export, "ArtifactWriter", make)
    options = ExportOptions(group_size=32, threads=2)
    export_model(folder, tmp_path / "plain", options)
    integers.store_awq(folder)
    artifact = Artifact.read(export_model(folder, tmp_path / "artifact", options))
    sizes = {
        one.name: artifact.read_tensor(one).nbytes
        for one in artifact.load_graph("paged").graph.initializer
    }
    zero_points = sum(size for name, size in sizes.items() if name.endswith(".zero_points"))
    assert asked[1] == asked[0] + zero_points


def test_only_the_matrix_that_needs_them_has_them(folder: Path, tmp_path: Path) -> None:
    """One block of one row, of a joined matrix whose other parts are symmetric."""
    integers.store_gptq(folder)
    tensors = load_file(folder / integers.FILE)
    name = "model.layers.1.self_attn.v_proj."
    tensors[name + "qzeros"][1, 0] -= 7 << 8  # the zero of the third row's second group: 8 to 1
    high = unpack(tensors[name + "qweight"].T.numpy(), 4)[2, 32:].max() - 1
    assert high > 8
    save_file(tensors, folder / integers.FILE)
    artifact = exported(folder, tmp_path / "artifact")
    model = artifact.load_graph("paged")
    stored = {one.name: one for one in model.graph.initializer}
    (found,) = [one for one in stored if "zero_points" in one]
    assert found == "layers.1.qkv.zero_points"
    expected = np.full((128, 1), 0x88, np.uint8)
    expected[64 + 32 + 2] = (15 - high) << 4 | 8
    np.testing.assert_array_equal(artifact.read_tensor(stored[found]), expected)
