"""Weights on their way from the checkpoint into the artifact, applied once as they pass.

`StreamingWeights` is the reference's `WeightSource`: while the forward pass asks for one weight
after the other, each is read in panels of rows, converted or quantized, multiplied with the
activations as what was stored means, and appended to the weights file. So the checkpoint is read
once, and memory is that of the largest stored matrix and a few panels; of a matrix that the
checkpoint has in integers a byte a number besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter import rope
from onnxport.exporter.checkpoint import Checkpoint, to_float32
from onnxport.exporter.formats import Formats
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import EMBEDDING, HEAD, WeightPlan
from onnxport.exporter.plan_parts import MatrixPlan, Part
from onnxport.exporter.products import Product, SumOfProducts
from onnxport.exporter.quantize import BlockFormat
from onnxport.exporter.target import Target, to_dtype
from onnxport.graphs.artifact_writer import ArtifactWriter
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import TensorRef

_PANEL_ELEMENTS: Final = 1 << 22  # 16 MiB of float32

Array = NDArray[np.float32]
# [rows, K] in the checkpoint's dtype, and of integers their steps, see `Checkpoint.read_steps`, and
# minima, see `Checkpoint.read_minima`; or MXFP4 to be kept, see `Checkpoint.read_blocks`.
_Rows = tuple[NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix in the weights file, `y = x @ matrix.T + bias`."""

    # dense [K, N], or [N, K] if `by_rows`, or as `MatrixPlan.apart` says; quants uint8 [N, blocks,
    # blob_bytes]
    weight: TensorRef
    rows: int  # N, output features
    columns: int  # K, input features
    block: BlockFormat | None = None  # None: dense
    scales: TensorRef | None = None  # [N, blocks] where quantized
    bias: TensorRef | None = None  # [N]
    by_rows: bool = False
    zero_points: TensorRef | None = None  # [N, ceil(blocks * bits / 8)]; None: all 2^(bits - 1)
    offsets: TensorRef | None = None  # [N, blocks], what is added to each block; None: nothing


@dataclass(slots=True)
class StoredWeights:
    """All weights of an artifact by role; `head` is the embedding where they are tied."""

    ropes: dict[RopeSpec, tuple[TensorRef, TensorRef]]  # cos, sin: see `rope.tables`
    matrices: dict[str, StoredMatrix] = field(default_factory=dict)
    vectors: dict[str, TensorRef] = field(default_factory=dict)

    @property
    def have_zero_points(self) -> bool:
        """Whether some matrices have zero points of their own."""
        return any(one.zero_points is not None for one in self.matrices.values())

    @property
    def have_offsets(self) -> bool:
        """Whether some matrices have offsets."""
        return any(one.offsets is not None for one in self.matrices.values())


