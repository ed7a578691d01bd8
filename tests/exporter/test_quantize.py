"""Block-wise quantization: the layout of MatMulNBits, its accuracy, and the graphs that use it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.quantize import BlockFormat, quantize_rows
from onnxport.graphs import ops
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.builder import GraphBuilder
from onnxport.providers.cpu.library import find_library
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph, Kind

FORMATS = [BlockFormat(bits, size) for bits in (4, 8) for size in (32, 64, 128)]
Quantized = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float32]]


def quantize(values: NDArray[np.float32], block: BlockFormat) -> Quantized:
    n, k = values.shape
    quants = np.empty((n, block.num_blocks(k), block.blob_bytes), np.uint8)
    scales = np.empty((n, block.num_blocks(k)), np.float16)
    meant = np.empty((n, k), np.float32)
    quantize_rows(values, block, quants, scales, meant)
    return quants, scales, meant


def dequantize(
    quants: NDArray[np.uint8], scales: NDArray[np.float16], block: BlockFormat, k: int
) -> NDArray[np.float32]:
    """The operator schema's formula, written out."""
    levels = quants
    if block.bits == 4:
        levels = np.stack([quants & 15, quants >> 4], axis=-1).reshape(*quants.shape[:2], -1)
    values = (levels.astype(np.float32) - 2 ** (block.bits - 1)) * scales[..., None].astype("f4")
    return values.reshape(len(quants), -1)[:, :k]


def weights(n: int, k: int, seed: int = 0) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    return generator.normal(0, 0.05, (n, k)).astype(np.float32)


@pytest.mark.parametrize("block", FORMATS)
@pytest.mark.parametrize("k", [128, 96, 40, 200])
def test_what_is_meant_is_what_is_stored(block: BlockFormat, k: int) -> None:
    values = weights(37, k)
    kept = values.copy()
    quants, scales, meant = quantize(values, block)
    np.testing.assert_array_equal(values, kept)
    np.testing.assert_array_equal(dequantize(quants, scales, block, k), meant)


@pytest.mark.parametrize("block", FORMATS)
def test_each_value_is_the_nearest_level(block: BlockFormat) -> None:
    values = weights(16, 256)
    _, scales, meant = quantize(values, block)
    steps = np.repeat(np.abs(scales.astype(np.float32)), block.block_size, axis=1)
    error = np.abs(meant - values)
    # Of 4 bits a scale may cover 0.85 of what is there: 9.4 steps from zero become 7.
    farthest, share = (2.45, 0.95) if block.bits == 4 else (0.501, 1.0)
    assert (error <= steps * farthest).all()
    assert np.mean(error <= steps * 0.501) >= share
    assert np.sqrt(np.mean(error**2)) < 0.05 * {4: 0.12, 8: 0.01}[block.bits]


@pytest.mark.parametrize("size", [32, 128])
def test_four_bits_change_less_than_with_room_for_all(size: int) -> None:
    """A tenth of the squares of errors, where values are distributed normally; no block more."""
    values, block = weights(64, 1024), BlockFormat(4, size)
    _, _, meant = quantize(values, block)
    grouped = values.reshape(64, -1, size)
    farthest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1)[..., None], -1)
    scales = (farthest / -8).astype(np.float16).astype(np.float32)
    roomy = np.clip(np.floor(grouped / scales + 0.5), -8, 7) * scales
    before = np.square(roomy - grouped).sum(-1)
    after = np.square(meant.reshape(grouped.shape) - grouped).sum(-1)
    assert after.sum() < 0.93 * before.sum()
    assert (after <= before * 1.01).all()


def test_four_bits_keep_what_they_have_levels_for() -> None:
    levels = np.random.default_rng(0).integers(-8, 8, (4, 64))
    levels[:, 0], levels[:, 40] = -8, -8
    for scale in (0.5, -0.25, 0.03):
        values = (levels * np.float32(np.float16(scale))).astype(np.float32)
        _, _, meant = quantize(values, BlockFormat(4, 32))
        np.testing.assert_array_equal(meant, values)


