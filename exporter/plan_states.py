"""Which tensors make up layers that keep a state: delta nets, convolutions, state spaces."""

from __future__ import annotations

from dataclasses import replace

from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.plan_parts import (
    MatrixPlan,
    Part,
    VectorPlan,
    split_by_head,
    stack_rows,
    times,
)
from onnxport.graphs.linear_spec import LinearAttentionSpec, ShortConvSpec, StateSpaceSpec
from onnxport.graphs.multipliers_spec import MultipliersSpec
from onnxport.graphs.spec import ArchSpec


def linear_vectors(
    linear: LinearAttentionSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """What a layer without attention has beside its products."""
    role, heads = f"{role}linear.", (linear.value_heads,)
    ahead, behind = names.head_axes
    shape = (*(1,) * ahead, *heads, *(1,) * behind)
    decays = (linear.decay_width,)
    return {
        role + "conv": _convolution(linear, names, prefix),
        role + "a_log": VectorPlan(prefix + names.linear_a_log, shape, is_exact=True),
        role + "dt_bias": VectorPlan(prefix + names.linear_dt_bias, decays, is_exact=True),
        role + "norm": VectorPlan(prefix + names.linear_norm, (linear.value_size,)),
    }


def _convolution(linear: LinearAttentionSpec, names: TensorNames, prefix: str) -> VectorPlan:
    """The kernels of queries, keys and values, in one tensor or in three."""
    behind = (*names.conv_axes, linear.kernel)
    if names.linear_conv_apart is None:
        return VectorPlan(prefix + names.linear_conv, (linear.channels, *behind))
    first, *others = (prefix + name for name in names.linear_conv_apart)
    heights = [linear.key_width, linear.key_width, linear.value_width]
    if names.linear_conv_in_thirds:
        third = -(-linear.channels // 3)
        heights = [third, third, linear.channels - 2 * third]
    shape, *more = ((height, *behind) for height in heights)
    return VectorPlan(first, shape, more=tuple(others), more_shapes=tuple(more))


def linear_matrices(
    spec: ArchSpec, linear: LinearAttentionSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """The products of a layer without attention.

    Those of beta and of the decay are two numbers a head, and stay as exact as activations are: an
    error of a decay is one of all tokens before, as often as there are tokens behind.
    """
    if linear.gate_rank is not None:
        return _kimi_matrices(spec, linear, linear.gate_rank, names, role, prefix)
    hidden, heads = spec.hidden_size, linear.value_heads
    tensors = [f"{prefix}{name}.weight" for name in names.linear_in]
    first: tuple[Part, ...]
    z: tuple[Part, ...]
    if len(tensors) == 6:  # each by itself
        widths = (linear.key_width, linear.key_width, linear.value_width)
        first = tuple(map(Part, tensors[:3], widths))
        z = (Part(tensors[3], linear.value_width),)
        second = tuple(Part(tensor, heads) for tensor in tensors[4:])
    elif len(tensors) == 2:  # of each key head its query, key, values and their gates
        shared = heads // linear.key_heads
        values = shared * linear.value_size
        rows = (linear.key_size, linear.key_size, values, values)
        *qkv, z = split_by_head(tensors[0], linear.key_heads, rows, hidden)
        ba = split_by_head(tensors[1], linear.key_heads, (shared, shared), hidden)
        first, second = (tuple(part for kind in kinds for part in kind) for kinds in (qkv, ba))
    elif len(tensors) == 3:  # the last one by key heads
        shared = heads // linear.key_heads
        first, z = (Part(tensors[0], linear.channels),), (Part(tensors[1], linear.value_width),)
        ba = split_by_head(tensors[2], linear.key_heads, (shared, shared), hidden)
        second = tuple(part for kind in ba for part in kind)
    else:
        first, z = (Part(tensors[0], linear.channels),), (Part(tensors[1], linear.value_width),)
        second = tuple(Part(tensor, heads) for tensor in tensors[2:])
    o = stack_rows(prefix, names.linear_o, (hidden,), linear.value_width, biased=False)
    return {
        role + "linear.qkv": MatrixPlan(first, hidden),
        role + "linear.z": MatrixPlan(z, hidden),
        role + "linear.ba": MatrixPlan(second, hidden, is_exact=True),
        role + "o": replace(o, scale=spec.output_scale),
    }


def _kimi_matrices(
    spec: ArchSpec,
    linear: LinearAttentionSpec,
    rank: int,
    names: TensorNames,
    role: str,
    prefix: str,
) -> dict[str, MatrixPlan]:
    """Those of Kimi Delta Attention; both products of decays stay exact, too."""
    hidden, width, role = spec.hidden_size, linear.value_width, f"{role}linear."
    qkv = (linear.key_width, linear.key_width, width)

    def product(tensors: tuple[str, ...], rows: tuple[int, ...], columns: int) -> MatrixPlan:
        return stack_rows(prefix, tensors, rows, columns, biased=False)

    low, high = names.linear_decay
    ba = product((names.linear_beta, low), (linear.value_heads, rank), hidden)
    decay = product((high,), (linear.decay_width,), rank)
    (o,) = names.linear_o
    return {
        role + "qkv": product(names.linear_in, qkv, hidden),
        role + "ba": replace(ba, is_exact=True),
        role + "decay": replace(decay, is_exact=True),
        role + "z_in": product(names.linear_gate[:1], (rank,), hidden),
        role + "z": product(names.linear_gate[1:], (width,), rank),
        role.removesuffix("linear.") + "o": replace(
            product((o,), (hidden,), width), scale=spec.output_scale
        ),
    }


def conv_vectors(
    conv: ShortConvSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """What a layer that is a convolution has beside its products."""
    tensor = prefix + names.linear_conv
    kernel = VectorPlan(tensor, (conv.channels, *names.conv_axes, conv.kernel))
    found = {f"{role}linear.conv": kernel}
    if conv.bias:
        bias = f"{tensor.removesuffix('.weight')}.bias"
        found[f"{role}linear.conv_bias"] = VectorPlan(bias, (conv.channels,))
    return found


def conv_matrices(
    spec: ArchSpec, conv: ShortConvSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """The products into and out of a layer that is a convolution."""
    hidden, width = spec.hidden_size, conv.channels
    first = stack_rows(prefix, names.linear_in, (3 * width,), hidden, biased=conv.bias)
    o = stack_rows(prefix, names.linear_o, (hidden,), width, biased=conv.bias)
    return {
        role + "linear.in": first,
        role + "o": replace(o, scale=spec.output_scale),
    }


def space_vectors(
    space: StateSpaceSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """What a layer of a state space has beside its products."""
    role, heads = f"{role}linear.", (space.heads,)
    found = {
        "conv": VectorPlan(
            prefix + names.space_conv, (space.channels, *names.conv_axes, space.kernel)
        ),
        "a_log": VectorPlan(prefix + names.space_a_log, heads, is_exact=True),
        "dt_bias": VectorPlan(prefix + names.space_dt_bias, heads, is_exact=True),
        "skip": VectorPlan(prefix + names.space_skip, heads, is_exact=True),
    }
    if not space.without_norm:
        tensor = prefix + names.space_norm
        found["norm"] = VectorPlan(tensor, (space.value_width,), is_exact=True)
    if space.conv_bias:
        found["conv_bias"] = VectorPlan(prefix + names.space_conv_bias, (space.channels,))
    return {role + name: vector for name, vector in found.items()}


def space_matrices(
    spec: ArchSpec, space: StateSpaceSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """The products of a layer of a state space, all but the last of which are one tensor.

    That of the steps stays as exact as activations are, as that of decays does above. Beside
    attention, whose last product is `o`, that of a state space is `linear.o`.
    """
    hidden, tensor = spec.hidden_size, f"{prefix}{names.space_in}.weight"
    heights = (space.value_width, space.channels, space.heads)
    shape = (sum(heights), hidden)
    starts = (0, heights[0], heights[0] + heights[1])
    z, mixed, dt = (
        MatrixPlan((Part(tensor, rows, first, shape),), hidden)
        for rows, first in zip(heights, starts, strict=True)
    )
    scale, own = spec.output_scale, spec.multipliers
    if own is not None:
        z, dt = times(z, (own.space_gate,)), times(dt, (own.space_steps,))
        mixed, scale = _mixed_apart(space, tensor, shape, own), scale * own.space
    o = stack_rows(prefix, (names.space_o,), (hidden,), space.value_width, biased=False)
    return {
        role + "linear.z": z,
        role + "linear.mixed": mixed,
        role + "linear.dt": replace(dt, is_exact=True),
        role + ("linear.o" if space.beside_attention else "o"): replace(o, scale=scale),
    }


def _mixed_apart(
    space: StateSpaceSpec, tensor: str, shape: tuple[int, ...], own: MultipliersSpec
) -> MatrixPlan:
    """What the convolution reads, each kind of it times a number."""
    first, parts = space.value_width, []
    for rows, scale in (
        (space.value_width, own.space_values),
        (space.group_width, own.space_given),
        (space.group_width, own.space_taken),
    ):
        parts.append(Part(tensor, rows, first, shape, scale=scale))
        first += rows
    return MatrixPlan(tuple(parts), shape[-1])
