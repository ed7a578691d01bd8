"""Which tensors make up several streams, what foretells and corrects them, and LAuReL."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.plan_parts import MatrixPlan, Part, VectorPlan, plan_norm, stack_rows
from onnxport.graphs.altup_spec import AltUpSpec
from onnxport.graphs.spec import ArchSpec

START: Final = "altup.start"  # what makes further streams of the embedding
MERGE: Final = "altup.merge.{}"  # what makes each of these a part of the mean
# Of mean squares of what begins and ends streams, whose size is then another's. transformers holds
# these to at least 1e-5, which those of no token are below.
EPSILON: Final = 1e-9


def altup_tables(spec: ArchSpec, altup: AltUpSpec, names: TensorNames) -> dict[str, MatrixPlan]:
    """What begins further streams, one below the other, and what ends each."""
    hidden, further = spec.hidden_size, range(altup.streams - 1)
    starts, merges = (
        [_of_stream(name, at, altup.streams - 1, hidden) for at in further]
        for name in (names.altup_start, names.altup_merge)
    )
    found = {START: MatrixPlan(tuple(starts), hidden)}
    return found | {MERGE.format(at): MatrixPlan((merges[at],), hidden) for at in further}


def _of_stream(name: str, at: int, count: int, hidden: int) -> Part:
    """One of several square matrices, with "{}" for which, or of one tensor that has all."""
    if "{}" in name:
        return Part(f"{name.format(at)}.weight", hidden)
    return Part(f"{name}.weight", hidden, at * hidden, (count, hidden, hidden))


def altup_matrices(
    spec: ArchSpec, altup: AltUpSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """A layer's. What is a few numbers a token stays as exact as activations are."""
    hidden, count = spec.hidden_size, altup.streams
    sizes = {
        "altup.router": (names.altup_router, count, hidden),
        "altup.predict": (names.altup_predict, count * count, count),
        "altup.correct": (names.altup_correct, count, count),
        "laurel.left": (names.laurel_left, altup.laurel_rank, hidden),
        "laurel.right": (names.laurel_right, hidden, altup.laurel_rank),
    }
    found = {
        role + one: stack_rows(prefix, (name,), (rows,), columns, biased=False)
        for one, (name, rows, columns) in sizes.items()
    }
    return {one: replace(matrix, is_exact=".altup." in one) for one, matrix in found.items()}


def altup_vectors(
    spec: ArchSpec, altup: AltUpSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """A layer's norms, and what its stream is times where tokens' inputs are chosen."""
    hidden = spec.hidden_size
    found = {
        role + "altup.norm": plan_norm(names, prefix + names.altup_router_norm, hidden),
        role + "laurel.norm": plan_norm(
            names, prefix + names.laurel_norm, hidden, spec.residual_scale
        ),
    }
    if altup.scaled:
        found[role + "altup.scale"] = VectorPlan(prefix + names.altup_scale, (hidden,))
    return found