def test_a_single_value_is_kept() -> None:
    values = np.zeros((2, 32), np.float32)
    values[0, 3], values[1, 7] = 4.0, -4.0
    _, scales, meant = quantize(values, BlockFormat(4, 32))
    np.testing.assert_array_equal(meant, values)
    np.testing.assert_array_equal(scales, [[-0.5], [0.5]])


def test_the_even_element_is_in_the_low_nibble() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :2] = [-8, 3]
    quants, scales, _ = quantize(values, BlockFormat(4, 32))
    assert scales[0, 0] == 1
    assert quants[0, 0, 0] == (3 + 8) << 4
    assert quants[0, 0, 1] == 0x88


@pytest.mark.parametrize("block", FORMATS)
def test_quants_are_chosen_against_the_rounded_scale(block: BlockFormat) -> None:
    values = weights(64, 512) * 1e-3  # scales in float16's subnormal range
    _, scales, meant = quantize(values, block)
    wide = np.repeat(scales.astype(np.float32), block.block_size, axis=1)
    levels = np.divide(values, wide, out=np.zeros_like(values), where=wide != 0)
    low, high = -block.zero_point + (block.bits == 8), block.zero_point - 1
    best = np.clip(np.floor(levels + 0.5), low, high) * wide
    np.testing.assert_allclose(np.abs(best - values), np.abs(meant - values), atol=1e-9)


def test_eight_bits_have_no_level_of_minus_128() -> None:
    """Nor where the scale is subnormal, and rounding makes it smaller by per cents."""
    magnitudes = np.geomspace(2e-6, 2e-3, 4000, dtype=np.float32)[:, None]
    values = magnitudes * np.linspace(-1, 1, 128, dtype=np.float32)
    block = BlockFormat(8, 128)
    quants, scales, _ = quantize(values, block)
    assert (scales > 0).sum() > 3000
    assert quants[scales[:, 0] > 0].min() == 1


@pytest.mark.parametrize("block", FORMATS)
def test_zeros_and_values_below_the_scale_stay_zero(block: BlockFormat) -> None:
    values = np.full((2, 64), 1e-8, np.float32)
    values[0] = 0
    _, _, meant = quantize(values, block)
    assert not meant.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e9])
@pytest.mark.parametrize("block", FORMATS[::3])
def test_what_has_no_scale_shows_as_a_scale_that_is_not_finite(
    block: BlockFormat, bad: float
) -> None:
    values = weights(3, 128)
    values[1, 5] = bad
    _, scales, _ = quantize(values, block)
    finite = np.isfinite(scales).all(-1)
    np.testing.assert_array_equal(finite, [True, False, True])


@pytest.mark.parametrize("block", FORMATS)
@pytest.mark.parametrize("k", [256, 200, 48])
def test_matmul_nbits_multiplies_with_what_is_meant(block: BlockFormat, k: int) -> None:
    n = 24
    quants, scales, meant = quantize(weights(n, k), block)
    g = GraphBuilder("one")
    x = g.input("x", TensorProto.FLOAT, ["m", k])
    y = ops.matmul_nbits(
        g,
        x,
        g.constant(quants),
        g.constant(scales.astype(np.float32)),
        k=k,
        n=n,
        bits=block.bits,
        block_size=block.block_size,
        accuracy_level=1,
    )
    g.node("Identity", [y], outputs=[g.output("y", TensorProto.FLOAT, ["m", n])])
    session = ort.InferenceSession(g.build().SerializeToString())
    rows = weights(5, k, seed=1)
    np.testing.assert_allclose(session.run(None, {"x": rows})[0], rows @ meant.T, atol=1e-5)


