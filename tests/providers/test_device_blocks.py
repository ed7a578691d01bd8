"""Caches behind ONNX Runtime's bindings: the same content as caches in NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.graphs.block_transfers import CacheShape
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers import device_blocks
from onnxport.providers.blocks import HostBlocks, plain_layout
from onnxport.providers.device_blocks import DeviceBlocks, device_caches
from onnxport.providers.ort import CPU
from tests.tiers import examples

NUM_BLOCKS, BLOCK_SIZE, LAYERS, HEADS, WIDTH = 12, 4, 2, 3, 8


class Both:
    """The same caches twice: on a "device", and in plain arrays as the reference."""

    def __init__(self, dtype: int, group: int | None, parts: int = 2) -> None:
        shape = CacheShape(LAYERS, HEADS, WIDTH, dtype, parts)
        self.dtype = numpy_dtype(dtype)
        spare = 1 if group else 0
        self.caches = device_caches(shape, NUM_BLOCKS + spare, BLOCK_SIZE, CPU)
        self.device = DeviceBlocks(self.caches, shape, NUM_BLOCKS, CPU, group)
        dims = (NUM_BLOCKS, BLOCK_SIZE, HEADS, WIDTH)
        caches = [tuple(np.zeros(dims, self.dtype) for _ in range(parts)) for _ in range(LAYERS)]
        self.host = HostBlocks(caches, plain_layout())
        self.parts = parts

    def content(self, count: int, seed: int) -> NDArray[Any]:
        random = np.random.default_rng(seed)
        shape = (count, LAYERS, self.parts, HEADS, BLOCK_SIZE, WIDTH)
        return random.standard_normal(shape).astype(self.dtype)

    def check(self) -> None:
        every = list(range(NUM_BLOCKS))
        expected, found = self.host.read(every), self.device.read(every)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


# ONNX Runtime's CPU provider has no Expand for bfloat16, with which zeros are made.
CASES = [(kind, group) for kind in (TensorProto.FLOAT, TensorProto.FLOAT16) for group in (None, 5)]
BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS, unique=True)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("dtype", "group"), CASES)
def test_transfers_are_those_of_the_host(dtype: int, group: int | None, parts: int) -> None:
    both = Both(dtype, group, parts)
    both.check()

    @settings(max_examples=examples(40), deadline=None)
    @given(BLOCKS, BLOCKS, st.integers(0, 1000))
    def moves(written: list[int], copied: list[int], seed: int) -> None:
        content = both.content(len(written), seed)
        both.device.write(written, content)
        both.host.write(written, content)
        half = len(copied) // 2
        sources, targets = copied[:half], copied[half : 2 * half]
        both.device.copy(sources, targets)
        both.host.copy(sources, targets)
        both.check()

    moves()
    twice = [3, 1, 3]
    np.testing.assert_array_equal(both.device.read(twice), both.host.read(twice))


@pytest.mark.parametrize(("blocks", "runs"), [(0.5, 9), (1, 9), (4, 3), (9, 1), (100, 1)])
def test_one_run_moves_no_more_than_there_is_memory_for(
    monkeypatch: pytest.MonkeyPatch, blocks: float, runs: int
) -> None:
    block_bytes = 2 * LAYERS * HEADS * BLOCK_SIZE * WIDTH * 4
    monkeypatch.setattr(device_blocks, "MOST_BYTES", int(blocks * block_bytes))
    both = Both(TensorProto.FLOAT, None)
    run, counted = DeviceBlocks._run, []

    def count(self: DeviceBlocks, *args: Any, **options: Any) -> None:
        counted.append(args)
        run(self, *args, **options)

    monkeypatch.setattr(DeviceBlocks, "_run", count)
    content = both.content(9, 1)
    both.device.write(range(9), content)
    assert len(counted) == runs
    both.host.write(range(9), content)
    np.testing.assert_array_equal(both.device.read(range(9)), content)
    assert len(counted) == 2 * runs
    for one in (both.device, both.host):
        one.copy([0, 2, 4], [9, 10, 11])
    both.check()


def test_memory_stays_where_it_is() -> None:
    both = Both(TensorProto.FLOAT, None)
    pointers = [cache.value.data_ptr() for cache in both.caches]
    both.device.write([0, 5], both.content(2, 1))
    both.device.copy([0], [7])
    assert [cache.value.data_ptr() for cache in both.caches] == pointers
    name = both.caches[3].input_name
    assert (name, both.caches[3].value.numpy()[7].any()) == ("past_key_values.1.value", True)


def test_misuse_fails_before_anything_changes() -> None:
    both = Both(TensorProto.FLOAT, 5)
    content = both.content(2, 2)
    for wrong in (
        lambda: both.device.write([0, 0], content),
        lambda: both.device.write([0, NUM_BLOCKS], content),  # the spare block is not the pool's
        lambda: both.device.write([0, 1, 2], content),
        lambda: both.device.write([0, 1], content.astype(np.float64)),
        lambda: both.device.copy([0, 1], [1, 2]),
        lambda: both.device.copy([0], [1, 2]),
        lambda: both.device.read([-1]),
    ):
        with pytest.raises(AssertionError):
            wrong()
    both.check()
