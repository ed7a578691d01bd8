"""How large an artifact becomes, before it is made."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from onnxport.exporter.checkpoint import Checkpoint
from onnxport.exporter.formats import Formats
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import HEAD, WeightPlan
from onnxport.graphs.spec import ArchSpec


def artifact_bytes(
    spec: ArchSpec,
    plan: WeightPlan,
    checkpoint: Checkpoint,
    options: ExportOptions,
    *,
    without: AbstractSet[str] = frozenset(),
) -> int:
    """About how large the weights file becomes, with zero points wherever there may be some.

    Matrices of the roles `without` are not counted, as they are stored elsewhere.
    """
    formats = Formats(plan, options, checkpoint)
    activation_bytes = options.activation_dtype.itemsize
    total = sum(4 * spec.context_length * rope.rotary_dim for rope in spec.ropes)
    for role, matrix in plan.matrices.items():
        if role in without or (role == HEAD and spec.tie_word_embeddings):
            continue
        block = formats.block(role)
        if block is None:
            total += matrix.rows * matrix.columns * activation_bytes
        else:
            total += block.size_bytes(matrix.rows, matrix.columns, activation_bytes)
            if formats.may_move_zero(role):
                total += block.zero_point_bytes(matrix.rows, matrix.columns)
            if formats.has_offsets(role):
                total += block.offset_bytes(matrix.rows, matrix.columns, activation_bytes)
    return total
