"""How large an artifact becomes, before it is made."""

from __future__ import annotations

from onnxport.exporter.checkpoint import Checkpoint
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import HEAD, WeightPlan
from onnxport.exporter.weights import block_of, may_move_zero
from onnxport.graphs.spec import ArchSpec


def artifact_bytes(
    spec: ArchSpec, plan: WeightPlan, checkpoint: Checkpoint, options: ExportOptions
) -> int:
    """About how large the weights file becomes, with zero points wherever there may be some."""
    activation_bytes = options.activation_dtype.itemsize
    total = sum(4 * spec.context_length * rope.rotary_dim for rope in spec.ropes)
    for role, matrix in plan.matrices.items():
        if role == HEAD and spec.tie_word_embeddings:
            continue
        block = block_of(role, matrix, options)
        if block is None:
            total += matrix.rows * matrix.columns * activation_bytes
        else:
            total += block.size_bytes(matrix.rows, matrix.columns, activation_bytes)
            if may_move_zero(role, matrix, block, checkpoint):
                total += block.zero_point_bytes(matrix.rows, matrix.columns)
    return total
