"""Adapters in int8 and int4 as they lie in a slot, and inputs as products round them."""

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


@dataclass(frozen=True)
class StoredB:
    """Rows of B of one projection."""

    numbers: NDArray[np.int8]  # [rank, columns]
    scales: NDArray[np.float32]  # [rank]
    columns: NDArray[np.int8]  # [columns], scales of int4; ones of int8

    def added(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """What an input adds, [columns], that A makes these of, [rank]."""
        scaled = factors * self.scales
        if (self.columns != 1).any() and len(scaled):
            scaled = _rounded_to_int8(scaled)
        found: NDArray[np.float64] = scaled @ self.numbers * self.columns
        return found

    def slack(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far that may be off where a factor is rounded to the other side, [columns]."""
        step = np.abs(factors * self.scales).max(initial=0) / 127
        most = np.abs(self.numbers * self.columns.astype(float)).max(axis=0, initial=0)
        found: NDArray[np.float64] = step * most * (self.columns != 1).any()
        return found


def _rounded_to_int8(factors: NDArray[np.float64]) -> NDArray[np.float64]:
    scale = np.abs(factors).max() / 127
    return np.rint(factors / scale) * scale if scale else factors


def random_a(
    random: np.random.Generator,
    rank: int,
    depth: int,
    bits: int,
    block_size: int,
    dtype: str = "int8",
) -> StoredA:
    """The largest and the least numbers are among them, if there are many."""
    most = 127 if bits == 8 else 119 if dtype == "int8" else 7
    blocks = -(-depth // block_size)
    numbers = random.integers(-most - (most == 7), most + 1, (rank, depth))
    scales = random.uniform(1e-3, 1e-2, (rank, blocks)).astype(np.float32)
    return StoredA(numbers, scales * np.float32(127 // most), block_size)


def random_b(random: np.random.Generator, rank: int, columns: int, dtype: str = "int8") -> StoredB:
    """As `random_a`, where it is filled at all."""
    scales = random.uniform(1e-3, 1e-2, rank).astype(np.float32)
    if dtype == "int8":
        numbers = random.integers(-127, 128, (rank, columns)).astype(np.int8)
        return StoredB(numbers, scales, np.ones(columns, np.int8))
    numbers = random.integers(-8, 8, (rank, columns)).astype(np.int8)
    own = random.integers(-127, 128, columns).astype(np.int8)
    return StoredB(numbers, scales / np.float32(8), own)


def outputs_of_panels(rows: int, bits: int, dtype: str = "int8") -> list[int]:
    """Of rows of A: whole panels, and half a one for what is left if that has room."""
    left, found = rows * (8 // bits if dtype == "int8" else 1), []
    while left > 0:
        found.append(OUTPUTS // 2 if left <= OUTPUTS // 2 else OUTPUTS)
        left -= found[-1]
    return found


def packed_a(
    parts: Sequence[StoredA], depth: int, bits: int, block_size: int, dtype: str = "int8"
) -> NDArray[np.int8]:
    """The rows of all projections, as the weights of a product."""
    rows = [(part, r) for part in parts for r in range(len(part.numbers))]
    panels, next_row = [], 0
    for outputs in outputs_of_panels(len(rows), bits, dtype):
        of_panel = outputs // (8 // bits if dtype == "int8" else 1)
        own = rows[next_row : next_row + of_panel]
        panels.append(_panel(own, outputs, depth, (bits, block_size), has_halves=dtype == "int8"))
        next_row += of_panel
    return np.concatenate([np.zeros(0, np.int8), *panels])


def _panel(
    rows: Sequence[tuple[StoredA, int]],
    outputs: int,
    depth: int,
    format_of: tuple[int, int],
    *,
    has_halves: bool,
) -> NDArray[np.int8]:
    bits, block_size = format_of
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
        high = np.floor_divide(numbers + 8, 16) if has_halves else numbers
        low = numbers - 16 * high
        for half, own, scale in ((0, high, 16), (1, low, 1))[: 1 + has_halves]:
            lane = output + outputs // 2 * half
            where = place // 8 * (4 * outputs) + lane * 4 + place % 8 // 2
            for odd in (0, 1):
                some = place % 2 == odd
                kept = found[block[some], where[some]] & (0xF0 if odd == 0 else 0x0F)
                nibble = (own[some] + 8).astype(np.uint8) << (4 * odd)
                found[block[some], where[some]] = kept | nibble
            _set_scales(found, quant_bytes, lane, scales * np.float32(scale if has_halves else 1))
    return found.ravel().view(np.int8)


def packed_b(b: StoredB, dtype: str = "int8") -> NDArray[np.int8]:
    """B of one projection."""
    rows = b.numbers
    rank, columns = rows.shape
    width = in_panels(columns)
    if dtype == "int8":
        wide = np.full((rank, width), NOTHING, np.int8)
        wide[:, :columns] = rows
        return wide.reshape(rank, width // PANEL, PANEL).swapaxes(0, 1).ravel()
    if rank == 0:
        return np.zeros(0, np.int8)
    groups = -(-rank // 8)
    panels = np.full((width // PANEL, PANEL * (1 + 4 * groups)), NOTHING, np.uint8)
    for c in range(columns):
        panel, at = panels[c // PANEL], c % PANEL
        panel[at] = b.columns.view(np.uint8)[c]
        for r in range(rank):
            byte = PANEL + r // 8 * 4 * PANEL + at * 4 + r % 4
            shift = 4 * (r % 8 // 4)
            panel[byte] = panel[byte] & (0xF0 >> shift) | int(rows[r, c] + 8) << shift
    return panels.ravel().view(np.int8)


def room_of(
    depth: int,
    columns: Sequence[int],
    max_rank: int,
    bits: int,
    block_size: int,
    dtype: str = "int8",
) -> int:
    """Bytes that a product needs in a slot."""
    outputs = sum(outputs_of_panels(max_rank * len(columns), bits, dtype))
    a = outputs * -(-depth // block_size) * (block_size * bits // 8 + 4)
    of_column = max_rank if dtype == "int8" else 1 + -(-max_rank // 8) * 4
    return a + of_column * sum(in_panels(count) for count in columns)


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
