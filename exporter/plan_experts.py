"""Which tensors make up feed-forward layers, and experts with their router."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.plan_parts import MatrixPlan, Part, VectorPlan, plan_norm, stack_rows, times
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec

XIELU: Final = ("alpha_p", "alpha_n", "beta", "eps")
# What roles of experts end in.
EXPERTS: Final = (".experts.gate_up", ".experts.up", ".experts.down")


def activation_vectors(
    spec: ArchSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """The numbers of an activation that is trained."""
    if spec.hidden_act != "xielu":
        return {}
    start = prefix + names.activation
    shapes: Mapping[str, tuple[int, ...]] = {"beta": (), "eps": ()}  # alphas are [1]
    return {
        role + one: VectorPlan(start + one, shapes.get(one, (1,)), is_exact=True) for one in XIELU
    }


def feed_forward(
    spec: ArchSpec,
    role: str,
    prefix: str,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    size: int,
) -> dict[str, MatrixPlan]:
    """Joined gate and up, or up alone, and down, of a layer with `size` features between."""
    gate_up, down = names
    hidden, biased = spec.hidden_size, spec.mlp_bias
    back = stack_rows(prefix, down, (hidden,), size, biased=biased)
    first, rows = ("up", (size,)) if spec.ungated else ("gate_up", (size, size))
    front, scale, own = (
        stack_rows(prefix, gate_up, rows, hidden, biased=biased),
        1.0,
        spec.multipliers,
    )
    if own is not None:
        front, scale = times(front, (own.gate, 1.0)), own.down
    return {role + first: front, role + "down": replace(back, scale=scale * spec.output_scale)}


def norms_of_experts(
    hidden: int, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """Norms that experts apart from a shared layer have."""
    tensors = {
        "experts_norm": names.experts_norm,
        "experts_out_norm": names.experts_out_norm,
        "shared_out_norm": names.shared_out_norm,
    }
    found = {role + one: plan_norm(names, prefix + name, hidden) for one, name in tensors.items()}
    router = VectorPlan(prefix + names.router_norm, (hidden,), scale=hidden**-0.5)
    return found | {role + "router_norm": router}


def expert_matrices(
    spec: ArchSpec, experts: ExpertsSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """The router, and of all experts the joined gate and up, and down, one below the other.

    Without a gate the first is up alone. Behind them what all tokens share.
    """
    hidden, inner, count = spec.hidden_size, experts.size, experts.count
    whole = math.gcd(hidden, inner, *names.expert_blocks)
    first_role, features = ("up", inner) if spec.ungated else ("gate_up", 2 * inner)
    is_whole = bool(spec.ungated) or names.experts_in_turns
    gate_up = _expert_parts(
        prefix,
        names.expert_gate_up,
        (count, features, hidden),
        halves=1 if is_whole else 2,
        transposed=names.experts_transposed,
    )
    down = _expert_parts(
        prefix,
        names.expert_down,
        (count, hidden, inner),
        halves=1,
        transposed=names.experts_transposed,
    )
    router = stack_rows(prefix, (names.router,), (count,), hidden, biased=bool(experts.biased))
    biases = (
        (prefix + names.expert_gate_up_bias, (count, features)),
        (prefix + names.expert_down_bias, (count, hidden)),
    )
    first, second = ((one,) if experts.biased else () for one in biases)
    scale = spec.output_scale * (1.0 if experts.scale is None else experts.scale)
    found = {
        role + "router": replace(router, is_exact=True),
        f"{role}experts.{first_role}": MatrixPlan(
            gate_up,
            hidden,
            first,
            interleaved=not is_whole,
            in_turns=names.experts_in_turns,
            whole_blocks=whole,
            by_rows=True,
        ),
        role + "experts.down": MatrixPlan(
            down,
            inner,
            second,
            scale=scale,
            whole_blocks=whole,
            by_rows=True,
            part_scales=prefix + names.expert_scales if experts.apart else None,
        ),
    }
    if experts.shared_size is not None:
        parts = (names.shared_gate_up, names.shared_down)
        shared = feed_forward(spec, f"{role}shared.", prefix, parts, experts.shared_size)
        if experts.shared_scale is not None:
            back = shared[f"{role}shared.down"]
            shared[f"{role}shared.down"] = replace(back, scale=back.scale * experts.shared_scale)
        found |= shared
    if experts.shared_gated:
        part = Part(f"{prefix}{names.shared_gate}.weight", 1)
        found[role + "shared.gate"] = MatrixPlan((part,), hidden, is_exact=True)
    return found


def _expert_parts(
    prefix: str,
    names: tuple[str, ...],
    shape: tuple[int, int, int],
    *,
    halves: int,
    transposed: bool,
) -> tuple[Part, ...]:
    """The parts of all experts in turn: `halves` of each.

    Args:
        prefix: of the layer's tensors.
        names: with "{}" for the expert, of one half each; or without, of tensors that have all
            experts: one has all halves, or each has one of them.
        shape: [experts, rows of an expert, columns].
        halves: the parts of an expert, which have as many rows.
        transposed: the one tensor is [experts, columns, rows].
    """
    experts, rows, columns = shape
    half = rows // halves
    if "{}" in names[0]:
        return tuple(
            Part(f"{prefix}{name.format(expert)}.weight", half)
            for expert in range(experts)
            for name in names
        )
    if len(names) > 1:
        return tuple(
            Part(prefix + name, half, expert * half, (experts, half, columns))
            for expert in range(experts)
            for name in names
        )
    (name,) = names
    stored = (experts, columns, rows) if transposed else shape
    return tuple(
        Part(prefix + name, half, at * half, stored, transposed) for at in range(experts * halves)
    )
