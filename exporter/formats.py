"""How each matrix of a model is stored: one precision for all, or what a file's matrices need."""

from __future__ import annotations

from dataclasses import replace

from onnxport.exporter.checkpoint import Checkpoint
from onnxport.exporter.gguf.minima import GROUP
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import HEAD, TABLES, WeightPlan
from onnxport.exporter.plan_experts import EXPERTS
from onnxport.exporter.quantize import BlockFormat

_INT4 = 4
_INT8 = 8


class Formats:
    """The formats of a model's matrices, by their roles."""

    def __init__(self, plan: WeightPlan, options: ExportOptions, checkpoint: Checkpoint) -> None:
        """Look at what was asked for, and at what a checkpoint has."""
        self._plan = plan
        self._options = options
        self._checkpoint = checkpoint

    def block(self, role: str) -> BlockFormat | None:
        """How a matrix is quantized; None: it is not."""
        plan = self._plan.matrices[role]
        if plan.is_exact:
            return None
        return self._options.block(
            head=_is_table(role),
            experts=_is_expert(role),
            whole=plan.whole_blocks,
            bits=self._wanted_bits(role) if self._options.by_matrix else None,
        )

    def may_move_zero(self, role: str) -> bool:
        """Whether blocks of a matrix may need zero points of their own, and can have them.

        In an asymmetric format all may. Integers of fewer bits than a block has fit without. Head
        and embedding may be one table, and experts are no MatMulNBits: these have none. Nor has
        what has offsets.
        """
        block = self.block(role)
        if block is None or _is_table(role) or _is_expert(role) or self.has_offsets(role):
            return False
        if block.is_asymmetric:
            return True
        found = map(self._checkpoint.packed_matrices.get, self._tensors(role))
        return any(one is not None and one.bits >= block.bits for one in found)

    def has_offsets(self, role: str) -> bool:
        """Whether blocks of a matrix have minima, which offsets keep.

        Eight bits change these blocks by little without. Head and embedding have none, as they have
        no zero points.
        """
        block = self.block(role)
        if block is None or (block.bits, block.block_size) != (_INT4, GROUP) or block.is_fp4:
            return False
        if _is_table(role):
            return False
        return any(name in self._checkpoint.with_minima for name in self._tensors(role))

    @property
    def have_own_experts(self) -> bool:
        """Whether some experts have offsets, or bits of down that are not those of gate and up."""
        experts = [role for role in self._plan.matrices if _is_expert(role)]
        if any(map(self.has_offsets, experts)):
            return True
        bits = {role: self.block(role) for role in experts}
        down = {role: one for role, one in bits.items() if role.endswith(EXPERTS[-1])}
        return any(
            bits.get(role.removesuffix(EXPERTS[-1]) + first, one) != one
            for role, one in down.items()
            for first in EXPERTS[:-1]
        )

    def settled(self) -> ExportOptions:
        """The options, with the precision that projections have, or the least one."""
        options = self._options
        if not options.by_matrix:
            return options
        least = min(map(self._wanted_bits, self._projections()), default=_INT4)
        return replace(options, precision=f"int{least}")

    def num_wider(self) -> int:
        """How many projections, experts among them, have more bits than the precision says."""
        if not self._options.by_matrix or self._options.projections == "int8":
            return 0
        return sum(self._wanted_bits(role) == _INT8 for role in self._projections())

    def _projections(self) -> list[str]:
        """The roles of what the precision is that of. Experts that are kept have their own."""
        kept = self._options.keeps_experts
        return [
            role
            for role, plan in self._plan.matrices.items()
            if not (plan.is_exact or _is_table(role) or (kept and _is_expert(role)))
        ]

    def _tensors(self, role: str) -> list[str]:
        return [part.tensor for part in self._plan.matrices[role].parts]

    def _wanted_bits(self, role: str) -> int:
        """The bits that all parts of a matrix, of all experts too, need.

        What is in floats gets those of which it loses little.
        """
        return max(self._checkpoint.wanted_bits(name) or _INT8 for name in self._tensors(role))


def _is_table(role: str) -> bool:
    return role in {HEAD, *TABLES}


def _is_expert(role: str) -> bool:
    return role.endswith(EXPERTS)
