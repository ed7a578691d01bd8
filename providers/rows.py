"""Rows of keys and values in NumPy, as `onnxport.cache_rows` describes them, and as floats.

The types of arrays tell the types of rows: int8 is that, and uint8 is int4.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from onnxport.cache_rows import (
    INT4,
    INT4_GROUP,
    SCALE_BYTES,
    int4_groups,
    int4_head_size,
)

LARGEST_HALF: Final = np.float32(65504)
MOST: Final = 127  # the largest int8 that is used, and its negative the smallest
MOST_LEVEL: Final = 15
# Rounds a positive float32 up to 16 significant bits: see `int8_scale` in cpu/csrc/cache_impl.h.
SCALE_MASK: Final = np.uint32(0xFF)
LARGEST_SCALE_BITS: Final = np.uint32(0x7C010200)  # MOST times that one is finite
SMALLEST_NORMAL: Final = np.finfo(np.float32).tiny
INTEGERS: Final = (np.dtype(np.int8), np.dtype(np.uint8))


def element_type(name: str) -> DTypeLike:
    """NumPy's type of an element of a row of a type of `onnxport.cache_rows`."""
    if name == INT4:
        return np.uint8
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def convert(content: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Return rows in another type, those that have it as they are.

    What is finite stays finite: past float16's range it becomes the largest number there, as in
    the kernel that writes such a cache.

    Args:
        content: [..., elements of a row], of any type that rows have.
        dtype: that is wanted.
    """
    if content.dtype == dtype:
        return content
    if content.dtype in INTEGERS:
        content = numbers_of(content)
    if dtype == np.int8:
        return int8_rows(content.astype(np.float32, copy=False))
    if dtype == np.uint8:
        return int4_rows(content.astype(np.float32, copy=False))
    if dtype == np.float16:
        wide = content.astype(np.float32, copy=False)
        content = np.where(np.isinf(wide), wide, np.clip(wide, -LARGEST_HALF, LARGEST_HALF))
    return content.astype(dtype, copy=False)


def scales_of(rows: NDArray[Any]) -> NDArray[np.float32]:
    """The scales of rows of integers, float32 [..., 1]."""
    return np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)


def numbers_of(rows: NDArray[Any]) -> NDArray[np.float32]:
    """What rows of integers stand for, float32 [..., head_size]; exact."""
    numbers = rows[..., :-SCALE_BYTES] if rows.dtype == np.int8 else _int8_of(rows)
    found: NDArray[np.float32] = numbers.astype(np.float32)
    found *= scales_of(rows)
    return found


def int8_rows(x: NDArray[np.float32]) -> NDArray[np.int8]:
    """Rows of int8, [..., head_size + 4], of numbers [..., head_size]: the bytes of our kernel.

    A scale is a 127th of the largest magnitude with 16 significant bits, so that a number times its
    scale is exact in float32, and what was read is written as the same bytes. It is zero where a
    127th is no normal float32, and NaN where the magnitude is not finite.
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)
    exact = largest / np.float32(MOST)
    bits = (exact.view(np.uint32) + SCALE_MASK) & ~SCALE_MASK
    scale = np.minimum(bits, LARGEST_SCALE_BITS).view(np.float32)
    scale = np.where(exact < SMALLEST_NORMAL, np.float32(0), scale)
    usable = np.isfinite(largest) & (scale > 0)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=usable)
    numbers = np.rint(np.where(usable, x, np.float32(0)) * inverse).astype(np.int8)
    scale = np.where(np.isfinite(largest), scale, np.float32(np.nan))
    return np.concatenate([numbers, scale.view(np.int8)], axis=-1)


def int4_rows(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows of int4 of numbers [..., head_size]: the bytes of our kernel, see its `Levels`.

    They are those of int8 in coarser steps. Writing what was read may round once more.
    """
    fine = int8_rows(x)
    numbers, size = fine[..., :-SCALE_BYTES].astype(np.int16), x.shape[-1]
    pairs = np.empty((*numbers.shape[:-1], size // 2), np.uint8)
    steps = np.empty((*numbers.shape[:-1], int4_groups(size)), np.uint8)
    firsts = np.empty(steps.shape, np.int8)
    for group in range(int4_groups(size)):
        own = slice(group * INT4_GROUP, (group + 1) * INT4_GROUP)
        least = numbers[..., own].min(axis=-1, keepdims=True)
        spread = numbers[..., own].max(axis=-1, keepdims=True) - least
        step = np.maximum((spread + MOST_LEVEL // 2) // MOST_LEVEL, 1)
        # so far down that the last level is an int8, too, if that can be
        first = np.maximum(np.minimum(least, MOST - MOST_LEVEL * step), -MOST)
        most = np.minimum((MOST - first) // step, MOST_LEVEL)
        level = np.minimum((numbers[..., own] - first + step // 2) // step, most).astype(np.uint8)
        half = level.shape[-1] // 2
        pairs[..., own.start // 2 : own.start // 2 + half] = (
            level[..., :half] | level[..., half:] << 4
        )
        steps[..., group], firsts[..., group] = step[..., 0], first[..., 0]
    scale = fine[..., -SCALE_BYTES:].view(np.uint8)
    return np.concatenate([pairs, steps, firsts.view(np.uint8), scale], axis=-1)


def _int8_of(rows: NDArray[np.uint8]) -> NDArray[np.int16]:
    """What levels of int4 stand for, without their scales, [..., head_size]."""
    size = int4_head_size(rows.shape[-1])
    assert size is not None, f"rows of {rows.shape[-1]} bytes are no {INT4}"
    half, groups = size // 2, int4_groups(size)
    numbers = np.empty((*rows.shape[:-1], size), np.int16)
    for group in range(groups):
        begin, end = group * INT4_GROUP, min(size, (group + 1) * INT4_GROUP)
        middle = (begin + end) // 2
        pairs = rows[..., begin // 2 : end // 2]
        numbers[..., begin:middle], numbers[..., middle:end] = pairs & MOST_LEVEL, pairs >> 4
        numbers[..., begin:end] *= rows[..., half + group, None]
        numbers[..., begin:end] += rows[..., half + groups + group, None].view(np.int8)
    return numbers
