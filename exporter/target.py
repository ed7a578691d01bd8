"""What a weight is stored as: floats, quantized, or in MXFP4 as the checkpoint has it."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError
from onnxport.exporter import mxfp4
from onnxport.exporter.offsets import OffsetBlocks, keep_minima, quantize_offsets
from onnxport.exporter.plan_parts import MatrixPlan
from onnxport.exporter.quantize import BlockFormat, pack_zero_points, quantize_rows

POWERS: Final = np.dtype(ml_dtypes.float8_e8m0fnu)  # of scales that are exponents

Array = NDArray[np.float32]


class Target:
    """The arrays that a matrix is converted into, or where it `keeps` what it is."""

    def __init__(
        self,
        plan: MatrixPlan,
        block: BlockFormat | None,
        dtype: np.dtype[Any],
        *,
        rows: int | None = None,
        by_rows: bool = True,
        may_move_zero: bool = False,
        has_offsets: bool = False,
    ) -> None:
        """Make them.

        Args:
            plan: The matrix.
            block: How it is quantized; None: it is not.
            dtype: What it, or its scales, are stored in.
            rows: How many of them there are; None: all.
            by_rows: Whether it is stored [N, K] if it is not quantized, and not [K, N].
            may_move_zero: Whether blocks may have zero points of their own.
            has_offsets: Whether blocks have offsets, in place of zero points.
        """
        rows = plan.rows if rows is None else rows
        self.block = block
        self.keeps = block is not None and block.is_fp4
        self._dtype = dtype
        self._by_rows = by_rows
        self._part_rows = plan.parts[0].rows if plan.apart else None
        self.weight: NDArray[Any]
        self.scales: NDArray[Any] | None = None
        self.offsets: NDArray[Any] | None = None
        self._zero_points: NDArray[np.uint8] | None = None
        if block is None:
            dims: tuple[int, ...] = (rows, plan.columns) if by_rows else (plan.columns, rows)
            if plan.apart:
                dims = (len(plan.parts), plan.columns, plan.parts[0].rows)
            self.weight = np.empty(dims, dtype)
        else:
            blocks = block.num_blocks(plan.columns)
            self.weight = np.empty((rows, blocks, block.blob_bytes), np.uint8)
            self.scales = np.empty((rows, blocks), POWERS if block.is_fp4 else dtype)
            if has_offsets:
                self.offsets = np.empty((rows, blocks), dtype)
            elif may_move_zero:
                self._zero_points = np.full((rows, blocks), block.zero_point, np.uint8)

    @property
    def zero_points(self) -> NDArray[np.uint8] | None:
        """Those of all blocks, see `pack_zero_points`; None: no block has one of its own."""
        if self.block is None or self._zero_points is None:
            return None
        return pack_zero_points(self._zero_points, self.block)

    def convert(
        self,
        name: str,
        values: Array,
        where: slice,
        meant: Array | None,
        steps: Array | None = None,
        minima: Array | None = None,
    ) -> int:
        """Store `values` at the rows `where`; what they then mean goes to `meant`.

        `steps` are what they are multiples of, or, less `minima`, where these are given. What is
        returned is how many blocks have these for scales: see `quantize_rows` and `keep_minima`.
        """
        if self.block is None:
            converted = to_dtype(name, values, self._dtype)
            if self._part_rows is not None:  # rows that are given are of one part
                part, first = divmod(where.start, self._part_rows)
                self.weight[part, :, first : first + len(converted)] = converted.T
            elif self._by_rows:
                self.weight[where] = converted
            else:
                self.weight[:, where] = converted.T
            if meant is not None:
                meant[...] = converted
            return 0
        assert self.scales is not None
        scales = self.scales[where]
        if self.offsets is not None:
            return self._with_offsets(name, values, where, meant, steps, minima)
        zero_points = None if self._zero_points is None else self._zero_points[where]
        kept = quantize_rows(
            values, self.block, self.weight[where], scales, meant, steps, zero_points
        )
        if not np.isfinite(scales).all():
            raise not_finite(name, values, self._dtype)
        return kept

    def _with_offsets(
        self,
        name: str,
        values: Array,
        where: slice,
        meant: Array | None,
        steps: Array | None,
        minima: Array | None,
    ) -> int:
        assert self.block is not None
        assert self.scales is not None
        assert self.offsets is not None
        out = OffsetBlocks(self.weight[where], self.scales[where], self.offsets[where])
        if minima is None:
            kept = quantize_offsets(values, self.block, out, meant, steps)
        else:
            assert steps is not None
            kept = keep_minima(values, steps, minima, out, meant)
        if not (np.isfinite(out.scales).all() and np.isfinite(out.offsets).all()):
            raise not_finite(name, values, self._dtype)
        return kept

    def keep(
        self,
        name: str,
        blocks: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        where: slice,
        meant: Array | None,
    ) -> None:
        """Store rows in MXFP4 as they are; what they mean goes to `meant`."""
        assert self.scales is not None
        numbers = mxfp4.decode(blocks, scales)
        if not np.isfinite(numbers).all():
            raise not_finite(name, numbers, numbers.dtype)
        self.weight[where] = blocks
        self.scales[where] = scales.view(POWERS)
        if meant is not None:
            meant[...] = numbers


def to_dtype(name: str, values: Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Narrow to `dtype`. Raises CheckpointError for what is not finite there."""
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    if not np.isfinite(converted).all():
        raise not_finite(name, values, dtype)
    return converted


def not_finite(name: str, values: Array, dtype: np.dtype[Any]) -> CheckpointError:
    """The error for values that are not finite, or not in `dtype`."""
    if not np.isfinite(values).all():
        return CheckpointError(
            f"the tensor {name} holds values that are not finite (NaN or infinity): the checkpoint "
            "is damaged, or was saved from a training run that diverged."
        )
    largest = float(np.abs(values).max())
    return CheckpointError(
        f"the tensor {name} holds {largest:.4g}, which is beyond the largest {dtype} "
        f"({np.finfo(dtype).max:.6g}). Export with the precision fp32."
    )
