"""Adapters in int8 as they lie in a slot, and inputs as products round them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.lora import PANEL, in_panels

OUTPUTS = 32  # of a product, that lie together
NOTHING = 99  # where nothing is to be read


@dataclass(frozen=True)
class StoredA:
    """Rows of A of one projection."""

    numbers: NDArray[np.int64]  # [rank, depth]
    scales: NDArray[np.float32]  # [rank, blocks]
    block_size: int

    @property
    def values(self) -> NDArray[np.float64]:
        """[rank, depth]"""
        scales = np.repeat(self.scales.astype(np.float64), self.block_size, axis=1)
        return self.numbers * scales[:, : self.numbers.shape[1]]


def random_a(
    random: np.random.Generator, rank: int, depth: int, bits: int, block_size: int
) -> StoredA:
    """The largest and the least numbers are among them, if there are many."""
    most = 119 if bits == 4 else 127
    blocks = -(-depth // block_size)
    numbers = random.integers(-most, most + 1, (rank, depth))
    scales = random.uniform(1e-3, 1e-2, (rank, blocks)).astype(np.float32)
    return StoredA(numbers, scales, block_size)


def outputs_of_panels(rows: int, bits: int) -> list[int]:
    """Of rows of A: whole panels, and half a one for what is left if that has room."""
    left, found = rows * 8 // bits, []
    while left > 0:
        found.append(OUTPUTS // 2 if left <= OUTPUTS // 2 else OUTPUTS)
        left -= found[-1]
    return found


def packed_a(parts: Sequence[StoredA], depth: int, bits: int, block_size: int) -> NDArray[np.int8]:
    """The rows of all projections, as the weights of a product."""
    rows = [(part, r) for part in parts for r in range(len(part.numbers))]
    panels, next_row = [], 0
    for outputs in outputs_of_panels(len(rows), bits):
        of_panel = outputs * bits // 8
        own = rows[next_row : next_row + of_panel]
        panels.append(_panel(own, outputs, depth, bits, block_size))
        next_row += of_panel
    return np.concatenate([np.zeros(0, np.int8), *panels])


def _panel(
    rows: Sequence[tuple[StoredA, int]], outputs: int, depth: int, bits: int, block_size: int
) -> NDArray[np.int8]:
    blocks, quant_bytes = -(-depth // block_size), outputs * block_size * bits // 8
    found = np.full((blocks, quant_bytes + 4 * outputs), NOTHING, np.uint8)
    block, place = np.divmod(np.arange(depth), block_size)
    for output, (part, r) in enumerate(rows):
        numbers, scales = part.numbers[r], part.scales[r]
        if bits == 8:
            where = place // 4 * (4 * outputs) + output * 4 + place % 4
            found[block, where] = numbers.astype(np.int8).view(np.uint8)
            _set_scales(found, quant_bytes, output, scales)
            continue
        high = np.floor_divide(numbers + 8, 16)
        low = numbers - 16 * high
        for half, own, scale in ((0, high, 16), (1, low, 1)):
            lane = output + outputs // 2 * half
            where = place // 8 * (4 * outputs) + lane * 4 + place % 8 // 2
            for odd in (0, 1):
                some = place % 2 == odd
                kept = found[block[some], where[some]] & (0xF0 if odd == 0 else 0x0F)
                nibble = (own[some] + 8).astype(np.uint8) << (4 * odd)
                found[block[some], where[some]] = kept | nibble
            _set_scales(found, quant_bytes, lane, scales * np.float32(scale))
    return found.ravel().view(np.int8)


def packed_b(rows: NDArray[np.int8]) -> NDArray[np.int8]:
    """Rows of B of one projection, [rank, columns]."""
    width = in_panels(rows.shape[1])
    wide = np.full((len(rows), width), NOTHING, np.int8)
    wide[:, : rows.shape[1]] = rows
    return wide.reshape(len(rows), width // PANEL, PANEL).swapaxes(0, 1).ravel()


def room_of(depth: int, columns: Sequence[int], max_rank: int, bits: int, block_size: int) -> int:
    """Bytes that a product needs in a slot."""
    outputs = sum(outputs_of_panels(max_rank * len(columns), bits))
    a = outputs * -(-depth // block_size) * (block_size * bits // 8 + 4)
    return a + max_rank * sum(in_panels(count) for count in columns)


def slots_of(count: int, size: int) -> NDArray[np.int8]:
    """So many slots with nothing in them, at a cache line."""
    memory = np.full(count * size + 64, NOTHING, np.int8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + count * size].reshape(count, size)


def rounded(x: NDArray[Any], block_size: int) -> NDArray[np.float64]:
    """Activations [rows, depth] as a product rounds them, to int8 in blocks."""
    rows, depth = x.shape
    blocks = np.zeros((rows, -(-depth // block_size) * block_size), np.float32)
    blocks[:, :depth] = x
    blocks = blocks.reshape(rows, -1, block_size)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    found = np.rint(blocks * inverse) * scales.astype(np.float64)
    return np.asarray(found.reshape(rows, -1)[:, :depth], np.float64)


def _set_scales(panel: NDArray[np.uint8], begin: int, lane: int, scales: NDArray[Any]) -> None:
    at = begin + 4 * lane
    panel[:, at : at + 4] = np.ascontiguousarray(scales, np.float32).view(np.uint8).reshape(-1, 4)
