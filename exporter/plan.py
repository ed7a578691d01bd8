"""Which tensors of a checkpoint make up each weight of the graphs, and of what shape.

A weight is named by its role: `embedding`, `final_norm`, `head`, and for each layer
`layers.N.{input_norm, qkv, q_norm, k_norm, sinks, o, o_norm, post_norm, gate_up, down, down_norm}`,
(where attention is of latents `qkv`, `q_latent_norm`, `q_b`, `latent_norm`, `k_up` and `v_up`),
where a layer with experts has `router`, `correction`, `experts.gate_up` and `experts.down` for
`gate_up` and `down`, and `shared.{gate_up, down, gate}` of the layer beside them. Gated attention
has `attention_gate` besides, and a layer without attention `linear.{qkv, z, ba, conv, a_log,
dt_bias, norm}` for `qkv` and its norms, and of Kimi Delta Attention `linear.{decay, z_in}`; or,
where it is a state space, `linear.{z, mixed, dt, conv, conv_bias, a_log, dt_bias, skip, norm}`, or
a convolution, `linear.{in, conv, conv_bias}`. Where a layer has attention and a state space, the
last product of the latter is `linear.o`. A draft
head has `features`, `joint_norm` or `apart_norm.N`, and `layers.0.hidden_norm` besides, or, of
multi-token prediction, `features`, `embedding_norm` and `state_norm`. LayerNorms may have biases,
`final_norm_bias` and so on. What has no gate, experts too, has `up` for `gate_up`; of an xIELU
there are `alpha_p`, `alpha_n`, `beta` and `eps`. Where layers are told something of each token,
there are `layer_inputs`, `layer_inputs.{product, norm}` and of each layer `input_gate`, `input_out`
and `input_out_norm`; and `scale` where the stream behind it is times a number. Experts apart from a
shared layer have `router_norm`, `experts_norm`, `experts_out_norm` and `shared_out_norm`. Where
there are several streams, there are `altup.start` and `altup.merge.N`, and of each layer
`altup.{norm, router, predict, correct, scale}` and `laurel.{left, right, norm}`. Learned positions
are `positions`, and `token_in` and `token_out` make the stream of the embedding, and of it what the
head reads, where these are of another width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.plan_altup import altup_matrices, altup_tables, altup_vectors
from onnxport.exporter.plan_attention import attention_matrices, head_vectors
from onnxport.exporter.plan_experts import (
    activation_vectors,
    expert_matrices,
    feed_forward,
    norms_of_experts,
)
from onnxport.exporter.plan_parts import (
    MatrixPlan,
    Part,
    VectorPlan,
    bias_of,
    plan_norm,
    stack_rows,
    transposed,
)
from onnxport.exporter.plan_states import (
    conv_matrices,
    conv_vectors,
    linear_matrices,
    linear_vectors,
    space_matrices,
    space_vectors,
)
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec, ShortConvSpec, StateSpaceSpec
from onnxport.graphs.spec import ArchSpec

HEAD: Final = "head"
EMBEDDING: Final = "embedding"
POSITIONS: Final = "positions"
TOKEN_IN: Final = "token_in"
TOKEN_OUT: Final = "token_out"
FINAL_NORM: Final = "final_norm"
FEATURES: Final = "features"
EMBEDDING_NORM: Final = "embedding_norm"
STATE_NORM: Final = "state_norm"
LAYER_INPUTS: Final = "layer_inputs"
TABLES: Final = frozenset({EMBEDDING, LAYER_INPUTS})  # whose rows are gathered


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
        for vector in self.vectors.values():
            shapes.update(zip(vector.tensors, vector.shapes, strict=True))
        return shapes


def plan_weights(spec: ArchSpec, names: TensorNames) -> WeightPlan:
    """Name every tensor that `spec` calls for."""
    embedding = MatrixPlan((Part(names.embedding, spec.vocab_size),), spec.token_size)
    biases = ((bias_of(names.head), (spec.num_logits,)),) if spec.head_bias else ()
    head = MatrixPlan((Part(names.head, spec.num_logits),), spec.token_size, biases)
    matrices = {EMBEDDING: embedding, HEAD: embedding if spec.tie_word_embeddings else head}
    matrices.update(_learned_matrices(spec, names))
    vectors: dict[str, VectorPlan] = {}
    if not spec.no_final_norm:
        vectors |= _with_bias(spec, names, FINAL_NORM, names.final_norm, spec.logits_scale)
    if spec.embedding_norm:
        vectors.update(_with_bias(spec, names, EMBEDDING_NORM, names.embedding_norm))
    if spec.draft is not None:
        inputs = 2 * spec.hidden_size if spec.draft.is_mtp else spec.draft.features
        matrices[FEATURES] = stack_rows(
            "", (names.features,), (spec.hidden_size,), inputs, biased=False
        )
        vectors.update(_draft_norms(spec.hidden_size, spec.draft, names))
    if spec.layer_input_size is not None:
        matrices.update(_layer_input_tables(spec, spec.layer_input_size, names))
        size, scale = spec.layer_input_size, math.sqrt(0.5)
        vectors[f"{LAYER_INPUTS}.norm"] = plan_norm(names, names.layer_inputs_norm, size, scale)
    if spec.altup is not None:
        matrices.update(altup_tables(spec, spec.altup, names))
    left: set[str] = set()
    for layer in range(spec.num_layers):
        role = f"layers.{layer}."
        prefix, behind = _prefixes(spec, names, layer)
        experts = spec.experts_of(layer)
        vectors.update(_layer_norms(spec, layer, names, role, prefix))
        own_norm = spec.parallel_norms or not spec.parallel_layers
        if spec.has_mlp(layer) and spec.norms_inputs(layer) and own_norm:
            tensor = behind + names.post_norm
            vectors.update(_with_bias(spec, names, role + "post_norm", tensor))
        if spec.has_attention(layer):
            vectors.update(head_vectors(spec, layer, names, role, prefix))
            matrices.update(attention_matrices(spec, layer, names, role, prefix))
            if spec.kv_source(layer) != layer:
                left.update(f"{prefix}{name}.weight" for name in names.qkv[1:])
                left.add(prefix + names.k_norm)
        if isinstance(spec.linear, StateSpaceSpec) and spec.is_linear(layer):
            vectors.update(space_vectors(spec.linear, names, role, prefix))
            matrices.update(space_matrices(spec, spec.linear, names, role, prefix))
        elif spec.is_linear(layer) and isinstance(spec.linear, ShortConvSpec):
            vectors.update(conv_vectors(spec.linear, names, role, prefix))
            matrices.update(conv_matrices(spec, spec.linear, names, role, prefix))
        elif spec.is_linear(layer):
            assert isinstance(spec.linear, LinearAttentionSpec)
            vectors.update(linear_vectors(spec.linear, names, role, prefix))
            matrices.update(linear_matrices(spec, spec.linear, names, role, prefix))
        if spec.altup is not None:
            vectors.update(altup_vectors(spec, spec.altup, names, role, prefix))
            matrices.update(altup_matrices(spec, spec.altup, names, role, prefix))
            left.add(prefix + names.altup_scale)
        if spec.layer_scales:
            vectors[role + "scale"] = VectorPlan(prefix + names.layer_scale, (1,))
        if spec.layer_input_size is not None:
            size = spec.layer_input_size
            matrices.update(_layer_input_matrices(spec, size, names, role, prefix))
            tensor = prefix + names.layer_input_norm
            norm = plan_norm(names, tensor, spec.hidden_size, spec.residual_scale)
            vectors[role + "input_out_norm"] = norm
        if experts is None and spec.has_mlp(layer):
            vectors.update(activation_vectors(spec, names, role, behind))
            parts = ((names.up,) if spec.ungated else names.gate_up, names.down)
            matrices.update(feed_forward(spec, role, behind, parts, spec.inner_size(layer)))
        if experts is None and spec.experts is not None and spec.experts.sum_normed:
            left.add(behind + names.sum_norm)  # of dense layers, which do not read it
        if experts is not None:
            if experts.sum_normed:
                norm = plan_norm(names, behind + names.sum_norm, spec.hidden_size)
                vectors[role + "sum_norm"] = norm
            matrices.update(expert_matrices(spec, experts, names, role, behind))
            if experts.apart:
                vectors.update(norms_of_experts(spec.hidden_size, names, role, behind))
            if experts.corrected:
                dims = (*names.correction_axes, experts.count)
                tensor = behind + names.correction
                vectors[role + "correction"] = VectorPlan(tensor, dims, is_exact=True)
    if names.transposed:
        layers = {role: one for role, one in matrices.items() if role.startswith("layers.")}
        matrices |= {role: transposed(one) for role, one in layers.items()}
    return WeightPlan(matrices, vectors, frozenset(left))


def _learned_matrices(spec: ArchSpec, names: TensorNames) -> dict[str, MatrixPlan]:
    """The table of positions, and what is between the embedding, layers and the head.

    They are small, each of all that a token is, and so stay floats.
    """
    found, hidden, rows = {}, spec.hidden_size, spec.learned_positions
    if rows is not None:
        shape = (names.positions_offset + rows, hidden)
        part = Part(names.positions, rows, names.positions_offset, shape)
        found[POSITIONS] = MatrixPlan((part,), hidden, is_exact=True)
    if spec.embedding_size is not None:
        size = spec.embedding_size
        token_in = stack_rows("", (names.token_in,), (hidden,), size, biased=False)
        token_out = stack_rows("", (names.token_out,), (size,), hidden, biased=False)
        found[TOKEN_IN] = replace(token_in, is_exact=True)
        found[TOKEN_OUT] = replace(token_out, is_exact=True)
    return found


def _layer_input_tables(spec: ArchSpec, size: int, names: TensorNames) -> dict[str, MatrixPlan]:
    """What all layers are told of a token, side by side, and of its embedding.

    The mean of both, times the root of 2, is in the table and in the norm: see `plan_weights`.
    """
    width = spec.num_layers * size
    table = MatrixPlan(
        (Part(names.layer_inputs, spec.num_layer_inputs),), width, scale=math.sqrt(size / 2)
    )
    product = stack_rows(
        "", (names.layer_inputs_product,), (width,), spec.hidden_size, biased=False
    )
    return {LAYER_INPUTS: table, f"{LAYER_INPUTS}.product": product}


def _layer_input_matrices(
    spec: ArchSpec, size: int, names: TensorNames, role: str, prefix: str
) -> dict[str, MatrixPlan]:
    """What reads the stream as it is in the model, and what is added to it."""
    gate = stack_rows(prefix, (names.layer_input_gate,), (size,), spec.hidden_size, biased=False)
    out = stack_rows(prefix, (names.layer_input_out,), (spec.hidden_size,), size, biased=False)
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


def _with_bias(
    spec: ArchSpec, names: TensorNames, role: str, tensor: str, scale: float | None = None
) -> dict[str, VectorPlan]:
    """A norm of the residual stream, and its bias if norms have one; both are times the scale."""
    size = spec.hidden_size
    found = {role: plan_norm(names, tensor, size, scale)}
    if spec.norm_biases:
        found[f"{role}_bias"] = VectorPlan(bias_of(tensor), (size,), scale=scale or 1.0)
    return found


def _draft_norms(hidden: int, draft: DraftSpec, names: TensorNames) -> dict[str, VectorPlan]:
    """Norms that only a draft head has."""
    if draft.is_mtp:
        return {
            EMBEDDING_NORM: plan_norm(names, names.embedding_norm, hidden),
            STATE_NORM: plan_norm(names, names.state_norm, hidden),
        }
    prefix = names.layer.format(0)
    found = {"layers.0.hidden_norm": plan_norm(names, prefix + names.hidden_norm, hidden)}
    if draft.joint_norm:
        found["joint_norm"] = plan_norm(names, names.joint_norm, draft.features)
    if draft.apart_norm:
        for place in range(len(draft.target_layers)):
            tensor = names.apart_norm.format(place)
            found[f"apart_norm.{place}"] = plan_norm(names, tensor, draft.target_hidden_size)
    return found


def _layer_norms(
    spec: ArchSpec, layer: int, names: TensorNames, role: str, prefix: str
) -> dict[str, VectorPlan]:
    found = {}
    if spec.latent is not None and spec.has_attention(layer):
        found["latent_norm"] = plan_norm(names, prefix + names.latent_kv_norm, spec.latent.kv_rank)
        if spec.latent.query_rank is not None:
            tensor = prefix + names.latent_q_norm
            found["q_latent_norm"] = plan_norm(names, tensor, spec.latent.query_rank)
    if spec.norms_inputs(layer):
        found |= _with_bias(spec, names, "input_norm", prefix + names.input_norm)
    if spec.norms_outputs(layer):
        for name, tensor in (("o_norm", names.o_norm), ("down_norm", names.down_norm)):
            found[name] = plan_norm(names, prefix + tensor, spec.hidden_size, spec.residual_scale)
    return {role + name: vector for name, vector in found.items()}


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
