"""The forward pass in NumPy, float32: the reference that every graph is tested against.

It asks a `WeightSource` for one weight after the other and never keeps one, so it runs over a
checkpoint while that is being exported, and over a model larger than memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter import rope
from onnxport.exporter.plan import (
    EMBEDDING_NORM,
    FEATURES,
    FINAL_NORM,
    LAYER_INPUTS,
    POSITIONS,
    STATE_NORM,
    TOKEN_IN,
    TOKEN_OUT,
)
from onnxport.exporter.reference_altup import altup_forward
from onnxport.exporter.reference_attention import attend, attend_linearly, of_space
from onnxport.exporter.reference_experts import feed_forward
from onnxport.exporter.reference_parts import (
    Array,
    WeightSource,
    norm,
    normed_output,
    of_told,
    rms_norm,
    softcap,
)
from onnxport.graphs.linear_spec import StateSpaceSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec


def forward(
    spec: ArchSpec,
    weights: WeightSource,
    token_ids: NDArray[np.int64],
    logits_indices: NDArray[np.int32],
) -> Array:
    """Logits of one sequence from position 0.

    Args:
        spec: The model.
        weights: Its weights.
        token_ids: int64 [num_tokens].
        logits_indices: int32 [num_logits], the positions that need logits.

    Returns:
        float32 [num_logits, vocab].
    """
    normed, _ = _normed(spec, weights, token_ids, logits_indices, None)
    if spec.embedding_size is not None:
        normed = weights.linear(TOKEN_OUT, normed)
    return softcap(weights.head(normed), spec.logits_softcap)


def draft_forward(
    spec: ArchSpec,
    weights: WeightSource,
    token_ids: NDArray[np.int64],
    states: tuple[Array, Array],
    logits_indices: NDArray[np.int32],
) -> tuple[Array, Array]:
    """What a draft head makes of one sequence from position 0.

    Args:
        spec: The head.
        weights: Its weights.
        token_ids: int64 [num_tokens].
        states: Of the token before each, float32: the model's, [num_tokens, features], and the
            head's own, [num_tokens, hidden_size]; one of them is zeros in each row.
        logits_indices: int32 [num_logits], the positions that need logits.

    Returns:
        Logits, float32 [num_logits, spec.num_logits], and the head's states there, float32
        [num_logits, hidden_size].
    """
    assert spec.draft is not None
    normed, hidden = _normed(spec, weights, token_ids, logits_indices, states)
    logits = softcap(weights.head(normed), spec.logits_softcap)
    return logits, normed if spec.draft.norm_output else hidden


def _normed(
    spec: ArchSpec,
    weights: WeightSource,
    token_ids: NDArray[np.int64],
    logits_indices: NDArray[np.int32],
    states: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
    """The last hidden states, [num_logits, hidden]: normalized and as they are."""
    tables = {one: rope.tables(one, spec.context_length, len(token_ids)) for one in spec.ropes}
    hidden = _stream(spec, weights, token_ids)
    if spec.embedding_norm:
        hidden = norm(spec, weights, EMBEDDING_NORM, hidden)
    if spec.altup is not None:
        told = layer_inputs(spec, weights, token_ids, hidden)
        return altup_forward(spec, spec.altup, weights, (hidden, told, tables), logits_indices)
    told = layer_inputs(spec, weights, token_ids, hidden)
    kept: dict[int, tuple[Array, Array]] = {}
    if spec.stream_norms:
        return _normed_stream(spec, weights, hidden, tables, logits_indices)
    for layer in range(spec.num_layers):
        if layer == 0 and states is not None:
            read, hidden = _read_states(spec, weights, hidden, states)
        else:
            read = _read(spec, weights, layer, "input_norm", hidden)
        mixed = {}  # by the role of what is made of it
        if spec.has_attention(layer):
            found = tables[spec.rope_of(layer)] if spec.rotates(layer) else None
            mixed[f"layers.{layer}.o"] = attend(spec, layer, weights, read, found, kept)
        if spec.is_linear(layer):
            of_kind = of_space if isinstance(spec.linear, StateSpaceSpec) else attend_linearly
            role = f"layers.{layer}.linear.o" if spec.has_both else f"layers.{layer}.o"
            mixed[role] = of_kind(spec, layer, weights, read)
        if layer == spec.num_layers - 1:  # what follows mixes no positions
            hidden, told = hidden[logits_indices], told[logits_indices]
            mixed = {role: one[logits_indices] for role, one in mixed.items()}
        projected, *others = (weights.linear(role, one) for role, one in mixed.items())
        added = normed_output(spec, weights, layer, "o", sum(others, projected))
        if spec.parallel_layers:
            if spec.parallel_norms:
                read = _read(spec, weights, layer, "post_norm", hidden)
            elif layer == spec.num_layers - 1:
                read = read[logits_indices]
            hidden = hidden + added + feed_forward(spec, layer, weights, read)
            continue
        hidden = hidden + added
        if not spec.has_mlp(layer):
            continue
        read = _read(spec, weights, layer, "post_norm", hidden)
        hidden = hidden + feed_forward(spec, layer, weights, read, hidden)
        hidden = _end(spec, layer, weights, hidden, told)
    return hidden if spec.no_final_norm else norm(spec, weights, FINAL_NORM, hidden), hidden


def _stream(spec: ArchSpec, weights: WeightSource, token_ids: NDArray[np.int64]) -> Array:
    """What the first layer reads, [num_tokens, hidden]."""
    hidden = weights.embed(token_ids)
    if spec.embedding_size is not None:
        hidden = weights.linear(TOKEN_IN, hidden)
    if spec.learned_positions is not None:
        hidden = hidden + weights.embed(np.arange(len(token_ids), dtype=np.int64), POSITIONS)
    return hidden


def _normed_stream(
    spec: ArchSpec,
    weights: WeightSource,
    hidden: Array,
    tables: Mapping[RopeSpec, tuple[Array, Array]],
    logits_indices: NDArray[np.int32],
) -> tuple[Array, Array]:
    """See `_normed`, of layers whose norms are of the stream."""
    for layer in range(spec.num_layers):
        role = f"layers.{layer}"
        found = tables[spec.rope_of(layer)] if spec.rotates(layer) else None
        mixed = attend(spec, layer, weights, hidden, found, {})
        if layer == spec.num_layers - 1:  # what follows mixes no positions
            hidden, mixed = hidden[logits_indices], mixed[logits_indices]
        added = weights.linear(f"{role}.o", mixed)
        hidden = norm(spec, weights, f"{role}.input_norm", hidden + added)
        added = feed_forward(spec, layer, weights, hidden)
        hidden = norm(spec, weights, f"{role}.post_norm", hidden + added)
    return hidden if spec.no_final_norm else norm(spec, weights, FINAL_NORM, hidden), hidden


def layer_inputs(
    spec: ArchSpec, weights: WeightSource, token_ids: NDArray[np.int64], embedded: Array
) -> Array:
    """What layers are told of each token, [num_tokens, num_layers, layer_input_size]."""
    if spec.layer_input_size is None:
        return np.empty((len(token_ids), 0, 0), np.float32)
    shape = (len(token_ids), spec.num_layers, spec.layer_input_size)
    rows = np.where(token_ids < spec.num_layer_inputs, token_ids, 0)
    found = weights.embed(rows, LAYER_INPUTS).reshape(shape)
    product = weights.linear(f"{LAYER_INPUTS}.product", embedded).reshape(shape)
    return found + rms_norm(product, weights.vector(f"{LAYER_INPUTS}.norm"), spec.inner_eps)


def _end(spec: ArchSpec, layer: int, weights: WeightSource, hidden: Array, told: Array) -> Array:
    """The stream behind a layer: what it was told goes in, and it may be scaled."""
    role = f"layers.{layer}."
    if spec.layer_input_size is not None:
        hidden = hidden + of_told(spec, layer, weights, hidden, told[:, layer])
    return hidden * weights.vector(role + "scale") if spec.layer_scales else hidden


def _read_states(
    spec: ArchSpec, weights: WeightSource, embedded: Array, states: tuple[Array, Array]
) -> tuple[Array, Array]:
    """What a head's first layer reads, and the stream it adds to.

    The first is [num_tokens, 2 * hidden], or of multi-token prediction [num_tokens, hidden].
    """
    draft, (features, own) = spec.draft, states
    assert draft is not None
    epsilon = spec.rms_norm_eps
    if draft.is_mtp:
        token = rms_norm(embedded, weights.vector(EMBEDDING_NORM), epsilon)
        state = rms_norm(features + own, weights.vector(STATE_NORM), epsilon)
        hidden = weights.linear(FEATURES, np.concatenate([token, state], axis=-1))
        return _read(spec, weights, 0, "input_norm", hidden), hidden
    if draft.joint_norm:
        features = rms_norm(features, weights.vector("joint_norm"), epsilon)
    if draft.apart_norm:
        parts = np.split(features, len(draft.target_layers), axis=-1)
        normed = [
            rms_norm(part, weights.vector(f"apart_norm.{place}"), epsilon)
            for place, part in enumerate(parts)
        ]
        features = np.concatenate(normed, axis=-1)
    hidden = weights.linear(FEATURES, features) + own
    token = rms_norm(embedded, weights.vector("layers.0.input_norm"), epsilon)
    state = rms_norm(hidden, weights.vector("layers.0.hidden_norm"), epsilon)
    read = np.concatenate([token, state], axis=-1)
    return read, state if draft.norm_before_residual else hidden


def _read(spec: ArchSpec, weights: WeightSource, layer: int, name: str, hidden: Array) -> Array:
    """What attention or the feed-forward layer reads; [num_tokens, hidden]."""
    if not spec.norms_inputs(layer):
        return hidden
    return norm(spec, weights, f"layers.{layer}.{name}", hidden)
