"""Which tensors of a checkpoint make up each weight of the graphs, and of what shape.

A weight is named by its role: `embedding`, `final_norm`, `head`, and for each layer
`layers.N.{input_norm, qkv, q_norm, k_norm, sinks, o, o_norm, post_norm, gate_up, down, down_norm}`,
(where attention is of latents `qkv`, `q_latent_norm`, `q_b`, `latent_norm`, `k_up` and `v_up`),
where a layer with experts has `router`, `correction`, `experts.gate_up` and `experts.down` for
`gate_up` and `down`, and `shared.{gate_up, down, gate}` of the layer beside them. Gated attention
has `attention_gate` besides, and a layer without attention `linear.{qkv, z, ba, conv, a_log,
dt_bias, norm}` for `qkv` and its norms; or, where it is a state space, `linear.{z, mixed, dt, conv,
conv_bias, a_log, dt_bias, skip, norm}`, or a convolution, `linear.{in, conv, conv_bias}`. A draft
head has `features`, `joint_norm` or `apart_norm.N`, and `layers.0.hidden_norm` besides. LayerNorms
may have biases, `final_norm_bias` and so on. What has no gate, experts too, has `up` for `gate_up`;
of an xIELU there are `alpha_p`, `alpha_n`, `beta` and `eps`. Where layers are told something of
each token, there are `layer_inputs`, `layer_inputs.{product, norm}` and of each layer `input_gate`,
`input_out` and `input_out_norm`; and `scale` where the stream behind it is times a number. Experts
apart from a shared layer have `router_norm`, `experts_norm`, `experts_out_norm` and
`shared_out_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError
from onnxport.exporter.families.base import TensorNames
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec, ShortConvSpec, StateSpaceSpec
from onnxport.graphs.spec import ArchSpec

HEAD: Final = "head"
EMBEDDING: Final = "embedding"
FINAL_NORM: Final = "final_norm"
FEATURES: Final = "features"
XIELU: Final = ("alpha_p", "alpha_n", "beta", "eps")
LAYER_INPUTS: Final = "layer_inputs"
TABLES: Final = frozenset({EMBEDDING, LAYER_INPUTS})  # whose rows are gathered
# What roles of experts end in.
EXPERTS: Final = (".experts.gate_up", ".experts.up", ".experts.down")

_Names = tuple[str, ...]


class Part(NamedTuple):
    """Rows of a tensor of the checkpoint."""

    tensor: str
    rows: int
    first: int = 0  # of them
    shape: tuple[int, ...] | None = None  # of the tensor; None: these rows are all
    is_transposed: bool = False  # it is [experts, columns, rows]; these are all rows of one of them


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

    tensor: str
    shape: tuple[int, ...]  # of the tensor, all of which is one vector
    offset: float = 0.0  # what is added to it
    scale: float = 1.0  # what the sum is multiplied with
    is_exact: bool = False  # it is stored in float32, whatever activations are
    more: tuple[str, ...] = ()  # tensors of the same shape that lie behind it

    @property
    def tensors(self) -> tuple[str, ...]:
        """All of them, in order."""
        return self.tensor, *self.more


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """All weights of a model by role."""

    matrices: Mapping[str, MatrixPlan]  # `head` is the embedding where they are tied
    vectors: Mapping[str, VectorPlan]
    left: frozenset[str] = frozenset()  # tensors that may be there, and that nothing reads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the checkpoint must hold, and its shape."""
        shapes: dict[str, tuple[int, ...]] = {}
        for matrix in self.matrices.values():
            shapes.update(
                {one.tensor: one.shape or (one.rows, matrix.columns) for one in matrix.parts}
            )
            shapes.update(matrix.biases)
            if matrix.part_scales is not None:
                shapes[matrix.part_scales] = (len(matrix.parts),)
        shapes.update(
            {name: vector.shape for vector in self.vectors.values() for name in vector.tensors}
        )
        return shapes


