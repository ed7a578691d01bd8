"""Rows of an int4 cache in plain NumPy, written from csrc/attention.h.

A row is uint8 [head_size / 2 + 2 * groups + 4]: levels, those of channels half a group apart in a
byte, the first one's in its low half; the step of each group of 32 channels; its first number, an
int8; the bytes of a float32 scale.
"""

from __future__ import annotations

import numpy as np

GROUP = 32


def row_bytes(head_size: int) -> int:
    return head_size // 2 + 2 * num_groups(head_size) + 4


def num_groups(head_size: int) -> int:
    return -(-head_size // GROUP)


def head_size_of(width: int) -> int:
    return next(size for size in range(8, 513, 8) if row_bytes(size) == width)


def half_channels(size: int) -> tuple[list[int], list[int]]:
    """The channels in the low halves of a row's bytes, and those in the high ones."""
    low: list[int] = []
    high: list[int] = []
    for begin in range(0, size, GROUP):
        half = min(GROUP, size - begin) // 2
        low += range(begin, begin + half)
        high += range(begin + half, begin + 2 * half)
    return low, high


def pack(numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Rows [..., row_bytes] of int8 [..., head_size] and scales, float32 [..., 1]."""
    size = numbers.shape[-1]
    levels, steps, firsts = np.empty(numbers.shape, np.uint8), [], []
    for begin in range(0, size, GROUP):
        own = numbers[..., begin : begin + GROUP].astype(int)
        least, last = own.min(axis=-1, keepdims=True), own.max(axis=-1, keepdims=True)
        step = np.maximum(1, (last - least + 7) // 15)
        first = np.clip(np.minimum(least, 127 - 15 * step), -127, None)
        most = np.minimum(15, (127 - first) // step)
        level = np.minimum((own - first + step // 2) // step, most)
        levels[..., begin : begin + GROUP] = level
        steps.append(step.astype(np.uint8))
        firsts.append(first.astype(np.int8).view(np.uint8))
    low, high = half_channels(size)
    pairs = levels[..., low] | levels[..., high] << 4
    parts = [pairs, *steps, *firsts, np.ascontiguousarray(scale).view(np.uint8)]
    return np.concatenate(parts, axis=-1)


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Levels [..., head_size], steps and firsts [..., groups], int; scales, float32 [..., 1]."""
    size = head_size_of(rows.shape[-1])
    groups, half = num_groups(size), size // 2
    levels = np.empty((*rows.shape[:-1], size), int)
    low, high = half_channels(size)
    levels[..., low], levels[..., high] = rows[..., :half] & 15, rows[..., :half] >> 4
    steps = rows[..., half : half + groups].astype(int)
    firsts = rows[..., half + groups : half + 2 * groups].view(np.int8).astype(int)
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    return levels, steps, firsts, scale


def numbers_of(rows: np.ndarray) -> np.ndarray:
    """What the rows' levels stand for, int [..., head_size]."""
    levels, steps, firsts, _ = split(rows)
    group = np.arange(levels.shape[-1]) // GROUP
    return firsts[..., group] + levels * steps[..., group]


def dequantize(rows: np.ndarray) -> np.ndarray:
    """float64 [..., head_size]."""
    return numbers_of(rows) * split(rows)[3].astype(np.float64)


def byte_place(size: int, token: int, byte: int, key: bool) -> int:
    """Where a tile has a byte of levels of a token's row."""
    if key:
        return byte // 4 * 64 + token * 4 + byte % 4
    return token // 4 * 2 * size + byte * 4 + token % 4


def to_tiled(cache: np.ndarray, key: bool) -> np.ndarray:
    """Rows [blocks, block_size, heads, row_bytes] as tiles, in the same shape."""
    blocks, block_size, heads, width = cache.shape
    tiles = cache.reshape(blocks, block_size // 16, 16, heads, width).transpose(0, 3, 1, 2, 4)
    out = [tile_bytes(tile, key) for tile in np.ascontiguousarray(tiles).reshape(-1, 16, width)]
    return np.concatenate(out).reshape(cache.shape)


def tile_bytes(rows: np.ndarray, key: bool) -> np.ndarray:
    """The bytes of sixteen tokens' tile, one after the other."""
    size = head_size_of(rows.shape[-1])
    half, groups = size // 2, num_groups(size)
    out = np.zeros(16 * half, np.uint8)
    for token in range(16):
        for byte in range(half):
            out[byte_place(size, token, byte, key)] = rows[token, byte]
    sides = [rows[:, [half + g, half + groups + g]].T.reshape(-1) for g in range(groups)]
    return np.concatenate([out, *sides, rows[:, -4:].reshape(-1)])


def from_tiled(cache: np.ndarray, key: bool) -> np.ndarray:
    """The inverse of `to_tiled`."""
    blocks, block_size, heads, width = cache.shape
    size = head_size_of(width)
    half, groups = size // 2, num_groups(size)
    tiles = cache.reshape(-1, 16 * width)
    rows = np.zeros((len(tiles), 16, width), np.uint8)
    for token in range(16):
        for byte in range(half):
            rows[:, token, byte] = tiles[:, byte_place(size, token, byte, key)]
    sides = tiles[:, 16 * half : 16 * half + 32 * groups].reshape(-1, groups, 2, 16)
    rows[:, :, half : half + groups] = sides[:, :, 0].swapaxes(1, 2)
    rows[:, :, half + groups : half + 2 * groups] = sides[:, :, 1].swapaxes(1, 2)
    rows[:, :, -4:] = tiles[:, 16 * half + 32 * groups :].reshape(-1, 16, 4)
    rows = rows.reshape(blocks, heads, block_size // 16, 16, width)
    return np.ascontiguousarray(rows.transpose(0, 2, 3, 1, 4)).reshape(cache.shape)
