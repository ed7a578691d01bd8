"""Which tensors of a checkpoint make up each weight of the graphs, and of what shape.

A weight is named by its role: `embedding`, `final_norm`, `head`, and for each layer
`layers.N.{input_norm, qkv, q_norm, k_norm, o, o_norm, post_norm, gate_up, down, down_norm}`, where
a layer with experts has `router`, `experts.gate_up` and `experts.down` for `gate_up` and `down`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from onnxport.errors import CheckpointError
from onnxport.exporter.families.base import TensorNames
from onnxport.graphs.spec import ArchSpec, ExpertsSpec

HEAD: Final = "head"
EMBEDDING: Final = "embedding"
FINAL_NORM: Final = "final_norm"


class Part(NamedTuple):
    """Rows of a tensor of the checkpoint."""

    tensor: str
    rows: int
    first: int = 0  # of them
    shape: tuple[int, ...] | None = None  # of the tensor; None: these rows are all


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A matrix [rows, columns] = [N, K], stacked from tensors of the checkpoint."""

    parts: tuple[Part, ...]
    columns: int
    biases: tuple[tuple[str, int], ...] = ()  # vector name and its size
    scale: float = 1.0  # what all of it is multiplied with
    interleaved: bool = False  # rows of each two parts, which have as many, take turns
    is_exact: bool = False  # it is not quantized, whatever else is
    whole_blocks: int | None = None  # what blocks that share a scale divide; None: the last may jut
    by_rows: bool = False  # where it is not quantized, it is stored [N, K]

    @property
    def rows(self) -> int:
        """Output features."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """All weights of a model by role."""

    matrices: Mapping[str, MatrixPlan]  # `head` is the embedding where they are tied
    vectors: Mapping[str, tuple[str, int]]  # norms: tensor name and size
    scales: Mapping[str, float]  # what a vector is multiplied with, if it is
    offset: float = 0.0  # what is added to every vector before

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the checkpoint must hold, and its shape."""
        shapes: dict[str, tuple[int, ...]] = {}
        for matrix in self.matrices.values():
            shapes.update(
                {one.tensor: one.shape or (one.rows, matrix.columns) for one in matrix.parts}
            )
            shapes.update({name: (size,) for name, size in matrix.biases})
        shapes.update({name: (size,) for name, size in self.vectors.values()})
        return shapes


def plan_weights(spec: ArchSpec, names: TensorNames) -> WeightPlan:
    """Name every tensor that `spec` calls for."""
    embedding = MatrixPlan((Part(names.embedding, spec.vocab_size),), spec.hidden_size)
    head = MatrixPlan((Part(names.head, spec.vocab_size),), spec.hidden_size)
    matrices = {EMBEDDING: embedding, HEAD: embedding if spec.tie_word_embeddings else head}
    vectors = {FINAL_NORM: (names.final_norm, spec.hidden_size)}
    scales = {} if spec.logits_scale is None else {FINAL_NORM: spec.logits_scale}
    for layer in range(spec.num_layers):
        role, prefix = f"layers.{layer}.", names.layer.format(layer)
        if not spec.raw_inputs:
            vectors[role + "input_norm"] = (prefix + names.input_norm, spec.hidden_size)
            vectors[role + "post_norm"] = (prefix + names.post_norm, spec.hidden_size)
        if spec.qk_norm:
            sizes = (spec.q_size, spec.kv_size) if spec.whole_qk_norm else (spec.head_size,) * 2
            vectors[role + "q_norm"] = (prefix + names.q_norm, sizes[0])
            vectors[role + "k_norm"] = (prefix + names.k_norm, sizes[1])
        if spec.output_norms:
            for name, tensor in (("o_norm", names.o_norm), ("down_norm", names.down_norm)):
                vectors[role + name] = (prefix + tensor, spec.hidden_size)
                if spec.residual_scale is not None:
                    scales[role + name] = spec.residual_scale
        experts = spec.experts_of(layer)
        matrices.update(_layer_matrices(spec, names, role, prefix, dense=experts is None))
        if experts is not None:
            matrices.update(_expert_matrices(spec, experts, names, role, prefix))
    return WeightPlan(matrices, vectors, scales, names.norm_offset)


