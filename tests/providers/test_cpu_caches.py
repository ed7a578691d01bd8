"""Caches of integers in memory, byte by byte, against the kernel tests' reference."""

from __future__ import annotations

import numpy as np
import pytest

from onnxport.providers.blocks import CodedBlocks
from onnxport.providers.cpu.caches import LayerCaches, packed_blocks
from tests.kernels import reference
from tests.kernels.reference import to_tiled

NUM_BLOCKS, LAYERS, HEADS, CHANNELS = 7, 2, 3, 40  # of which the last eight are a group of int4
STORED = {"int8": reference.quantize, "int4": reference.quantize_int4}
KINDS = pytest.mark.parametrize("dtype", STORED)


def random_rows(block_size: int, seed: int, count: int = NUM_BLOCKS) -> np.ndarray:
    """Numbers of many magnitudes, [count, LAYERS, 2, HEADS, block_size, CHANNELS] float32."""
    random = np.random.default_rng(seed)
    shape = (count, LAYERS, 2, HEADS, block_size)
    exponents = random.uniform(-128, 126, (*shape, 1))
    return (random.uniform(-1, 1, (*shape, CHANNELS)) * np.exp2(exponents)).astype(np.float32)


def caches_of(rows: np.ndarray, dtype: str) -> list[LayerCaches]:
    """Caches that hold the rows, as the reference lays them out."""
    pairs = []
    for layer in range(LAYERS):
        stored = [STORED[dtype](rows[:, layer, part].swapaxes(1, 2)) for part in (0, 1)]
        pairs.append((to_tiled(stored[0], True), to_tiled(stored[1], False)))
    return pairs


def blocks_of(pairs: list[LayerCaches], dtype: str) -> CodedBlocks:
    return packed_blocks(pairs, dtype, CHANNELS)


def bits(pairs: list[LayerCaches]) -> bytes:
    return b"".join(cache.tobytes() for pair in pairs for cache in pair)


@KINDS
def test_layers_may_have_keys_alone(dtype: str) -> None:
    rows = random_rows(16, 0)
    keys: list[LayerCaches] = [(key,) for key, _ in caches_of(rows, dtype)]
    blocks = blocks_of(keys, dtype)
    assert blocks.read([5, 0]).tobytes() == STORED[dtype](rows)[[5, 0], :, :1].tobytes()
    blocks.write([0], STORED[dtype](rows)[[5], :, :1])
    assert blocks.read([0]).tobytes() == blocks.read([5]).tobytes()


@KINDS
@pytest.mark.parametrize("block_size", [16, 48])
def test_blocks_are_read_and_written_byte_by_byte(block_size: int, dtype: str) -> None:
    rows = random_rows(block_size, 0)
    pairs = caches_of(rows, dtype)
    blocks = blocks_of(pairs, dtype)
    order = [5, 0, 3]
    found = blocks.read(order)
    assert found.dtype == STORED[dtype](rows[:1]).dtype
    assert found.tobytes() == STORED[dtype](rows)[order].tobytes()
    empty = [(np.zeros_like(key), np.zeros_like(value)) for key, value in pairs]
    other = blocks_of(empty, dtype)
    other.write(range(NUM_BLOCKS), STORED[dtype](rows))
    assert bits(empty) == bits(pairs)
    other.write(range(NUM_BLOCKS), blocks.read(range(NUM_BLOCKS)))
    assert bits(empty) == bits(pairs), "writing what was read changed something"


@KINDS
def test_a_write_or_a_copy_touches_no_other_block(dtype: str) -> None:
    pairs = caches_of(random_rows(16, 1), dtype)
    blocks = blocks_of(pairs, dtype)
    before = blocks.read(range(NUM_BLOCKS))
    new = blocks_of(caches_of(random_rows(16, 2, 2), dtype), dtype).read([0, 1])
    blocks.write([4, 1], new)
    blocks.copy([4, 0], [2, 6])
    expected = before.copy()
    expected[[4, 1]] = new
    expected[[2, 6]] = expected[[4, 0]]
    assert blocks.read(range(NUM_BLOCKS)).tobytes() == expected.tobytes()


@KINDS
def test_misuse_is_caught_before_anything_changes(dtype: str) -> None:
    pairs = caches_of(random_rows(16, 4), dtype)
    blocks, before = blocks_of(pairs, dtype), bits(pairs)
    content = blocks.read([0, 1])
    for call, words in (
        (lambda: blocks.read([NUM_BLOCKS]), "not in a pool"),
        (lambda: blocks.copy([1, 2], [2, 3]), "sources and targets"),
        (lambda: blocks.copy([0, 1], [2]), "2 sources for 1 targets"),
        (lambda: blocks.write([3, 3], content), "written twice"),
        (lambda: blocks.write([3], content), "content of shape"),
        (lambda: blocks.write([3, 4], content.astype(np.float16)), "content of float16"),
    ):
        with pytest.raises(AssertionError, match=words):
            call()
    assert bits(pairs) == before