class StreamingWeights:
    """A `reference.WeightSource` that stores each weight as it is used. A context manager."""

    def __init__(
        self,
        spec: ArchSpec,
        plan: WeightPlan,
        checkpoint: Checkpoint,
        writer: ArtifactWriter,
        options: ExportOptions,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Store the RoPE tables and start the worker threads.

        `on_bytes` is told how many bytes of the checkpoint were taken in, as it goes.
        """
        self._tied = spec.tie_word_embeddings
        self._plan = plan
        self._checkpoint = checkpoint
        self._writer = writer
        self._options = options
        self._formats = Formats(plan, options, checkpoint)
        self._on_bytes = on_bytes
        self._threads = options.num_threads
        self._pool = ThreadPoolExecutor(self._threads, "onnxport-export")
        self.integer_blocks = 0  # of quantized matrices that the checkpoint has in integers
        self.kept_blocks = 0  # of these, stored as they are
        self.stored = StoredWeights(
            {
                one: _store_rope("rope" if one == spec.rope else "rope.local", one, spec, writer)
                for one in spec.ropes
            }
        )

    def __enter__(self) -> StreamingWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def embed(self, token_ids: NDArray[np.int64], role: str = EMBEDDING) -> Array:
        """See `WeightSource`. Stores the table now, or with the head if they are tied."""
        plan = self._plan.matrices[role]
        block = self._formats.block(role)
        (part,) = plan.parts
        name, places = part.tensor, [part.first + int(one) for one in token_ids]
        rows = [to_float32(self._checkpoint.read_rows(name, i, i + 1)) for i in places]
        values = _times(np.concatenate(rows), plan.scale)
        target = Target(plan, block, self._options.activation_dtype, rows=len(token_ids))
        embedded = np.empty_like(values)
        steps = None
        if block is not None and name in self._checkpoint.packed_matrices:  # as they are stored
            found = [self._checkpoint.read_steps(name, i, i + 1, block.block_size) for i in places]
            told = [one for one in found if one is not None]
            steps = _times(np.concatenate(told), plan.scale) if told else None
        target.convert(name, values, slice(0, len(token_ids)), embedded, steps)
        if role != EMBEDDING or not self._tied:
            self._store(role, None, by_rows=True)
        return embedded

    def vector(self, role: str) -> Array:
        """See `WeightSource`."""
        plan = self._plan.vectors[role]
        if plan.tensor is None:
            dtype = np.float32 if plan.is_exact else self._options.activation_dtype
            values = np.full(plan.shape, plan.offset * plan.scale, dtype)
            self.stored.vectors[role] = self._writer.add_weight(f"{role}.weight", values)
            return values.astype(np.float32)
        self.stored.vectors[role], values = self._store_vector(
            f"{role}.weight", plan.tensors, plan.scale, plan.offset, is_exact=plan.is_exact
        )
        return values

    def linear(self, role: str, x: Array) -> Array:
        """See `WeightSource`."""
        y = self._store(role, self._product(role, x))
        assert y is not None
        return y

    def sum_of_experts(self, role: str, x: Array, parts: Array) -> Array:
        """See `WeightSource`."""
        y = self._store(role, SumOfProducts(x, parts, self._plan.matrices[role].rows))
        assert y is not None
        return y

    def head(self, x: Array) -> Array:
        """See `WeightSource`."""
        if self._tied:
            y = self._store(EMBEDDING, self._product(EMBEDDING, x), by_rows=True)
            self.stored.matrices[HEAD] = self.stored.matrices[EMBEDDING]
        else:
            y = self._store(HEAD, self._product(HEAD, x))
        assert y is not None
        return y

    def _product(self, role: str, x: Array) -> Product:
        return Product(x, self._plan.matrices[role].rows)

    def _store(
        self, role: str, product: Product | SumOfProducts | None, *, by_rows: bool = False
    ) -> Array | None:
        """Store a matrix and its bias; returns what `product` makes of them, float32 [m, N]."""
        plan = self._plan.matrices[role]
        by_rows = by_rows or plan.by_rows
        block = self._formats.block(role)
        target = Target(
            plan,
            block,
            self._options.activation_dtype,
            by_rows=by_rows,
            may_move_zero=self._formats.may_move_zero(role),
            has_offsets=self._formats.has_offsets(role),
        )
        for panel in self._panels(plan, target):
            self._convert(target, panel, plan, product)
            self._on_bytes(panel.num_bytes)
        bias: TensorRef | None = None
        values: Array | None = None
        if plan.biases:
            names = tuple(name for name, _ in plan.biases)
            bias, values = self._store_vector(f"{role}.bias", names, plan.scale, plan=plan)
            values = plan.by_parts(values)
        y = None if product is None else product.result(values)
        if y is not None and plan.in_turns:
            y = _apart(y, len(plan.parts))
        weight = self._writer.add_weight(f"{role}.weight", target.weight)
        scales = zero_points = offsets = None
        if target.scales is not None:
            scales = self._writer.add_weight(f"{role}.scales", target.scales)
        if target.offsets is not None:
            offsets = self._writer.add_weight(f"{role}.offsets", target.offsets)
        if (moved := target.zero_points) is not None:
            zero_points = self._writer.add_weight(f"{role}.zero_points", moved)
        self.stored.matrices[role] = StoredMatrix(
            weight, plan.rows, plan.columns, block, scales, bias, by_rows, zero_points, offsets
        )
        return y

    def _store_vector(
        self,
        name: str,
        tensors: tuple[str, ...],
        scale: float,
        offset: float = 0.0,
        *,
        is_exact: bool = False,
        plan: MatrixPlan | None = None,
    ) -> tuple[TensorRef, Array]:
        """Store joined vectors, plus an offset, times a scale; returns that as float32.

        Of biases `plan` says in which order.
        """
        dtype = np.dtype(np.float32) if is_exact else self._options.activation_dtype
        parts = []
        for tensor in tensors:
            raw = self._checkpoint.read(tensor)
            self._on_bytes(raw.nbytes)
            values = to_float32(raw)
            if offset != 0:
                values = values + np.float32(offset)
            values = _times(values, scale)
            parts.append(to_dtype(tensor, values.ravel(), dtype))
        values = np.concatenate(parts)
        values = values if plan is None else plan.as_stored(values)
        return self._writer.add_weight(name, values), values.astype(np.float32)

    def _panels(self, plan: MatrixPlan, target: Target) -> Iterator[_Panel]:
        """Panels of rows in order; the next one is read while one is used."""
        step = max(1, _PANEL_ELEMENTS // plan.columns)
        spans = []
        start = 0
        scales = self._part_scales(plan)
        for at, part in enumerate(plan.parts):
            for i in range(0, part.rows, part.rows if part.is_transposed else step):
                end = part.rows if part.is_transposed else min(part.rows, i + step)
                read = (part, plan.columns, i, end, target)
                if plan.interleaved:  # the even part's rows, and behind each the odd one's
                    place = start - at % 2 * part.rows + 2 * i + at % 2
                else:
                    place = start + i
                spans.append((read, start + i, place, scales[at]))
            start += part.rows
        ahead: Future[_Rows] | None = None
        for index, (read, row, place, scale) in enumerate(spans):
            current = ahead or self._pool.submit(self._read, *read)
            ahead = None
            raw = current.result()
            if index + 1 < len(spans):
                ahead = self._pool.submit(self._read, *spans[index + 1][0])
            # What is in MXFP4 counts as the floats that it stands for, kept or not.
            size = len(raw[0]) * plan.columns * 4 if target.keeps else raw[0].nbytes
            step_rows = 2 if plan.interleaved else 1
            yield _Panel(read[0].tensor, raw, size, row, place, step_rows, scale)

    def _part_scales(self, plan: MatrixPlan) -> list[float]:
        """What each part is multiplied with."""
        if plan.part_scales is None:
            return [plan.scale * part.scale for part in plan.parts]
        raw = self._checkpoint.read(plan.part_scales)
        self._on_bytes(raw.nbytes)
        return [plan.scale * float(one) for one in to_float32(raw)]

    def _read(self, part: Part, columns: int, first: int, end: int, target: Target) -> _Rows:
        """Rows of a part, as they are to be stored there; of a transposed one all of the part's."""
        rows, block = (part.tensor, part.first + first, part.first + end), target.block
        if target.keeps:
            return self._checkpoint.read_blocks(*rows)
        if not part.is_transposed:
            values = self._checkpoint.read_rows(*rows)
            if block is None:
                return (values,)
            if part.tensor in self._checkpoint.packed_matrices:
                self.integer_blocks += len(values) * block.num_blocks(columns)
                steps = self._checkpoint.read_steps(*rows, block.block_size)
                return (values,) if steps is None else (values, steps)
            if target.offsets is not None and part.tensor in self._checkpoint.with_minima:
                found = self._checkpoint.read_minima(*rows, block.block_size)
                assert found is not None, "offsets are of blocks that have minima"
                self.integer_blocks += found[0].size
                return values, *found
            return (values,)
        assert part.shape is not None
        expert, own = divmod(part.first, part.shape[-1])
        at = expert * columns
        values = self._checkpoint.read_rows(part.tensor, at, at + columns)
        return (np.ascontiguousarray(values[:, own : own + part.rows].T),)

    def _convert(
        self,
        target: Target,
        panel: _Panel,
        plan: MatrixPlan,
        product: Product | SumOfProducts | None,
    ) -> None:
        """Convert a panel, times the scale, on all threads, and multiply what was stored."""
        rows = len(panel.raw[0])
        # The same groups of rows are multiplied whatever the threads: a BLAS may add up a row in
        # another order where it is the last of a group, or the group a smaller one.
        group = 1 if product is None else product.group
        edges = np.linspace(0, -(-rows // group), self._threads + 1).astype(int) * group
        edges = np.minimum(edges, rows)

        def work(first: int, last: int) -> int:
            raw = [one[first:last] for one in panel.raw]
            shape = (last - first, plan.columns)
            meant = None if product is None else np.empty(shape, np.float32)
            kept = 0
            if target.keeps:
                target.keep(panel.name, raw[0], raw[1], panel.places(first, last), meant)
            else:
                values, *steps = (_times(to_float32(one), panel.scale) for one in raw)
                kept = target.convert(panel.name, values, panel.places(first, last), meant, *steps)
            if product is not None and meant is not None:
                product.add(meant, slice(panel.start + first, panel.start + last))
            return kept

        for task in [
            self._pool.submit(work, int(first), int(last))
            for first, last in pairwise(edges)
            if first < last
        ]:
            self.kept_blocks += task.result()


def _times(values: Array, scale: float) -> Array:
    return values if scale == 1 else values * np.float32(scale)


def _apart(y: Array, experts: int) -> Array:
    """Of each expert gate's features and then up's, where they take turns; [m, N]."""
    pairs = y.reshape(len(y), experts, -1, 2)
    return np.ascontiguousarray(pairs.swapaxes(2, 3)).reshape(y.shape)


def _store_rope(
    name: str, one: RopeSpec, spec: ArchSpec, writer: ArtifactWriter
) -> tuple[TensorRef, TensorRef]:
    """Store the cos and sin table of a rotary embedding."""
    cos, sin = rope.tables(one, spec.context_length)
    return writer.add_weight(f"{name}.cos", cos), writer.add_weight(f"{name}.sin", sin)


@dataclass(frozen=True, slots=True)
class _Panel:
    name: str  # of the tensor, for errors
    raw: _Rows
    num_bytes: int  # of the checkpoint, see `Checkpoint.size_bytes`
    start: int  # first row, where parts lie one below the other
    place: int  # first row in the stored matrix
    step: int  # from there to the next one
    scale: float  # what its numbers are multiplied with

    def places(self, first: int, last: int) -> slice:
        """Where some of the panel's rows are stored."""
        return slice(self.place + first * self.step, self.place + last * self.step, self.step)