def _layer_matrices(
    spec: ArchSpec, names: TensorNames, role: str, prefix: str, *, dense: bool
) -> dict[str, MatrixPlan]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = (
        ("qkv", names.qkv, (spec.q_size, spec.kv_size, spec.kv_size), hidden, spec.qkv_bias),
        ("o", names.o, (hidden,), spec.q_size, spec.o_bias),
    )
    mlp = (
        ("gate_up", names.gate_up, (inner, inner), hidden, spec.mlp_bias),
        ("down", names.down, (hidden,), inner, spec.mlp_bias),
    )
    found = {}
    for name, parts, rows, columns, biased in (*attention, *(mlp if dense else ())):
        heights = (sum(rows),) if len(parts) == 1 else rows
        sizes = tuple(zip(parts, heights, strict=True))
        found[role + name] = MatrixPlan(
            tuple(Part(f"{prefix}{part}.weight", size) for part, size in sizes),
            columns,
            tuple((f"{prefix}{part}.bias", size) for part, size in sizes) if biased else (),
            spec.output_scale if name in ("o", "down") else 1.0,
        )
    return found


def _expert_matrices(
    spec: ArchSpec, experts: ExpertsSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """The router, and of all experts the joined gate and up, and down, one below the other."""
    hidden, inner, count = spec.hidden_size, experts.size, experts.count
    whole = math.gcd(hidden, inner)
    gate_up = _expert_parts(prefix, names.expert_gate_up, (count, 2 * inner, hidden), halves=2)
    down = _expert_parts(prefix, names.expert_down, (count, hidden, inner), halves=1)
    router = MatrixPlan((Part(f"{prefix}{names.router}.weight", count),), hidden, is_exact=True)
    return {
        role + "router": router,
        role + "experts.gate_up": MatrixPlan(
            gate_up, hidden, interleaved=True, whole_blocks=whole, by_rows=True
        ),
        role + "experts.down": MatrixPlan(
            down, inner, scale=spec.output_scale, whole_blocks=whole, by_rows=True
        ),
    }


def _expert_parts(
    prefix: str, names: tuple[str, ...], shape: tuple[int, int, int], *, halves: int
) -> tuple[Part, ...]:
    """The parts of all experts in turn: `halves` of each.

    Args:
        prefix: of the layer's tensors.
        names: with "{}" for the expert, of one half each; or one name without, of a tensor that has
            all halves of all experts.
        shape: [experts, rows of an expert, columns].
        halves: the parts of an expert, which have as many rows.
    """
    experts, rows, _ = shape
    half = rows // halves
    if "{}" in names[0]:
        return tuple(
            Part(f"{prefix}{name.format(expert)}.weight", half)
            for expert in range(experts)
            for name in names
        )
    (name,) = names
    tensor = f"{prefix}{name}.weight"
    return tuple(Part(tensor, half, at * half, shape) for at in range(experts * halves))


def unused_tensors(
    found: frozenset[str], plan: WeightPlan, names: TensorNames, *, tied: bool
) -> list[str]:
    """Tensors of the checkpoint that nothing uses, but for what is known.

    That is buffers, a tied head, and the part that reads images.
    """
    wanted = plan.shapes()
    return sorted(
        name
        for name in found
        if name not in wanted
        and not name.endswith(names.ignored)
        and not name.startswith(names.left_out)
        and not (tied and name == names.head)
    )


def check_unused(unused: list[str], family: str) -> None:
    """Raise CheckpointError that lists tensors which nothing uses."""
    if unused:
        listed = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if unused[5:] else "")
        raise CheckpointError(
            f"the checkpoint holds {len(unused)} tensor(s) that a {family} model with this "
            f"config.json does not use: {listed}. Leaving them out would change the result; check "
            "that the architecture and its bias and norm settings belong to these weights."
        )
