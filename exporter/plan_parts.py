"""Matrices and vectors made of tensors of a checkpoint, and how most of them are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.families.base import TensorNames


class Part(NamedTuple):
    """Rows of a tensor of the checkpoint."""

    tensor: str
    rows: int
    first: int = 0  # of them
    shape: tuple[int, ...] | None = None  # of the tensor; None: these rows are all
    # It is [experts, columns, rows], or without experts; these are rows of one of them.
    is_transposed: bool = False
    scale: float = 1.0  # what these rows are multiplied with, beside what all of the matrix is


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A matrix [rows, columns] = [N, K], stacked from tensors of the checkpoint."""

    parts: tuple[Part, ...]
    columns: int
    biases: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of rows as stored: tensors, shapes
    biases_by_parts: bool = False  # of one tensor: those of a part are where its rows are
    scale: float = 1.0  # what all of it is multiplied with
    interleaved: bool = False  # rows of each two parts, which have as many, take turns
    in_turns: bool = False  # rows of gate and up take turns in each part
    is_exact: bool = False  # it is not quantized, whatever else is
    whole_blocks: int | None = None  # what blocks that share a scale divide; None: the last may jut
    by_rows: bool = False  # where it is not quantized, it is stored [N, K]
    # It is not quantized, and each part is stored [K, rows of a part], one behind the other.
    apart: bool = False
    part_scales: str | None = None  # tensor [parts]: what each part is multiplied with besides

    @property
    def rows(self) -> int:
        """Output features."""
        return sum(part.rows for part in self.parts)

    def as_stored(self, biases: NDArray[Any]) -> NDArray[Any]:
        """Biases of the checkpoint in the order of rows, [rows]."""
        if not self.biases_by_parts:
            return biases
        return np.concatenate([biases[one.first : one.first + one.rows] for one in self.parts])

    def by_parts(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of the rows as they are stored, [rows], where parts lie below each other."""
        if not self.interleaved:
            return values
        return values.reshape(-1, self.parts[0].rows, 2).swapaxes(1, 2).ravel()


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """A norm's weight, or what else has an element a feature."""

    tensor: str | None  # None: there is none, and all are the offset, times the scale
    shape: tuple[int, ...]  # of the tensor, all of which is one vector
    offset: float = 0.0  # what is added to it
    scale: float = 1.0  # what the sum is multiplied with
    is_exact: bool = False  # it is stored in float32, whatever activations are
    more: tuple[str, ...] = ()  # tensors that lie behind it
    more_shapes: tuple[tuple[int, ...], ...] | None = None  # of these; None: the first one's

    @property
    def tensors(self) -> tuple[str, ...]:
        """All of them, in order."""
        return () if self.tensor is None else (self.tensor, *self.more)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each of them."""
        others = (self.shape,) * len(self.more) if self.more_shapes is None else self.more_shapes
        return () if self.tensor is None else (self.shape, *others)


def stack_rows(
    prefix: str, names: tuple[str, ...], rows: tuple[int, ...], columns: int, *, biased: bool
) -> MatrixPlan:
    """Projections below each other, or one tensor that has them so."""
    heights = (sum(rows),) if len(names) == 1 else rows
    sizes = tuple((prefix + name, size) for name, size in zip(names, heights, strict=True))
    return MatrixPlan(
        tuple(Part(f"{name}.weight", size) for name, size in sizes),
        columns,
        tuple((f"{name}.bias", (size,)) for name, size in sizes) if biased else (),
    )


def transposed(plan: MatrixPlan) -> MatrixPlan:
    """The matrix of one tensor which is stored [columns, rows]."""
    (part,) = plan.parts
    shape = (plan.columns, part.rows)
    return replace(plan, parts=(part._replace(shape=shape, is_transposed=True),))


def times(plan: MatrixPlan, scales: tuple[float, ...]) -> MatrixPlan:
    """The matrix with each of its parts times a number of its own."""
    parts = zip(plan.parts, scales, strict=True)
    return replace(plan, parts=tuple(part._replace(scale=scale) for part, scale in parts))


def split_by_head(
    tensor: str, heads: int, rows: tuple[int, ...], columns: int
) -> list[tuple[Part, ...]]:
    """The parts of a tensor where rows of each of several kinds lie together, head by head."""
    height = sum(rows)
    shape = (heads * height, columns)
    return [
        tuple(Part(tensor, size, head * height + sum(rows[:kind]), shape) for head in range(heads))
        for kind, size in enumerate(rows)
    ]


def plan_norm(names: TensorNames, tensor: str, size: int, scale: float | None = None) -> VectorPlan:
    """A norm of `size` features, times the scale."""
    scale = 1.0 if scale is None else scale
    if names.plain_norms:
        return VectorPlan(None, (size,), 1.0, scale)
    return VectorPlan(tensor, (size,), names.norm_offset, scale)


def bias_of(tensor: str) -> str:
    """The bias beside a weight."""
    return f"{tensor.removesuffix('weight')}bias"
