"""Numbers of GGUF files are those that the package gguf reads, and their steps are told."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from onnxport.errors import CheckpointError
from onnxport.exporter.checkpoint import to_float32
from onnxport.exporter.gguf import blocks, minima
from onnxport.exporter.gguf.checkpoint import GgufCheckpoint, Heads
from onnxport.exporter.gguf.shard import GgufShard
from tests.exporter import ggufs

DECODED = (*gguf.quants._type_traits, Kind.F32, Kind.F16)
IN_MULTIPLES = (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.IQ4_NL, Kind.MXFP4)
WITH_MINIMA = (Kind.Q4_1, Kind.Q4_K)


def test_types_are_those_of_the_package() -> None:
    """But for what a newer one has otherwise; see `tests/published`."""
    ours = {(number, one.name, one.size, one.num_bytes) for number, one in blocks.TYPES.items()}
    theirs = {(kind.value, kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Kind}
    assert ours - theirs == {(9, "Q8_1", 32, 36), (42, "Q2_0", 64, 18)}


def rows_of(kind: Kind, rows: int = 5) -> np.ndarray:
    columns = 2 * max(256, gguf.GGML_QUANT_SIZES[kind][0])
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    return ggufs.quantized(values, kind).view(np.uint8)


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
def test_decoded_as_the_package_does(kind: Kind) -> None:
    data = rows_of(kind)
    blocks.check_decodable(kind.name, "some")
    found = to_float32(blocks.decode(kind.name, "some", data))
    np.testing.assert_array_equal(found, gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", IN_MULTIPLES, ids=lambda kind: kind.name)
def test_numbers_are_multiples_of_steps(kind: Kind) -> None:
    data = rows_of(kind)
    numbers = blocks.decode(kind.name, "some", data).reshape(len(data), -1, 32)
    steps = blocks.steps(kind.name, data)
    levels = np.rint(numbers / steps[..., None])
    np.testing.assert_array_equal(levels * steps[..., None], numbers)
    bits = blocks.BY_NAME[kind.name].bits
    assert bits is not None
    assert -(1 << bits - 1) <= levels.min() < levels.max() < 1 << bits - 1


@pytest.mark.parametrize("kind", WITH_MINIMA, ids=lambda kind: kind.name)
def test_numbers_are_levels_above_minima(kind: Kind) -> None:
    """Of all bits that there may be in steps and minima: random bytes."""
    data = np.random.default_rng(1).integers(0, 256, rows_of(kind).shape, np.uint8)
    halves = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    halves[:, [1, 3]] &= 0xBB  # no infinities
    found = minima.read(kind.name, data)
    assert (found.levels.min(), found.levels.max()) == (0, 15)
    assert found.steps.shape == found.minima.shape == (len(data), found.levels.shape[1])
    numbers = found.levels * found.steps[..., None] + found.minima[..., None]
    expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(numbers.reshape(len(data), -1), expected)


@pytest.mark.parametrize(
    ("name", "data", "levels", "width"),
    [
        ("Q1_0", [0b00000101, *[0] * 14, 0b10000000], {0: 1, 2: 1, 127: 1}, 128),
        ("Q2_0", [0b11_10_01_00, *[0b01_01_01_01] * 15], {0: -1, 1: 0, 2: 1, 3: 2}, 64),
    ],
)
def test_types_that_the_package_cannot_decode(
    name: str, data: list[int], levels: dict[int, int], width: int
) -> None:
    """One bit, which is a sign, or two, of numbers from -1 on; the lowest bits are the first."""
    scale = np.array([0.5], np.float16).view(np.uint8)
    block = np.concatenate([scale, np.array(data, np.uint8)])
    twice = np.stack([np.concatenate([block, block])] * 3)
    blocks.check_decodable(name, "some")
    found = blocks.decode(name, "some", twice)
    expected = np.full(width, -1 if name == "Q1_0" else 0, np.float32)
    expected[list(levels)] = list(levels.values())
    np.testing.assert_array_equal(found, np.tile(expected / 2, (3, 2)))
    np.testing.assert_array_equal(blocks.steps(name, twice), np.full((3, width // 16), 0.5))


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (*DECODED, Kind.Q1_0)])
def test_a_type_that_nobody_decodes(kind: Kind) -> None:
    with pytest.raises(CheckpointError, match=rf"blk\.0\.x is {kind.name}, which .* cannot decode"):
        blocks.check_decodable(kind.name, "blk.0.x")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    for kind in (*IN_MULTIPLES, *WITH_MINIMA):
        blocks.check_decodable(kind.name, "some")
        blocks.decode(kind.name, "some", rows_of(kind))
    with pytest.raises(CheckpointError, match=r"some is Q6_K, .*pip install 'onnxport\[gguf\]'"):
        blocks.check_decodable("Q6_K", "some")


def checkpoint(path: Path, kind: Kind, heads: int = 4) -> tuple[GgufCheckpoint, np.ndarray]:
    """One matrix of 4 heads of 6 rows and its bias; what it is where no row changes its place."""
    values = np.random.default_rng(1).standard_normal((24, 256)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    data = ggufs.quantized(values, kind)
    writer.add_tensor("q.weight", data, raw_dtype=kind)
    writer.add_tensor("q.bias", values[:, 0].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    turned = dict.fromkeys(("q.weight", "q.bias"), Heads(heads, 24 // heads)) if heads else {}
    return GgufCheckpoint([GgufShard(path)], turned), gguf.quants.dequantize(data, kind)


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.BF16, Kind.Q4_0, Kind.Q4_K, Kind.Q6_K], ids=lambda k: k.name
)
def test_rows_of_heads_are_read_in_halves(tmp_path: Path, kind: Kind) -> None:
    found, values = checkpoint(tmp_path / "model.gguf", kind)
    order = np.concatenate([6 * head + np.array([0, 2, 4, 1, 3, 5]) for head in range(4)])
    with found:
        for start, stop in [(0, 24), (0, 1), (5, 13), (6, 12), (23, 24)]:
            rows = to_float32(found.read_rows("q.weight", start, stop))
            np.testing.assert_array_equal(rows, values[order][start:stop])
        bias = found.read("q.bias")
        assert bias.shape == (24,)
        assert found.read("q.weight").shape == (24, 256)
        if kind == Kind.Q4_K:
            found_minima = found.read_minima("q.weight", 5, 13, 32)
            assert found_minima is not None
            steps, least = (one[..., None] for one in found_minima)
            levels = (values[order][5:13].reshape(8, -1, 32) - least) / steps
            np.testing.assert_allclose(levels, np.rint(levels), atol=1e-4)
            assert found.read_minima("q.weight", 0, 1, 64) is None
        if kind == Kind.Q4_0:
            steps = found.read_steps("q.weight", 5, 13, 32)
            assert steps is not None
            levels = values[order][5:13].reshape(8, -1, 32) / steps[..., None]
            np.testing.assert_array_equal(levels, np.rint(levels))
            assert found.read_steps("q.weight", 0, 1, 64) is None
    plain, _ = checkpoint(tmp_path / "other.gguf", kind, heads=0)
    with plain:
        np.testing.assert_array_equal(to_float32(plain.read_rows("q.weight", 0, 24)), values)
        np.testing.assert_array_equal(plain.read("q.bias")[order], bias)


def test_what_can_stay_as_it_is(tmp_path: Path) -> None:
    for kind, bits, width, wanted in (
        (Kind.F32, None, set(), None),
        (Kind.Q6_K, None, {32}, 8),
        (Kind.Q4_K, None, {32}, 4),
        (Kind.Q4_1, None, {32}, 4),
        (Kind.Q4_0, 4, {32}, 4),
        (Kind.Q8_0, 8, {32}, 8),
        (Kind.MXFP4, 5, {32}, 8),
    ):
        found, _ = checkpoint(tmp_path / f"{kind.name}.gguf", kind)
        with found:
            packed = found.packed_matrices.get("q.weight")
            assert (packed and packed.bits) == bits
            assert found.group_widths == width
            assert found.wanted_bits("q.weight") == wanted
            assert found.with_minima == ({"q.weight"} if kind in WITH_MINIMA else set())
            is_quantized = kind in (Kind.Q6_K, *WITH_MINIMA)
            assert found.requantized == ({"q.weight": kind.name} if is_quantized else {})