def plan_weights(spec: ArchSpec, names: TensorNames) -> WeightPlan:
    """Name every tensor that `spec` calls for."""
    embedding = MatrixPlan((Part(names.embedding, spec.vocab_size),), spec.hidden_size)
    biases = ((_bias(names.head), (spec.num_logits,)),) if spec.head_bias else ()
    head = MatrixPlan((Part(names.head, spec.num_logits),), spec.hidden_size, biases)
    matrices = {EMBEDDING: embedding, HEAD: embedding if spec.tie_word_embeddings else head}
    vectors = _with_bias(spec, names, FINAL_NORM, names.final_norm, spec.logits_scale)
    if spec.draft is not None:
        matrices[FEATURES] = _stacked(
            "", (names.features,), (spec.hidden_size,), spec.draft.features, biased=False
        )
        vectors.update(_draft_norms(spec.hidden_size, spec.draft, names))
    if spec.layer_input_size is not None:
        matrices.update(_layer_input_tables(spec, spec.layer_input_size, names))
        size, scale = spec.layer_input_size, math.sqrt(0.5)
        vectors[f"{LAYER_INPUTS}.norm"] = _norm(names, names.layer_inputs_norm, size, scale)
    left: set[str] = set()
    for layer in range(spec.num_layers):
        role = f"layers.{layer}."
        prefix, behind = _prefixes(spec, names, layer)
        experts = spec.experts_of(layer)
        vectors.update(_layer_norms(spec, names, role, prefix))
        own_norm = spec.parallel_norms or not spec.parallel_layers
        if spec.has_mlp(layer) and not spec.raw_inputs and own_norm:
            tensor = behind + names.post_norm
            vectors.update(_with_bias(spec, names, role + "post_norm", tensor))
        if isinstance(spec.linear, StateSpaceSpec) and spec.is_linear(layer):
            vectors.update(_space_vectors(spec.linear, names, role, prefix))
            matrices.update(_space_matrices(spec, spec.linear, names, role, prefix))
        elif spec.is_linear(layer) and isinstance(spec.linear, ShortConvSpec):
            vectors.update(_conv_vectors(spec.linear, names, role, prefix))
            matrices.update(_conv_matrices(spec, spec.linear, names, role, prefix))
        elif spec.is_linear(layer):
            assert isinstance(spec.linear, LinearAttentionSpec)
            vectors.update(_linear_vectors(spec.linear, names, role, prefix))
            matrices.update(_linear_matrices(spec, spec.linear, names, role, prefix))
        else:
            vectors.update(_head_vectors(spec, layer, names, role, prefix))
            matrices.update(_attention_matrices(spec, layer, names, role, prefix))
            if spec.kv_source(layer) != layer:
                left.update(f"{prefix}{name}.weight" for name in names.qkv[1:])
                left.add(prefix + names.k_norm)
        if spec.layer_scales:
            vectors[role + "scale"] = VectorPlan(prefix + names.layer_scale, (1,))
        if spec.layer_input_size is not None:
            size = spec.layer_input_size
            matrices.update(_layer_input_matrices(spec, size, names, role, prefix))
            tensor = prefix + names.layer_input_norm
            norm = _norm(names, tensor, spec.hidden_size, spec.residual_scale)
            vectors[role + "input_out_norm"] = norm
        if experts is None and spec.has_mlp(layer):
            vectors.update(_activation_vectors(spec, names, role, behind))
            parts = ((names.up,) if spec.ungated else names.gate_up, names.down)
            matrices.update(_feed_forward(spec, role, behind, parts, spec.inner_size(layer)))
        if experts is not None:
            matrices.update(_expert_matrices(spec, experts, names, role, behind))
            if experts.apart:
                vectors.update(_norms_of_experts(spec.hidden_size, names, role, behind))
            if experts.corrected:
                dims = (*names.correction_axes, experts.count)
                tensor = behind + names.correction
                vectors[role + "correction"] = VectorPlan(tensor, dims, is_exact=True)
    return WeightPlan(matrices, vectors, frozenset(left))


def _layer_input_tables(spec: ArchSpec, size: int, names: TensorNames) -> dict[str, MatrixPlan]:
    """What all layers are told of a token, side by side, and of its embedding.

    The mean of both, times the root of 2, is in the table and in the norm: see `plan_weights`.
    """
    width = spec.num_layers * size
    table = MatrixPlan(
        (Part(names.layer_inputs, spec.vocab_size),), width, scale=math.sqrt(size / 2)
    )
    product = _stacked("", (names.layer_inputs_product,), (width,), spec.hidden_size, biased=False)
    return {LAYER_INPUTS: table, f"{LAYER_INPUTS}.product": product}