VARIANTS = [
    ("llama", ExportOptions(precision="int4", group_size=32)),
    ("llama", ExportOptions(precision="int8", group_size=64)),
    ("llama", ExportOptions(precision="int4", group_size=32, head_precision="same")),
    ("llama", ExportOptions(precision="fp16", head_precision="int8", group_size=32)),
    ("llama-tied", ExportOptions(precision="int4", group_size=64)),
    ("llama-tied", ExportOptions(precision="int4", group_size=32, head_precision="fp16")),
    ("llama-tied", ExportOptions(precision="fp16")),
    ("llama-mqa-biases", ExportOptions(precision="int4", group_size=32)),
    ("mistral-window", ExportOptions(precision="fp16")),
    ("qwen2", ExportOptions(precision="int8", group_size=32)),
    ("qwen2-ragged", ExportOptions(precision="int4", group_size=32)),
    ("qwen2-ragged", ExportOptions(precision="int8", group_size=128)),
    ("qwen3", ExportOptions(precision="int4", group_size=32)),
    ("qwen3-biases", ExportOptions(precision="int4", group_size=128, head_precision="int4")),
    ("gemma3", ExportOptions(precision="int4", group_size=32)),
    ("gemma3", ExportOptions(precision="fp16")),
    ("gemma3-linear", ExportOptions(precision="int8", group_size=64)),
    ("olmo2", ExportOptions(precision="int8", group_size=32)),
    ("olmo3", ExportOptions(precision="fp16")),
    ("gemma2", ExportOptions(precision="int4", group_size=32)),
    ("qwen3-moe", ExportOptions(precision="int4", group_size=32)),
    ("olmoe", ExportOptions(precision="int8", group_size=128)),
    ("granitemoe", ExportOptions(precision="int4", group_size=64)),
    ("mixtral", ExportOptions(precision="fp16")),
]
# Each precision; each checkpoint but for those with biases, gemma3-linear, olmo3 and mixtral.
FAST = (0, 6, 8, 9, 11, 12, 14, 17, 19, 20, 21, 22)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*one, marks=[] if index in FAST else pytest.mark.slow)
        for index, one in enumerate(VARIANTS)
    ],
    ids=lambda v: v if isinstance(v, str) else f"{v.precision}-{v.group_size}-{v.head}",
)
def test_graphs_compute_with_the_stored_weights(
    tmp_path: Path, name: str, options: ExportOptions
) -> None:
    model = checkpoints.make(checkpoints.CASES[name], tmp_path / "checkpoint")
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    artifact = Artifact.read(path)
    assert artifact.manifest.precision == options.precision
    assert artifact.manifest.head_precision == options.head
    assert artifact.manifest.activation_dtype == "float16"
    with np.load(path / "golden.npz") as golden:
        token_ids, rows, expected = (
            golden[key] for key in ("token_ids", "logits_indices", "logits")
        )
    kernel = find_library()
    has_experts = artifact.manifest.model.experts is not None
    kinds: list[Kind] = ["gqa", "decomposed", *(["custom"] if kernel else [])]
    for kind in (*kinds, *(["split"] if has_experts else [])):
        found = Graph(artifact, kind, kernel).logits(token_ids)[rows]
        # ONNX Runtime's experts of 8 bits round what they read to int8
        rounds = has_experts and options.precision == "int8" and kind != "split"
        np.testing.assert_allclose(found, expected, atol=0.3 if rounds else 1e-4, err_msg=kind)
    # and the weights are still the model's: closer, the more bits there are
    exact = checkpoints.logits(model, token_ids)[rows]
    similar = np.corrcoef(exact.ravel(), expected.ravel())[0, 1]
    assert similar > {"int4": 0.7, "int8": 0.998, "fp16": 0.998}[options.precision]


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["llama-tied"], tmp_path / "checkpoint")
    sizes = {}
    for head in ("int8", "int4", "fp16"):
        options = ExportOptions(precision="int4", group_size=32, head_precision=head)
        path = export_model(tmp_path / "checkpoint", tmp_path / head, options)
        model = Artifact.read(path).load_graph("paged")
        regions = {}
        for tensor in model.graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if tensor.name.startswith(("embedding", "head")) and "offset" in entries:
                regions[int(entries["offset"])] = int(entries["length"])
        sizes[head] = sum(regions.values())
    elements = checkpoints.VOCAB * 64
    scales = 2 * elements // 32
    assert sizes == {
        "int8": elements + scales,
        "int4": elements // 2 + scales,
        "fp16": 2 * elements,
    }
