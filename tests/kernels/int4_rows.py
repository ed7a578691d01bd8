"""Rows of an int4 cache in plain NumPy, written from csrc/attention.h.

A row is uint8 [head_size / 2 + 2 * groups + 4]: levels, two in a byte, the first one in its low half;
the step of each group of 32 channels; its least number, an int8; the bytes of a float32 scale.
"""

from __future__ import annotations

import numpy as np

GROUP = 32


def row_bytes(head_size: int) -> int:
    return head_size // 2 + 2 * num_groups(head_size) + 4


def num_groups(head_size: int) -> int:
    return -(-head_size // GROUP)


def head_size_of(width: int) -> int:
    return next(size for size in range(8, 257, 8) if row_bytes(size) == width)


def pack(numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Rows [..., row_bytes] of int8 [..., head_size] and scales, float32 [..., 1]."""
    size = numbers.shape[-1]
    levels, steps, firsts = np.empty(numbers.shape, np.uint8), [], []
    for begin in range(0, size, GROUP):
        own = numbers[..., begin : begin + GROUP].astype(int)
        first, last = own.min(axis=-1, keepdims=True), own.max(axis=-1, keepdims=True)
        step = np.maximum(1, (last - first + 7) // 15)
        most = np.minimum(15, (127 - first) // step)
        level = np.minimum((own - first + step // 2) // step, most)
        levels[..., begin : begin + GROUP] = level
        steps.append(step.astype(np.uint8))
        firsts.append(first.astype(np.int8).view(np.uint8))
    pairs = levels[..., 0::2] | levels[..., 1::2] << 4
    parts = [pairs, *steps, *firsts, np.ascontiguousarray(scale).view(np.uint8)]
    return np.concatenate(parts, axis=-1)


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Levels [..., head_size], steps and firsts [..., groups], int; scales, float32 [..., 1]."""
    size = head_size_of(rows.shape[-1])
    groups, half = num_groups(size), size // 2
    levels = np.stack([rows[..., :half] & 15, rows[..., :half] >> 4], axis=-1)
    steps = rows[..., half : half + groups].astype(int)
    firsts = rows[..., half + groups : half + 2 * groups].view(np.int8).astype(int)
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    return levels.reshape(*rows.shape[:-1], size).astype(int), steps, firsts, scale


def numbers_of(rows: np.ndarray) -> np.ndarray:
    """What the rows' levels stand for, int [..., head_size]."""
    levels, steps, firsts, _ = split(rows)
    group = np.arange(levels.shape[-1]) // GROUP
    return firsts[..., group] + levels * steps[..., group]


def dequantize(rows: np.ndarray) -> np.ndarray:
    """float64 [..., head_size]."""
    return numbers_of(rows) * split(rows)[3].astype(np.float64)


def level_place(size: int, token: int, channel: int, key: bool) -> tuple[int, bool]:
    """The byte of a tile that a level lies in, and whether in its high half."""
    if key:
        return channel // 8 * 64 + token * 4 + channel % 4, channel % 8 >= 4
    begin = channel // GROUP * GROUP
    half = min(GROUP, size - begin) // 2
    place = begin // 2 + (channel - begin) % half
    return token // 4 * 2 * size + place * 4 + token % 4, channel - begin >= half


def to_tiled(cache: np.ndarray, key: bool) -> np.ndarray:
    """Rows [blocks, block_size, heads, row_bytes] as tiles, in the same shape."""
    blocks, block_size, heads, width = cache.shape
    tiles = cache.reshape(blocks, block_size // 16, 16, heads, width).transpose(0, 3, 1, 2, 4)
    out = [tile_bytes(tile, key) for tile in np.ascontiguousarray(tiles).reshape(-1, 16, width)]
    return np.concatenate(out).reshape(cache.shape)


def tile_bytes(rows: np.ndarray, key: bool) -> np.ndarray:
    """The bytes of sixteen tokens' tile, one number at a time."""
    levels, steps, firsts, scale = split(rows)
    size = levels.shape[-1]
    out = np.zeros(16 * size // 2, np.uint8)
    for token in range(16):
        for channel in range(size):
            byte, is_high = level_place(size, token, channel, key)
            out[byte] |= levels[token, channel] << 4 * is_high
    sides = np.stack([steps.T.astype(np.uint8), firsts.T.astype(np.int8).view(np.uint8)], axis=1)
    return np.concatenate([out, sides.reshape(-1), scale.reshape(-1).view(np.uint8)])


def from_tiled(cache: np.ndarray, key: bool) -> np.ndarray:
    """The inverse of `to_tiled`."""
    blocks, block_size, heads, width = cache.shape
    size = head_size_of(width)
    half, groups = size // 2, num_groups(size)
    tiles = cache.reshape(-1, 16 * width)
    levels = np.zeros((len(tiles), 16, size), np.uint8)
    for token in range(16):
        for channel in range(size):
            byte, is_high = level_place(size, token, channel, key)
            levels[:, token, channel] = tiles[:, byte] >> 4 * is_high & 15
    pairs = levels[..., 0::2] | levels[..., 1::2] << 4
    sides = tiles[:, 16 * half : 16 * half + 32 * groups].reshape(-1, groups, 2, 16)
    parts = [pairs, sides[:, :, 0].swapaxes(1, 2), sides[:, :, 1].swapaxes(1, 2)]
    parts.append(tiles[:, 16 * half + 32 * groups :].reshape(-1, 16, 4))
    rows = np.concatenate(parts, axis=-1).reshape(blocks, heads, block_size // 16, 16, width)
    return np.ascontiguousarray(rows.transpose(0, 2, 3, 1, 4)).reshape(cache.shape)
