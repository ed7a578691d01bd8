"""Int8 caches in memory, byte by byte, against the kernel tests' reference."""

from __future__ import annotations

import numpy as np
import pytest

from onnxport.providers.cpu.caches import CachePair, int8_blocks, quantize
from tests.kernels import reference
from tests.kernels.reference import dequantize, to_tiled

NUM_BLOCKS, LAYERS, HEADS, CHANNELS = 7, 2, 3, 24


def random_rows(block_size: int, seed: int, count: int = NUM_BLOCKS) -> np.ndarray:
    """Numbers of many magnitudes, [count, LAYERS, 2, HEADS, block_size, CHANNELS] float32."""
    random = np.random.default_rng(seed)
    shape = (count, LAYERS, 2, HEADS, block_size)
    exponents = random.uniform(-128, 126, (*shape, 1))
    return (random.uniform(-1, 1, (*shape, CHANNELS)) * np.exp2(exponents)).astype(np.float32)


def caches_of(rows: np.ndarray) -> list[CachePair]:
    """Caches that hold the rows, as the reference lays them out."""
    pairs = []
    for layer in range(LAYERS):
        stored = [reference.quantize(rows[:, layer, part].swapaxes(1, 2)) for part in (0, 1)]
        pairs.append((to_tiled(stored[0], True), to_tiled(stored[1], False)))
    return pairs


def bits(pairs: list[CachePair]) -> bytes:
    return b"".join(cache.tobytes() for pair in pairs for cache in pair)


@pytest.mark.parametrize("block_size", [16, 48])
def test_blocks_are_read_exactly_and_written_as_the_kernel_does(block_size: int) -> None:
    rows = random_rows(block_size, 0)
    pairs = caches_of(rows)
    blocks = int8_blocks(pairs)
    order = [5, 0, 3]
    found = blocks.read(order)
    assert found.dtype == np.float32
    assert found.tobytes() == dequantize(reference.quantize(rows))[order].astype("f4").tobytes()
    empty = [(np.zeros_like(key), np.zeros_like(value)) for key, value in pairs]
    other = int8_blocks(empty)
    other.write(range(NUM_BLOCKS), rows)
    assert bits(empty) == bits(pairs)
    other.write(range(NUM_BLOCKS), blocks.read(range(NUM_BLOCKS)))
    assert bits(empty) == bits(pairs), "writing what was read changed something"


def test_a_write_or_a_copy_touches_no_other_block() -> None:
    pairs = caches_of(random_rows(16, 1))
    blocks = int8_blocks(pairs)
    before = blocks.read(range(NUM_BLOCKS))
    new = int8_blocks(caches_of(random_rows(16, 2, 2))).read([0, 1])
    blocks.write([4, 1], new)
    blocks.copy([4, 0], [2, 6])
    expected = before.copy()
    expected[[4, 1]] = new
    expected[[2, 6]] = expected[[4, 0]]
    assert blocks.read(range(NUM_BLOCKS)).tobytes() == expected.tobytes()


def test_what_is_not_finite_is_stored_as_the_reference_says() -> None:
    rows = random_rows(16, 3)
    rows[0, ..., 3] = np.nan
    rows[1, ..., 5] = -np.inf
    rows[2] = 0
    scales, numbers = quantize(rows)
    expected = reference.quantize(rows)
    assert numbers.tobytes() == np.ascontiguousarray(expected[..., :-4]).tobytes()
    assert scales.tobytes() == np.ascontiguousarray(expected[..., -4:]).tobytes()
    assert np.isnan(scales[:2]).all()
    assert not scales[2].any()


def test_misuse_is_caught_before_anything_changes() -> None:
    pairs = caches_of(random_rows(16, 4))
    blocks, before = int8_blocks(pairs), bits(pairs)
    content = blocks.read([0, 1])
    for call, words in (
        (lambda: blocks.read([NUM_BLOCKS]), "not in a pool"),
        (lambda: blocks.copy([1, 2], [2, 3]), "sources and targets"),
        (lambda: blocks.copy([0, 1], [2]), "2 sources for 1 targets"),
        (lambda: blocks.write([3, 3], content), "written twice"),
        (lambda: blocks.write([3], content), "content of shape"),
        (lambda: blocks.write([3, 4], np.zeros_like(content, np.float16)), "not float32"),
    ):
        with pytest.raises(AssertionError, match=words):
            call()
    assert bits(pairs) == before
