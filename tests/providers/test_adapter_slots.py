"""Adapters in the slots that AddLora reads: where numbers lie, and what int8 makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import AdapterError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import (
    LoraAdapter,
    LoraDelta,
    LoraProduct,
    Projection,
    a_bytes,
    slot_layout,
)
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.adapter_slots import AdapterSlots, quantized, slots_bytes
from onnxport.providers.base import LoadOptions
from onnxport.providers.packed_rows import packed
from tests.conformance.adapting import make_adapter
from tests.kernels.int8_adapters import NOTHING, StoredA, packed_a
from tests.providers.conftest import ArtifactMaker

PRODUCTS = [LoraProduct(1, "qkv", 4, 32), LoraProduct(1, "down", 8, 64)]
OPTIONS = LoadOptions(max_adapters=2, max_adapter_rank=4)
DTYPES = ("float32", "float16", "int8")


@pytest.fixture
def spec(tiny_artifact: ArtifactMaker) -> ArchSpec:
    return Artifact.read(tiny_artifact("llama", "fp32")).manifest.model


def slots(spec: ArchSpec, dtype: str) -> tuple[AdapterSlots, dict[str, NDArray[Any]]]:
    """Slots, and what a graph reads of them."""
    placed: dict[str, NDArray[Any]] = {}

    def place(arrays: Any) -> Any:
        placed.update(arrays)
        return arrays

    return AdapterSlots(PRODUCTS, spec, OPTIONS, np.dtype(dtype), place), placed


def rows_at(slot: NDArray[Any], begin: int, rank: int, features: int) -> tuple[NDArray[Any], int]:
    """Rows of a slot, read as the operator does, and where they end."""
    panels = -(-features // 64)
    end = begin + panels * rank * 64
    found = slot[begin:end].reshape(panels, rank, 64).transpose(1, 0, 2).reshape(rank, -1)
    return found[:, :features], end


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slot_is_filled_as_its_layout_says(spec: ArchSpec, dtype: str) -> None:
    """A, then B, of each projection in turn; also where a larger adapter was before."""
    found, placed = slots(spec, dtype)
    found.put(2, LoraAdapter(full(spec, rank=4)))
    found.remove(2)
    adapter = make_adapter(spec, 2)  # of rank 3 in this layer
    without_k = {key: delta for key, delta in adapter.deltas.items() if key[1] != "k_proj"}
    found.put(2, LoraAdapter(without_k))
    ranks, weights = placed["lora.ranks"], placed["lora.weights"]
    assert weights.dtype == dtype
    assert ranks[2, 1].tolist() == [3, 0, 3, 0, 0, 0, 3]
    assert not ranks[[0, 1]].any()
    begins = slot_layout(PRODUCTS, spec, 4, dtype)[0]
    wanted: list[tuple[LoraProduct, list[Projection]]] = [
        (PRODUCTS[0], ["q_proj", "v_proj"]),
        (PRODUCTS[1], ["down_proj"]),
    ]
    for product, projections in wanted:
        begin = begins[product]
        if dtype == "int8":
            rows = [rounded_a(product, adapter.deltas[1, name].a) for name in projections]
            depth = product.in_features(spec)
            a = packed_a(rows, depth, product.bits, product.block_size)
            begin += len(a)
            assert_packed(weights[1, begin - len(a) : begin], a)
        for projection in projections:
            delta = adapter.deltas[1, projection]
            if dtype != "int8":
                a, begin = rows_at(weights[1], begin, 3, delta.a.shape[1])
                np.testing.assert_array_equal(a, delta.a.astype(dtype))
            b, begin = rows_at(weights[1], begin, 3, delta.b.shape[0])
            wanted_b = quantized("B", delta.b.T)[0] if dtype == "int8" else delta.b.T.astype(dtype)
            np.testing.assert_array_equal(b, wanted_b)
    found.remove(2)
    assert not ranks.any()


def rounded_a(product: LoraProduct, rows: NDArray[np.float32]) -> StoredA:
    """Rows of A in int8."""
    rank, depth = rows.shape
    blocks = np.zeros((rank, -(-depth // product.block_size) * product.block_size))
    blocks[:, :depth] = rows
    largest = np.abs(blocks.reshape(rank, -1, product.block_size)).max(-1)
    scales = (largest / (119 if product.bits == 4 else 127)).astype(np.float32)
    steps = np.repeat(scales.astype(np.float64), product.block_size, 1)[:, :depth]
    numbers = np.divide(rows, steps, out=np.zeros(rows.shape), where=steps > 0)
    return StoredA(np.rint(numbers).astype(np.int64), scales, product.block_size)


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


def test_scales_bring_int8_back(spec: ArchSpec) -> None:
    found, placed = slots(spec, "int8")
    adapter = make_adapter(spec, 2)
    found.put(1, adapter)
    scales, delta = placed["lora.scales"], adapter.deltas[1, "v_proj"]
    assert scales.shape == (3, spec.num_layers, 7, 4)
    _, scales_b = quantized("B", delta.b.T)
    np.testing.assert_allclose(scales[1, 1, 2, :3], scales_b, rtol=1e-6)
    assert not scales[1, 1, 2, 3:].any()
    assert not scales[[0, 2]].any()
    found.remove(1)
    assert not scales.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_memory_of_slots(spec: ArchSpec, dtype: str) -> None:
    _, placed = slots(spec, dtype)
    assert ("lora.scales" in placed) == (dtype == "int8")
    counted = slots_bytes(PRODUCTS, spec, OPTIONS, np.dtype(dtype))
    assert counted == sum(array.nbytes for array in placed.values())


@pytest.mark.parametrize("size", [1e-42, 1e-20, 1.0, 1e38])
def test_int8_is_off_by_half_a_scale_at_most(size: float) -> None:
    random = np.random.default_rng(0)
    rows = (random.standard_normal((5, 321)) * np.geomspace(1e-2, 1, 5)[:, None] * size).clip(
        -3e38, 3e38
    )
    rows[2] = 0
    given = rows.astype(np.float32)
    found, scales = quantized("A", given)
    assert (found.dtype, found[2].any(), scales[2]) == (np.int8, False, 0)
    assert np.abs(found).max(axis=1).tolist() == [127, 127, 0, 127, 127]
    off = np.abs(found * scales[:, None] - given.astype(np.float64))
    assert (off <= scales[:, None] * 0.5000001).all()


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e37])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_a_have_their_own_scales(bits: int, size: float) -> None:
    """Magnitudes far apart, in rows and blocks; one block is 0, and one all but that."""
    product = LoraProduct(0, "qkv", bits, 16)
    random = np.random.default_rng(bits)
    rows = random.standard_normal((21, 70)) * np.geomspace(1e-3, 1, 70) * size
    rows[3, 16:32] = 0
    rows[4, 32:48] *= 1e-37 / size
    rows = rows.astype(np.float32)
    wanted = rounded_a(product, np.where(np.abs(rows) < 1e-36, 0, rows).astype(np.float32))
    found = packed(product, rows)
    assert len(found) == a_bytes(product, 70, 21)
    assert_packed(found, packed_a([wanted], 70, bits, 16))


def test_no_row_of_a() -> None:
    assert len(packed(LoraProduct(0, "o"), np.zeros((0, 70), np.float32))) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(spec: ArchSpec, value: float) -> None:
    found, placed = slots(spec, "int8")
    adapter = make_adapter(spec, 2)
    adapter.deltas[1, "down_proj"].b[3, 1] = value
    with pytest.raises(AdapterError, match="B of down_proj of layer 1 holds numbers that are not"):
        found.put(1, adapter)
    assert not any(array.any() for array in placed.values())
