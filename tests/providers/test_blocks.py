"""Where K/V lie in memory, byte by byte, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.providers.blocks import (
    CacheLayout,
    HostBlocks,
    paired_layout,
    plain_layout,
    tiled_layout,
)
from onnxport.providers.rows import convert

NUM_BLOCKS, LAYERS, HEADS, CHANNELS, TILE = 7, 3, 2, 24, 16
PLAIN, TILED, PAIRED = plain_layout(), tiled_layout(TILE), paired_layout(TILE)
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
LAYOUTS = {
    "tiled": (TILED, (16, 32)),
    "paired": (PAIRED, (16, 32)),
    "plain": (PLAIN, (3, 5, 16, 32)),
}
CASES = [(layout, size) for layout, sizes in LAYOUTS.values() for size in sizes]
NAMES = [f"{name}-{size}" for name, (_, sizes) in LAYOUTS.items() for size in sizes]

Pair = tuple[NDArray[Any], NDArray[Any]]


def random_caches(block_size: int, dtype: Any, seed: int) -> list[Pair]:
    """Caches of random bits: every kind of number is there, NaN with payloads too."""
    random = np.random.default_rng(seed)
    shape = (NUM_BLOCKS, block_size, HEADS, CHANNELS * np.dtype(dtype).itemsize)
    return [
        tuple(random.integers(0, 256, shape, np.uint8).view(dtype) for _ in "kv")  # type: ignore[misc]
        for _ in range(LAYERS)
    ]


def bits(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def addresses(layout: CacheLayout, part: int, block_size: int) -> Callable[..., int]:
    """The formulas of csrc/attention.h, as element offsets."""

    def plain(block: int, head: int, slot: int, channel: int) -> int:
        return ((block * block_size + slot) * HEADS + head) * CHANNELS + channel

    def tiled_key(block: int, head: int, slot: int, channel: int) -> int:
        row = (block * HEADS + head) * block_size + slot // TILE * TILE
        return row * CHANNELS + slot % TILE + channel * TILE

    def tiled_value(block: int, head: int, slot: int, channel: int) -> int:
        return ((block * HEADS + head) * block_size + slot) * CHANNELS + channel

    def paired_key(block: int, head: int, slot: int, channel: int) -> int:
        row = (block * HEADS + head) * block_size + slot // TILE * TILE
        return row * CHANNELS + channel // 2 * 2 * TILE + slot % TILE * 2 + channel % 2

    def paired_value(block: int, head: int, slot: int, channel: int) -> int:
        row = (block * HEADS + head) * block_size + slot // 2 * 2
        return row * CHANNELS + channel * 2 + slot % 2

    if layout is PLAIN:
        return plain
    return ((tiled_key, tiled_value) if layout is TILED else (paired_key, paired_value))[part]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "block_size"), CASES, ids=NAMES)
def test_every_element_is_read_from_where_the_kernel_puts_it(
    layout: CacheLayout, block_size: int, dtype: Any
) -> None:
    caches = random_caches(block_size, dtype, 1)
    blocks = [5, 0, 5]
    content = HostBlocks(caches, layout).read(blocks)
    assert content.dtype == dtype
    assert content.shape == (3, LAYERS, 2, HEADS, block_size, CHANNELS)
    indices = list(product(range(HEADS), range(block_size), range(CHANNELS)))
    for (row, block), layer, part in product(enumerate(blocks), range(LAYERS), range(2)):
        address = addresses(layout, part, block_size)
        at = [address(block, *index) for index in indices]
        assert bits(content[row, layer, part]) == bits(caches[layer][part].reshape(-1)[at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "block_size"), CASES, ids=NAMES)
def test_blocks_move_between_pools_and_layouts_and_touch_no_other(
    layout: CacheLayout, block_size: int, dtype: Any
) -> None:
    source = HostBlocks(random_caches(block_size, dtype, 1), layout)
    content = source.read([6, 2, 3])
    others = (PLAIN,) if block_size % TILE else (PLAIN, TILED, PAIRED)
    for other in others:
        target = HostBlocks(random_caches(block_size, dtype, 2), other)
        before = target.read(range(NUM_BLOCKS))
        target.write([4, 0, 6], content)
        assert bits(target.read([4, 0, 6])) == bits(content)
        assert bits(target.read([1, 2, 3, 5])) == bits(before[[1, 2, 3, 5]])
        target.copy([4, 4], [1, 5])
        assert bits(target.read([1, 5])) == bits(content[[0, 0]])
        target.write([3, 2], content[::-2])
        assert bits(target.read([3, 2])) == bits(content[[2, 0]])
        assert bits(target.read([4, 0, 6])) == bits(content)


@pytest.mark.parametrize("layout", [PLAIN, TILED, PAIRED])
def test_layers_may_have_keys_alone(layout: CacheLayout) -> None:
    pairs, more = (random_caches(16, np.float16, seed) for seed in (1, 2))
    keys = [(key.copy(),) for key, _ in pairs]
    alone, both = HostBlocks(keys, layout), HostBlocks(pairs, layout)
    content = alone.read([5, 0])
    assert bits(content) == bits(both.read([5, 0])[:, :, :1])
    alone.write([3, 1], HostBlocks(more, layout).read([3, 1])[:, :, :1])
    alone.copy([3], [4])
    assert bits(alone.read([4])) == bits(HostBlocks(more, layout).read([3])[:, :, :1])
    with pytest.raises(AssertionError, match="content of shape"):
        alone.write([3], both.read([3]))


def test_what_was_read_is_the_callers_own() -> None:
    caches = random_caches(16, np.float32, 1)
    blocks = HostBlocks(caches, TILED)
    content = blocks.read([2])
    before = bits(content)
    blocks.copy([3], [2])
    assert bits(content) == before
    content[...] = 0
    assert bits(blocks.read([2])) == bits(blocks.read([3])) != bits(content)


def test_no_blocks_are_no_work() -> None:
    blocks = HostBlocks(random_caches(16, np.float32, 1), TILED)
    before = bits(blocks.read(range(NUM_BLOCKS)))
    blocks.copy([], [])
    blocks.write([], blocks.read([]))
    assert bits(blocks.read(range(NUM_BLOCKS))) == before


def misuses() -> Iterator[Any]:
    shape = (LAYERS, 2, HEADS, 16, CHANNELS)
    good = np.zeros((2, *shape), np.float32)
    for words, method, *arguments in (
        (r"blocks \[7\] are not in a pool of 7", "read", [0, 7]),
        (r"blocks \[-1\] are not", "read", [-1]),
        (r"blocks \[9\] are not", "copy", [9], [1]),
        (r"blocks \[8\] are not", "copy", [1], [8]),
        ("written twice", "copy", [0, 1], [2, 2]),
        (r"blocks \[2\] are sources and targets", "copy", [1, 2], [2, 3]),
        ("2 sources for 1 targets", "copy", [0, 1], [2]),
        (r"blocks \[7\] are not", "write", [0, 7], good),
        ("written twice", "write", [3, 3], good),
        ("content of shape", "write", [0, 1, 2], good),
        ("content of shape", "write", [0, 1], good.swapaxes(1, 2)),
        ("content of float64", "write", [0, 1], good.astype(np.float64)),
    ):
        yield pytest.param(method, arguments, words, id=f"{method}: {words}")


@pytest.mark.parametrize(("method", "arguments", "words"), list(misuses()))
def test_misuse_is_caught_before_anything_changes(
    method: str, arguments: list[Any], words: str
) -> None:
    blocks = HostBlocks(random_caches(16, np.float32, 1), TILED)
    before = bits(blocks.read(range(NUM_BLOCKS)))
    with pytest.raises(AssertionError, match=words):
        getattr(blocks, method)(*arguments)
    assert bits(blocks.read(range(NUM_BLOCKS))) == before


def test_caches_that_a_layout_cannot_view_are_refused() -> None:
    caches = random_caches(32, np.float32, 1)
    with pytest.raises(AssertionError, match="differ"):
        HostBlocks([caches[0], (caches[1][0], caches[1][1][:3])], PLAIN)
    halves = [(key[:, ::2], value[:, ::2]) for key, value in caches]
    with pytest.raises(AssertionError, match="copy this cache"):
        HostBlocks(halves, TILED)
    with pytest.raises(AssertionError, match="blocks of 24 tokens, tiles of 16"):
        HostBlocks(random_caches(24, np.float32, 1), TILED)


ENDS = np.float32([1.0, -2.5, 65504, -65504, 65519, -65520, 1e6, -3e38, 2.0**-24, 0.0])


@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16])
def test_what_float16_cannot_hold_becomes_its_largest_number(source: Any) -> None:
    content = ENDS.astype(source)
    expected = np.clip(content.astype(np.float64), -65504, 65504).astype(np.float16)
    found = convert(content, np.float16)
    assert found.dtype == np.float16
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16])
def test_what_is_not_finite_stays_so_in_float16(source: Any) -> None:
    content = np.array([np.inf, -np.inf, np.nan, 1], source)
    np.testing.assert_array_equal(convert(content, np.float16), [np.inf, -np.inf, np.nan, 1])


@pytest.mark.parametrize("kind", DTYPES)
def test_wider_floats_hold_all_and_the_same_type_is_left_alone(kind: Any) -> None:
    content = np.array([1.5, -np.inf, 0.25], kind)
    assert convert(content, kind) is content
    wide = convert(content, np.float32)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, content.astype(np.float32))
