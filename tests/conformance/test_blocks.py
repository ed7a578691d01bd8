"""Blocks of the KV cache: moved as they are, and touched by nobody else."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.providers.base import Capabilities
from onnxport.providers.rows import convert, element_type
from tests.conformance.conftest import Loaded
from tests.conformance.models import step, tables_of
from tests.conformance.workload import SYSTEM


def some_content(limits: Capabilities, count: int, seed: int = 0) -> NDArray[np.generic]:
    """Random blocks in canonical form."""
    form = limits.kv_format
    shape = (
        count,
        form.num_layers,
        form.parts,
        form.num_kv_heads,
        limits.block_size,
        form.head_size,
    )
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return convert(numbers, element_type(form.dtype))


def is_lossless(limits: Capabilities) -> bool:
    """Whether the cache stores what the canonical form says."""
    return limits.kv_cache_dtype == limits.kv_format.dtype


def test_blocks_are_read_as_they_were_written(movable: Loaded) -> None:
    limits = movable.model.capabilities
    blocks = [3, 1, limits.num_blocks - 1, 0]
    content = some_content(limits, len(blocks))
    movable.model.write_blocks(blocks, content)
    found = movable.model.read_blocks(blocks)
    assert found.dtype == content.dtype
    if is_lossless(limits):
        assert found.nbytes == len(blocks) * limits.kv_block_bytes
        assert (found == content).all()
    else:  # 8 bits: off by half a step of what 256 levels make of the range
        assert np.abs(found - content).max() <= np.ptp(content) / 255
    assert (movable.model.read_blocks([0, 3]) == found[[3, 0]]).all()


def test_a_copy_is_exact(movable: Loaded) -> None:
    limits = movable.model.capabilities
    sources, targets = [3, 1, 5], [4, limits.num_blocks - 1, 0]
    movable.model.write_blocks(sources, some_content(limits, 3, seed=1))
    movable.model.write_blocks(targets, some_content(limits, 3, seed=2))
    expected = movable.model.read_blocks(sources)
    movable.model.copy_blocks(sources, targets)
    assert (movable.model.read_blocks(targets) == expected).all()
    assert (movable.model.read_blocks(sources) == expected).all()


def test_a_copied_half_filled_block_forks_a_sequence(loaded: Loaded) -> None:
    model, limits = loaded.model, loaded.model.capabilities
    size = limits.block_size
    prompt = SYSTEM[: size + size // 2] if size < 32 else SYSTEM[: size // 2]
    full = len(prompt) // size

    def decode(tables: list[list[int]]) -> NDArray[np.float32]:
        """Three steps of both sequences, with other tokens."""
        steps = [
            [([token], len(prompt) + at, table) for token, table in zip(pair, tables, strict=True)]
            for at, pair in enumerate([(5, 6), (50, 60), (8, 8)])
        ]
        return np.stack([model.run(step(rows, limits)).copy() for rows in steps])

    left, right = list(range(1, full + 3)), list(range(6, full + 8))
    for table in (left, right):
        model.run(step([(prompt, 0, table)], limits))
    expected = decode([left, right])
    assert (expected[-1, 0] != expected[-1, 1]).any()
    model.run(step([(prompt, 0, left)], limits))
    sources, targets = (
        [block for (block,) in tables_of(limits, [column])] for column in (left[full], 11)
    )
    model.copy_blocks(sources, targets)
    assert (decode([left, [*left[:full], 11, 12]]) == expected).all()


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (5, 1), (17, 3, 1)], ids=str)
def test_a_step_writes_its_own_slots_alone(movable: Loaded, lengths: tuple[int, ...]) -> None:
    """Also where a provider pads a step to a shape that it has compiled.

    What follows the new tokens in their last block is nobody's yet, and may be cleared.
    """
    model, limits = movable.model, movable.model.capabilities
    size, everything = limits.block_size, list(range(limits.num_blocks))
    model.write_blocks(everything, some_content(limits, limits.num_blocks))
    before = model.read_blocks(everything)
    past = size - 1  # so that a row of several tokens goes over into its second block
    tables = [[3 * row + 5, 3 * row + 4, 3 * row + 3] for row in range(len(lengths))]
    rows = [(SYSTEM[:n], past, table) for n, table in zip(lengths, tables, strict=True)]
    model.run(step(rows, limits))
    changed = (model.read_blocks(everything) != before).any(axis=(1, 2, 3, 5))
    written, free = np.zeros_like(changed), np.zeros_like(changed)  # [block, slot]
    for count, table in (
        (count, table)
        for count, columns in zip(lengths, tables, strict=True)
        for table in tables_of(limits, columns)
    ):
        slots = [(table[at // size], at % size) for at in range(past, 3 * size)]
        used = -(-(past + count) // size) * size - past
        written[tuple(np.transpose(slots[:count]))] = True
        free[tuple(np.transpose(slots[:used]))] = True
    if not is_lossless(limits):  # a block is rounded anew with each token that joins it
        free[written.any(axis=1)] = True
    assert changed[written].all(), f"not written: {np.argwhere(written & ~changed).tolist()}"
    assert not changed[~free].any(), f"written: {np.argwhere(changed & ~free).tolist()}"
