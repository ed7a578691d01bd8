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


def packed_a(parts: Sequence[StoredA], depth: int, bits: int, block_size: int) -> NDArray[np.int8]:
    """The rows of all projections, as the weights of a product."""
    rows = [(part, r) for part in parts for r in range(len(part.numbers))]
    of_panel = OUTPUTS * bits // 8
    panels, blocks = -(-len(rows) // of_panel), -(-depth // block_size)
    quant_bytes = OUTPUTS * block_size * bits // 8
    found = np.full((panels, blocks, quant_bytes + 4 * OUTPUTS), NOTHING, np.uint8)
    block, place = np.divmod(np.arange(depth), block_size)
    for at, (part, r) in enumerate(rows):
        panel, output = divmod(at, of_panel)
        numbers, scales = part.numbers[r], part.scales[r]
        if bits == 8:
            where = place // 4 * (4 * OUTPUTS) + output * 4 + place % 4
            found[panel, block, where] = numbers.astype(np.int8).view(np.uint8)
            _set_scales(found[panel], quant_bytes, output, scales)
            continue
        high = np.floor_divide(numbers + 8, 16)
        low = numbers - 16 * high
        for half, own, scale in ((0, high, 16), (1, low, 1)):
            lane = output + 16 * half
            where = place // 8 * (4 * OUTPUTS) + lane * 4 + place % 8 // 2
            for odd in (0, 1):
                some = place % 2 == odd
                kept = found[panel, block[some], where[some]] & (0xF0 if odd == 0 else 0x0F)
                nibble = (own[some] + 8).astype(np.uint8) << (4 * odd)
                found[panel, block[some], where[some]] = kept | nibble
            _set_scales(found[panel], quant_bytes, lane, scales * np.float32(scale))
    return found.ravel().view(np.int8)


def packed_b(rows: NDArray[np.int8]) -> NDArray[np.int8]:
    """Rows of B of one projection, [rank, columns]."""
    width = in_panels(rows.shape[1])
    wide = np.full((len(rows), width), NOTHING, np.int8)
    wide[:, : rows.shape[1]] = rows
    return wide.reshape(len(rows), width // PANEL, PANEL).swapaxes(0, 1).ravel()


def room_of(depth: int, columns: Sequence[int], max_rank: int, bits: int, block_size: int) -> int:
    """Bytes that a product needs in a slot."""
    rows = -(-max_rank * len(columns) // (OUTPUTS * bits // 8)) * OUTPUTS
    a = rows * -(-depth // block_size) * (block_size * bits // 8 + 4)
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
