"""Adapters in the slots that AddLora reads: where numbers lie, and what integers make of them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import AdapterError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import (
    PROJECTIONS,
    LoraAdapter,
    LoraDelta,
    LoraProduct,
    Projection,
    SlotDtype,
    a_bytes,
    slot_layout,
)
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.adapter_slots import AdapterSlots, slots_bytes
from onnxport.providers.base import LoadOptions
from onnxport.providers.device_slots import DeviceSlots
from onnxport.providers.ort import CPU
from onnxport.providers.packed_columns import PackedColumns, in_int4, in_int8, quantized
from onnxport.providers.packed_rows import packed
from tests.conformance.adapting import make_adapter
from tests.kernels.integer_adapters import NOTHING, StoredA, StoredB, packed_a, packed_b
from tests.providers.conftest import ArtifactMaker

PRODUCTS = [LoraProduct(1, "qkv", 4, 32), LoraProduct(1, "down", 8, 64)]
OPTIONS = LoadOptions(max_adapters=2, max_adapter_rank=4)
INTEGERS: tuple[SlotDtype, ...] = ("int8", "int4")
DTYPES: tuple[SlotDtype, ...] = ("float32", "float16", "bfloat16", *INTEGERS)


@pytest.fixture
def spec(tiny_artifact: ArtifactMaker) -> ArchSpec:
    return Artifact.read(tiny_artifact("llama", "fp32")).manifest.model


def slots(spec: ArchSpec, dtype: SlotDtype) -> tuple[AdapterSlots, dict[str, NDArray[Any]]]:
    """Slots, and what a graph reads of them."""
    placed: dict[str, NDArray[Any]] = {}

    def place(arrays: Any) -> Any:
        placed.update(arrays)
        return arrays

    return AdapterSlots(PRODUCTS, spec, OPTIONS, dtype, place), placed


def rows_at(slot: NDArray[Any], begin: int, rank: int, features: int) -> tuple[NDArray[Any], int]:
    """Rows of a slot, read as the operator does, and where they end."""
    panels = -(-features // 64)
    end = begin + panels * rank * 64
    found = slot[begin:end].reshape(panels, rank, 64).transpose(1, 0, 2).reshape(rank, -1)
    return found[:, :features], end


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slot_is_filled_as_its_layout_says(spec: ArchSpec, dtype: SlotDtype) -> None:
    """A, then B, of each projection in turn; also where a larger adapter was before."""
    found, placed = slots(spec, dtype)
    found.put(2, LoraAdapter(full(spec, rank=4)))
    found.remove(2)
    adapter = make_adapter(spec, 2)  # of rank 3 in this layer
    without_k = {key: delta for key, delta in adapter.deltas.items() if key[1] != "k_proj"}
    found.put(2, LoraAdapter(without_k))
    ranks, weights = placed["lora.ranks"], placed["lora.weights"]
    assert weights.dtype == ("int8" if dtype in INTEGERS else dtype)
    assert ranks[2, 1].tolist() == [3, 0, 3, 0, 0, 0, 3]
    assert not ranks[[0, 1]].any()
    begins = slot_layout(PRODUCTS, spec, 4, dtype)[0]
    wanted: list[tuple[LoraProduct, list[Projection]]] = [
        (PRODUCTS[0], ["q_proj", "v_proj"]),
        (PRODUCTS[1], ["down_proj"]),
    ]
    for product, projections in wanted:
        begin = begins[product]
        if dtype in INTEGERS:
            rows = [rounded_a(product, adapter.deltas[1, name].a, dtype) for name in projections]
            depth = product.in_features(spec)
            a = packed_a(rows, depth, product.bits, product.block_size, dtype)
            begin += len(a)
            assert_packed(weights[1, begin - len(a) : begin], a)
        for projection in projections:
            delta = adapter.deltas[1, projection]
            if dtype in INTEGERS:
                pack = in_int8(delta.b.T) if dtype == "int8" else in_int4(delta.b.T, delta.a)
                begin += len(pack.stored)
                np.testing.assert_array_equal(
                    weights[1, begin - len(pack.stored) : begin], pack.stored
                )
                key = (2, 1, PROJECTIONS.index(projection))
                np.testing.assert_array_equal(placed["lora.scales"][key][:3], pack.scales)
                continue
            for given in (delta.a, delta.b.T):
                found_rows, begin = rows_at(weights[1], begin, 3, given.shape[1])
                np.testing.assert_array_equal(found_rows, given.astype(dtype))
    found.remove(2)
    assert not ranks.any()


def rounded_a(
    product: LoraProduct, rows: NDArray[np.float32], dtype: SlotDtype = "int8"
) -> StoredA:
    """Rows of A in integers."""
    rank, depth = rows.shape
    padded = np.zeros((rank, -(-depth // product.block_size) * product.block_size))
    padded[:, :depth] = rows
    blocks = padded.reshape(rank, -1, product.block_size)
    largest = np.abs(blocks).max(-1)
    scales = (largest / (119 if product.bits == 4 else 127)).astype(np.float32)
    least, most = -128, 127
    if dtype == "int4" and product.bits == 4:
        sign = np.where(blocks.max(-1) < largest, 1, -1)  # of what is left of the largest at -8
        scales, least, most = (sign * largest / 8 + 0.0).astype(np.float32), -8, 7
    steps = np.repeat(scales.astype(np.float64), product.block_size, 1)[:, :depth]
    numbers = np.divide(rows, steps, out=np.zeros(rows.shape), where=steps != 0)
    rounded = np.rint(numbers).clip(least, most).astype(np.int64)
    return StoredA(rounded, scales, product.block_size)


def assert_packed(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    """Bytes are as wanted, where these say something."""
    filled = wanted != NOTHING
    np.testing.assert_array_equal(found[filled], wanted[filled])
    assert filled.mean() > 0.05


def full(spec: ArchSpec, rank: int) -> dict[Any, LoraDelta]:
    deltas = make_adapter(spec, 2).deltas
    return {
        key: LoraDelta(np.ones((rank, d.a.shape[1]), "f"), np.ones((d.b.shape[0], rank), "f"))
        for key, d in deltas.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # ONNX Runtime expands no other here
def test_slots_of_a_device_hold_what_those_of_the_host_do(spec: ArchSpec, dtype: SlotDtype) -> None:
    """Each is copied by itself, and no other one is touched."""
    copied: list[int] = []

    def copy(address: int, numbers: NDArray[Any]) -> None:
        copied.append(numbers.nbytes)
        ctypes.memmove(address, numbers.ctypes.data, numbers.nbytes)

    memory = DeviceSlots(CPU, copy)
    there = AdapterSlots(PRODUCTS, spec, OPTIONS, dtype, memory.place, memory.write)
    here, placed = slots(spec, dtype)
    values = there.values(())
    assert values is there.values((1, 2))

    def same() -> None:
        for name, array in placed.items():
            value = values[name]
            found = (ctypes.c_byte * array.nbytes).from_address(value.data_ptr())
            assert (value.shape(), bytes(found)) == (list(array.shape), array.tobytes())

    same()
    for slot, seed in ((2, 1), (1, 2)):
        for one in (here, there):
            one.put(slot, make_adapter(spec, seed))
        same()
    for one in (here, there):
        one.remove(2)
    same()
    weights = placed["lora.weights"].nbytes // 2
    ranks = placed["lora.ranks"].nbytes
    assert copied == [ranks, weights, ranks, ranks, weights, ranks, ranks]


def test_scales_bring_int8_back(spec: ArchSpec) -> None:
    found, placed = slots(spec, "int8")
    adapter = make_adapter(spec, 2)
    found.put(1, adapter)
    scales, delta = placed["lora.scales"], adapter.deltas[1, "v_proj"]
    assert scales.shape == (3, spec.num_layers, 7, 4)
    _, scales_b = quantized(delta.b.T)
    np.testing.assert_allclose(scales[1, 1, 2, :3], scales_b, rtol=1e-6)
    assert not scales[1, 1, 2, 3:].any()
    assert not scales[[0, 2]].any()
    found.remove(1)
    assert not scales.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_memory_of_slots(spec: ArchSpec, dtype: SlotDtype) -> None:
    _, placed = slots(spec, dtype)
    assert ("lora.scales" in placed) == (dtype in INTEGERS)
    counted = slots_bytes(PRODUCTS, spec, OPTIONS, dtype)
    assert counted == sum(array.nbytes for array in placed.values())


@pytest.mark.parametrize("rank", [16, 64])
def test_int4_takes_little_more_than_half_of_int8(spec: ArchSpec, rank: int) -> None:
    wide = replace(spec, hidden_size=896, intermediate_size=4864)
    products = [LoraProduct(0, "gate_up", 4, 128), LoraProduct(0, "down", 4, 128)]
    sizes = {dtype: slot_layout(products, wide, rank, dtype)[1] for dtype in INTEGERS}
    assert 0.5 < sizes["int4"] / sizes["int8"] < 0.6


@pytest.mark.parametrize("size", [1e-42, 1e-20, 1.0, 1e38])
def test_int8_is_off_by_half_a_scale_at_most(size: float) -> None:
    random = np.random.default_rng(0)
    rows = (random.standard_normal((5, 321)) * np.geomspace(1e-2, 1, 5)[:, None] * size).clip(
        -3e38, 3e38
    )
    rows[2] = 0
    given = rows.astype(np.float32)
    found, scales = quantized(given)
    assert (found.dtype, found[2].any(), scales[2]) == (np.int8, False, 0)
    assert np.abs(found).max(axis=1).tolist() == [127, 127, 0, 127, 127]
    off = np.abs(found * scales[:, None] - given.astype(np.float64))
    assert (off <= scales[:, None] * 0.5000001).all()


def unpacked(packed: PackedColumns, rank: int, columns: int) -> StoredB:
    """Numbers and scales of B in int4, as the operator reads them."""
    panels = packed.stored.view(np.uint8).reshape(-(-columns // 64), -1)
    own = panels[:, :64].view(np.int8).ravel()[:columns]
    bytes_of = panels[:, 64:].reshape(len(panels), -1, 64, 4)
    halves = np.stack([bytes_of & 15, bytes_of >> 4], axis=2)  # panels, groups, halves, columns, 4
    rows = halves.transpose(1, 2, 4, 0, 3).reshape(bytes_of.shape[1] * 8, -1)
    numbers = rows[:rank, :columns].astype(np.int8) - np.int8(8)
    assert isinstance(packed.scales, np.ndarray)
    return StoredB(numbers, packed.scales, own)


@pytest.mark.parametrize("size", [1e-37, 1e-20, 1.0, 1e30])
@pytest.mark.parametrize(("rank", "columns"), [(1, 64), (5, 321), (16, 130)])
def test_int4_is_off_by_a_step_at_most(size: float, rank: int, columns: int) -> None:
    """Rows and columns of magnitudes far apart; of each one is 0."""
    random = np.random.default_rng(rank)
    rows = random.standard_normal((rank, columns)) * np.geomspace(1e-2, 1, rank)[:, None]
    rows *= np.geomspace(0.05, 1, columns) * size
    rows[:, 7] = 0
    if rank > 2:
        rows[2] = 0
    given, a = rows.astype(np.float32), random.standard_normal((rank, 40)).astype(np.float32)
    packed = in_int4(given, a)
    found = unpacked(packed, rank, columns)
    assert found.numbers.min() == -8
    assert not found.numbers[:, 7].any()
    step = found.scales[:, None].astype(np.float64) * found.columns
    off = np.abs(found.numbers * step - given)
    assert (off <= np.abs(step) * 1.0001).all()
    assert (off <= np.abs(step) * 0.5001).mean() > 0.9
    if rank % 8 == 0:  # or bytes are filled in part
        assert_packed(packed.stored, packed_b(found, "int4"))


def test_rows_whose_a_is_larger_are_rounded_less() -> None:
    """What a row adds is its factor, which A makes, times its numbers."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((8, 640)).astype(np.float32)
    a = random.standard_normal((8, 640)).astype(np.float32)
    a[3] *= 100
    found = unpacked(in_int4(rows, a), 8, 640)
    off = found.numbers * found.scales[:, None].astype(np.float64) * found.columns - rows
    errors = np.sqrt(np.square(off).mean(axis=1))
    assert errors[3] < 0.3 * np.delete(errors, 3).min()