def _layer_input_matrices(
    spec: ArchSpec, size: int, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """What reads the stream as it is in the model, and what is added to it."""
    gate = _stacked(prefix, (names.layer_input_gate,), (size,), spec.hidden_size, biased=False)
    out = _stacked(prefix, (names.layer_input_out,), (spec.hidden_size,), size, biased=False)
    return {
        role + "input_gate": replace(gate, scale=spec.stream_scale or 1.0),
        role + "input_out": out,
    }


def _prefixes(spec: ArchSpec, names: TensorNames, layer: int) -> tuple[str, str]:
    """What names of a layer's tensors begin with, and those of its feed-forward layer."""
    if not names.blocks:
        return (names.layer.format(layer),) * 2
    block = layer + sum(map(spec.has_mlp, range(layer)))
    return names.layer.format(block), names.layer.format(block + 1)


def _norm(names: TensorNames, tensor: str, size: int, scale: float | None = None) -> VectorPlan:
    return VectorPlan(tensor, (size,), names.norm_offset, 1.0 if scale is None else scale)


def _with_bias(
    spec: ArchSpec, names: TensorNames, role: str, tensor: str, scale: float | None = None
) -> dict[str, VectorPlan]:
    """A norm of the residual stream, and its bias if norms have one; both are times the scale."""
    size = spec.hidden_size
    found = {role: _norm(names, tensor, size, scale)}
    if spec.norm_biases:
        found[f"{role}_bias"] = VectorPlan(_bias(tensor), (size,), scale=scale or 1.0)
    return found


def _bias(tensor: str) -> str:
    """The bias beside a weight."""
    return f"{tensor.removesuffix('weight')}bias"


def _activation_vectors(
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


def _draft_norms(hidden: int, draft: DraftSpec, names: TensorNames) -> dict[str, VectorPlan]:
    """Norms that only a draft head has."""
    prefix = names.layer.format(0)
    found = {"layers.0.hidden_norm": _norm(names, prefix + names.hidden_norm, hidden)}
    if draft.joint_norm:
        found["joint_norm"] = _norm(names, names.joint_norm, draft.features)
    if draft.apart_norm:
        for place in range(len(draft.target_layers)):
            tensor = names.apart_norm.format(place)
            found[f"apart_norm.{place}"] = _norm(names, tensor, draft.target_hidden_size)
    return found


def _layer_norms(
    spec: ArchSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    found = {}
    if spec.latent is not None:
        found["latent_norm"] = _norm(names, prefix + names.latent_kv_norm, spec.latent.kv_rank)
        if spec.latent.query_rank is not None:
            tensor = prefix + names.latent_q_norm
            found["q_latent_norm"] = _norm(names, tensor, spec.latent.query_rank)
    if not spec.raw_inputs:
        found |= _with_bias(spec, names, "input_norm", prefix + names.input_norm)
    if spec.output_norms:
        for name, tensor in (("o_norm", names.o_norm), ("down_norm", names.down_norm)):
            found[name] = _norm(names, prefix + tensor, spec.hidden_size, spec.residual_scale)
    return {role + name: vector for name, vector in found.items()}


def _head_vectors(
    spec: ArchSpec, layer: int, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """Norms of queries and keys, and sinks, of a layer with attention."""
    found = {}
    if spec.apart_qk_norm:
        found["q_norm"] = _apart_norm(prefix + names.q_norm, spec.num_heads, spec.head_size)
        found["k_norm"] = _apart_norm(prefix + names.k_norm, spec.num_kv_heads, spec.head_size)
    elif spec.qk_norm:
        size = spec.heads_of(layer).head_size
        sizes = (spec.q_size, spec.kv_size) if spec.whole_qk_norm else (size, size)
        found["q_norm"] = _norm(names, prefix + names.q_norm, sizes[0])
        if spec.kv_source(layer) == layer:
            found["k_norm"] = _norm(names, prefix + names.k_norm, sizes[1])
    if spec.attention_sinks:
        found["sinks"] = VectorPlan(prefix + names.sinks, (spec.num_heads,))
    return {role + name: vector for name, vector in found.items()}


def _apart_norm(tensor: str, heads: int, size: int) -> VectorPlan:
    """The weights of each head's norm, in one tensor, or with "{}" for the head in one of each."""
    if "{}" not in tensor:
        return VectorPlan(tensor, (heads, size))
    first, *others = (tensor.format(head) for head in range(heads))
    return VectorPlan(first, (size,), more=tuple(others))


def _attention_matrices(
    spec: ArchSpec, layer: int, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """Attention's projections of what a layer reads, and what makes gates.

    Unless gates have a tensor of their own, each head's is below its query.
    """
    inputs, widths = spec.attention_inputs(layer), spec.qkv_parts(layer)
    attended = widths[0] if spec.latent is None else spec.attended_size
    o = _stacked(prefix, names.o, (spec.hidden_size,), attended, biased=spec.o_bias)
    found = {role + "o": replace(o, scale=spec.output_scale)}
    if spec.latent is not None:
        return found | _latent_matrices(spec, spec.latent, names, role, prefix)
    if names.qkv_by_head:
        tensor = f"{prefix}{names.qkv[0]}.weight"
        kinds = _by_head(tensor, spec.num_heads, (spec.head_size,) * 3, inputs)
        biases = ((_bias(tensor), (spec.qkv_size,)),) if spec.qkv_bias else ()
        parts = tuple(part for kind in kinds for part in kind)
        found[role + "qkv"] = MatrixPlan(parts, inputs, biases, biases_by_parts=bool(biases))
    elif not spec.attention_gate or names.attention_gate is not None:
        tensors = names.qkv[: len(widths)]
        qkv = _stacked(prefix, tensors, widths, inputs, biased=spec.qkv_bias)
        found[role + "qkv"] = qkv
    if not spec.attention_gate:
        return found
    if names.attention_gate is not None:
        own = _stacked(prefix, (names.attention_gate,), (spec.q_size,), inputs, biased=False)
        return found | {role + "attention_gate": own}
    first, *others = (f"{prefix}{name}.weight" for name in names.qkv)
    q, gate = _by_head(first, spec.num_heads, (spec.head_size,) * 2, inputs)
    joined = (*q, *map(Part, others, widths[1:]))
    gates = MatrixPlan(gate, inputs)
    return found | {role + "qkv": MatrixPlan(joined, inputs), role + "attention_gate": gates}


def _by_head(
    tensor: str, heads: int, rows: tuple[int, ...], columns: int
) -> list[tuple[Part, ...]]:
    """The parts of a tensor where rows of each of several kinds lie together, head by head."""
    height = sum(rows)
    shape = (heads * height, columns)
    return [
        tuple(Part(tensor, size, head * height + sum(rows[:kind]), shape) for head in range(heads))
        for kind, size in enumerate(rows)
    ]


def _linear_vectors(
    linear: LinearAttentionSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """What a layer without attention has beside its products."""
    role, heads = f"{role}linear.", (linear.value_heads,)
    kernel = (linear.channels, *names.conv_axes, linear.kernel)
    return {
        role + "conv": VectorPlan(prefix + names.linear_conv, kernel),
        role + "a_log": VectorPlan(prefix + names.linear_a_log, heads, is_exact=True),
        role + "dt_bias": VectorPlan(prefix + names.linear_dt_bias, heads, is_exact=True),
        role + "norm": VectorPlan(prefix + names.linear_norm, (linear.value_size,)),
    }


def _linear_matrices(
    spec: ArchSpec, linear: LinearAttentionSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """The products of a layer without attention.

    Those of beta and of the decay are two numbers a head, and stay as exact as activations are: an
    error of a decay is one of all tokens before, as often as there are tokens behind.
    """
    hidden, heads = spec.hidden_size, linear.value_heads
    tensors = [f"{prefix}{name}.weight" for name in names.linear_in]
    if len(tensors) == 2:  # of each key head its query, key, values and their gates
        shared = heads // linear.key_heads
        values = shared * linear.value_size
        rows = (linear.key_size, linear.key_size, values, values)
        *qkv, z = _by_head(tensors[0], linear.key_heads, rows, hidden)
        ba = _by_head(tensors[1], linear.key_heads, (shared, shared), hidden)
        first, second = (tuple(part for kind in kinds for part in kind) for kinds in (qkv, ba))
    elif len(tensors) == 3:  # the last one by key heads
        shared = heads // linear.key_heads
        first, z = (Part(tensors[0], linear.channels),), (Part(tensors[1], linear.value_width),)
        ba = _by_head(tensors[2], linear.key_heads, (shared, shared), hidden)
        second = tuple(part for kind in ba for part in kind)
    else:
        first, z = (Part(tensors[0], linear.channels),), (Part(tensors[1], linear.value_width),)
        second = tuple(Part(tensor, heads) for tensor in tensors[2:])
    o = _stacked(prefix, names.linear_o, (hidden,), linear.value_width, biased=False)
    return {
        role + "linear.qkv": MatrixPlan(first, hidden),
        role + "linear.z": MatrixPlan(z, hidden),
        role + "linear.ba": MatrixPlan(second, hidden, is_exact=True),
        role + "o": replace(o, scale=spec.output_scale),
    }


def _conv_vectors(
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


def _conv_matrices(
    spec: ArchSpec, conv: ShortConvSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """The products into and out of a layer that is a convolution."""
    hidden, width = spec.hidden_size, conv.channels
    first = _stacked(prefix, names.linear_in, (3 * width,), hidden, biased=conv.bias)
    o = _stacked(prefix, names.linear_o, (hidden,), width, biased=conv.bias)
    return {
        role + "linear.in": first,
        role + "o": replace(o, scale=spec.output_scale),
    }


def _space_vectors(
    space: StateSpaceSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """What a layer of a state space has beside its products."""
    role, heads = f"{role}linear.", (space.heads,)
    found = {
        "conv": VectorPlan(prefix + names.space_conv, (space.channels, 1, space.kernel)),
        "a_log": VectorPlan(prefix + names.space_a_log, heads, is_exact=True),
        "dt_bias": VectorPlan(prefix + names.space_dt_bias, heads, is_exact=True),
        "skip": VectorPlan(prefix + names.space_skip, heads, is_exact=True),
        "norm": VectorPlan(prefix + names.space_norm, (space.value_width,), is_exact=True),
    }
    if space.conv_bias:
        found["conv_bias"] = VectorPlan(prefix + names.space_conv_bias, (space.channels,))
    return {role + name: vector for name, vector in found.items()}


def _space_matrices(
    spec: ArchSpec, space: StateSpaceSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """The products of a layer of a state space, all but the last of which are one tensor.

    That of the steps stays as exact as activations are, as that of decays does above.
    """
    hidden, tensor = spec.hidden_size, f"{prefix}{names.space_in}.weight"
    heights = (space.value_width, space.channels, space.heads)
    shape = (sum(heights), hidden)
    starts = (0, heights[0], heights[0] + heights[1])
    z, mixed, dt = (
        MatrixPlan((Part(tensor, rows, first, shape),), hidden)
        for rows, first in zip(heights, starts, strict=True)
    )
    o = _stacked(prefix, (names.space_o,), (hidden,), space.value_width, biased=False)
    return {
        role + "linear.z": z,
        role + "linear.mixed": mixed,
        role + "linear.dt": replace(dt, is_exact=True),
        role + "o": replace(o, scale=spec.output_scale),
    }


def _latent_matrices(
    spec: ArchSpec, latent: LatentSpec, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """Attention's projections, of which each head's keys and values have one of latents.

    These are products of a batch, one for each head, and stay floats: no operator has a batch of
    quantized ones. Of DeepSeek V3 they are 2 GB beside 350. Were those of keys in the queries'
    projection, as they could be, that would have three times as many weights.
    """
    heads, hidden = spec.num_heads, spec.hidden_size
    queries = heads * latent.query_size
    first, rank = (names.latent_q, queries), latent.query_rank
    found = {}
    if rank is not None:
        first = (names.latent_q_a, rank)
        found["q_b"] = _stacked(prefix, (names.latent_q_b,), (queries,), rank, biased=False)
    parts = (first[0], names.latent_kv_a)
    found["qkv"] = _stacked(prefix, parts, (first[1], latent.row_size), hidden, biased=False)
    ups = _latent_parts(heads, latent, names, prefix)
    found["k_up"] = MatrixPlan(ups[0], latent.kv_rank, is_exact=True, apart=True)
    found["v_up"] = MatrixPlan(ups[1], latent.kv_rank, is_exact=True, by_rows=True)
    return {role + name: one for name, one in found.items()}


def _latent_parts(
    heads: int, latent: LatentSpec, names: TensorNames, prefix: str
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Of each head what makes its keys, and what makes its values."""
    keys, values, rank = latent.nope_size, latent.value_size, latent.kv_rank
    if names.latent_apart is None:
        tensor = f"{prefix}{names.latent_kv_b}.weight"
        first, second = _by_head(tensor, heads, (keys, values), rank)
        return first, second
    k, v = (f"{prefix}{name}.weight" for name in names.latent_apart)
    across, along = (heads, rank, keys), (heads, values, rank)
    return (
        tuple(Part(k, keys, head * keys, across, is_transposed=True) for head in range(heads)),
        tuple(Part(v, values, head * values, along) for head in range(heads)),
    )


def _norms_of_experts(
    hidden: int, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    """Norms that experts apart from a shared layer have."""
    tensors = {
        "experts_norm": names.experts_norm,
        "experts_out_norm": names.experts_out_norm,
        "shared_out_norm": names.shared_out_norm,
    }
    found = {role + one: _norm(names, prefix + name, hidden) for one, name in tensors.items()}
    router = VectorPlan(prefix + names.router_norm, (hidden,), scale=hidden**-0.5)
    return found | {role + "router_norm": router}


def _feed_forward(
    spec: ArchSpec,
    role: str,
    prefix: str,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    size: int,
) -> dict[str, MatrixPlan]:
    """Joined gate and up, or up alone, and down, of a layer with `size` features between."""
    gate_up, down = names
    hidden, biased = spec.hidden_size, spec.mlp_bias
    back = _stacked(prefix, down, (hidden,), size, biased=biased)
    first, rows = ("up", (size,)) if spec.ungated else ("gate_up", (size, size))
    return {
        role + first: _stacked(prefix, gate_up, rows, hidden, biased=biased),
        role + "down": replace(back, scale=spec.output_scale),
    }


def _stacked(
    prefix: str, names: _Names, rows: tuple[int, ...], columns: int, *, biased: bool
) -> MatrixPlan:
    """Projections below each other, or one tensor that has them so."""
    heights = (sum(rows),) if len(names) == 1 else rows
    sizes = tuple((prefix + name, size) for name, size in zip(names, heights, strict=True))
    return MatrixPlan(
        tuple(Part(f"{name}.weight", size) for name, size in sizes),
        columns,
        tuple((f"{name}.bias", (size,)) for name, size in sizes) if biased else (),
    )


def _expert_matrices(
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
    router = _stacked(prefix, (names.router,), (count,), hidden, biased=bool(experts.biased))
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
        found |= _feed_forward(spec, f"{role}shared.", prefix, parts, experts.shared_size)
    if experts.shared_gated:
        part = Part(f"{prefix}{names.shared_gate}.weight", 1)
        found[role + "shared.gate"] = MatrixPlan((part,), hidden, is_exact=True)
    return found


def _expert_parts(
    prefix: str, names: _Names, shape: tuple[int, int, int], *, halves: int, transposed: bool
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


def unused_tensors(
    found: frozenset[str], plan: WeightPlan, names: TensorNames, *, tied: bool
) -> list[str]:
    """Tensors of the checkpoint that nothing uses, but for what is known.

    That is buffers, a tied head, the part that reads images, and what guesses further tokens.
    """
    wanted = plan.shapes()
    return sorted(
        name
        for name in found
        if name not in wanted
        and name not in plan.left
        and not name.endswith(names.ignored)
        and not name.startswith((*names.images, *names.further))
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
