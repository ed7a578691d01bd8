"""Arrays that have other numbers in every step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.int32, np.int64, np.float32, np.float64)

MOST_SHAPES = 16  # of which a buffer keeps the arrays
_CODES: dict[type, Literal["q", "i", "f", "d"]] = {
    np.int64: "q",
    np.int32: "i",
    np.float32: "f",
    np.float64: "d",
}


class StepBuffer(Generic[Number]):
    """Room for an array that has other numbers in every step, and few shapes.

    As long as a shape comes back soon, so does the array, the object, that has it.

    Attributes:
        view: of all numbers that there is room for, or more; `shaped` may replace it.
    """

    def __init__(self, dtype: type[Number], size: int) -> None:
        """Make room for so many numbers; more make it grow."""
        self._dtype: type[Number] = dtype
        self._code = _CODES[dtype]
        self._room: NDArray[Number]  # of one axis
        self._arrays: dict[tuple[int, ...], NDArray[Number]]  # its front, by shape
        self._make_room(size)

    def shaped(self, shape: tuple[int, ...]) -> NDArray[Number]:
        """The array of a shape, with whatever numbers were written to the buffer last."""
        found = self._arrays.get(shape)
        return self._shape(shape) if found is None else found

    def fill(self, numbers: Iterable[float]) -> NDArray[Number]:
        """The array of these numbers."""
        values = array(self._code, numbers)
        filled = self.shaped((len(values),))
        self.view[: len(values)] = values
        return filled

    def _shape(self, shape: tuple[int, ...]) -> NDArray[Number]:
        size = prod(shape)
        if size > self._room.size:
            self._make_room(2 * size)
        elif len(self._arrays) == MOST_SHAPES:
            self._arrays.clear()
        found = self._arrays[shape] = self._room[:size].reshape(shape)
        return found

    def _make_room(self, size: int) -> None:
        self._room = np.zeros(size, self._dtype)
        self._arrays = {}
        self.view: memoryview[Any] = self._room.data.cast("B").cast(self._code)


def fill_tables(
    buffer: StepBuffer[np.int32], tables: Sequence[array[int]], width: int
) -> NDArray[np.int32]:
    """Fill a buffer with tables, each in a row of `width`, whose rest is 0."""
    packed = buffer.shaped((len(tables), width))
    view = buffer.view
    start = 0
    for blocks in tables:
        end = start + len(blocks)
        view[start:end] = blocks
        start += width
        if end < start:
            view[end:start] = array("i", bytes(4 * (start - end)))
    return packed