def test_what_int4_has_no_scale_for(spec: ArchSpec) -> None:
    found, placed = slots(spec, "int4")
    adapter = make_adapter(spec, 2)
    delta = adapter.deltas[1, "q_proj"]
    delta.a[0], delta.a[1:] = 1e-38, 1e30
    delta.b[:, 0], delta.b[:, 1:] = 3e38, 1e30
    with pytest.raises(AdapterError, match="B of q_proj of layer 1 are too large, or too far ap"):
        found.put(1, adapter)
    assert not any(array.any() for array in placed.values())


def test_what_float16_cannot_hold(spec: ArchSpec) -> None:
    found, placed = slots(spec, "float16")
    adapter = make_adapter(spec, 2)
    adapter.deltas[1, "q_proj"].b[3] = 1e5
    with pytest.raises(AdapterError, match="too large for float16; keep adapters in another type"):
        found.put(1, adapter)
    assert not any(array.any() for array in placed.values())


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e37])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_blocks_of_a_have_their_own_scales(dtype: SlotDtype, bits: int, size: float) -> None:
    """Magnitudes far apart, in rows and blocks; one block is 0, and one all but that."""
    product = LoraProduct(0, "qkv", bits, 16)
    random = np.random.default_rng(bits)
    rows = random.standard_normal((21, 70)) * np.geomspace(1e-3, 1, 70) * size
    rows[3, 16:32] = 0
    rows[4, 32:48] *= 1e-37 / size
    rows = rows.astype(np.float32)
    kept = np.where(np.abs(rows) < 1e-36, 0, rows).astype(np.float32)
    wanted = rounded_a(product, kept, dtype)
    found = packed(product, rows, dtype)
    assert len(found) == a_bytes(product, 70, 21, dtype)
    assert_packed(found, packed_a([wanted], 70, bits, 16, dtype))


def test_no_row_of_a() -> None:
    assert len(packed(LoraProduct(0, "o"), np.zeros((0, 70), np.float32), "int8")) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_numbers_that_are_not_finite(spec: ArchSpec, dtype: SlotDtype, value: float) -> None:
    found, placed = slots(spec, dtype)
    adapter = make_adapter(spec, 2)
    adapter.deltas[1, "down_proj"].b[3, 1] = value
    with pytest.raises(AdapterError, match="B of down_proj of layer 1 holds numbers that are not"):
        found.put(1, adapter)
    assert not any(array.any() for array in placed.values())
