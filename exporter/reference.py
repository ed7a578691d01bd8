"""The forward pass in NumPy, float32: the reference that every graph is tested against.

It asks a `WeightSource` for one weight after the other and never keeps one, so it runs over a
checkpoint while that is being exported, and over a model larger than memory.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter import rope
from onnxport.exporter.activations import ACTIVATIONS, sigmoid, silu, xielu
from onnxport.exporter.linear_reference import convolve, delta_net, softplus, state_space
from onnxport.exporter.plan import EMBEDDING, LAYER_INPUTS
from onnxport.exporter.plan_experts import XIELU
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec, ShortConvSpec, StateSpaceSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec

Array = NDArray[np.float32]


class WeightSource(Protocol):
    """Applies a model's weights by role; each is asked for once, in the order of execution."""

    def embed(self, token_ids: NDArray[np.int64], role: str = EMBEDDING) -> Array:
        """Rows of the embedding table, float32 [num_tokens, hidden_size], or of another one."""
        ...

    def vector(self, role: str) -> Array:
        """A norm's weight, float32 [size]."""
        ...

    def linear(self, role: str, x: Array) -> Array:
        """`x @ weight.T + bias`; float32 [rows, K] to [rows, N].

        Of each expert `experts.gate_up` gives gate's features, and then up's.
        """
        ...

    def sum_of_experts(self, role: str, x: Array, parts: Array) -> Array:
        """`x[:, e] @ weight[e].T + parts[:, e] * bias[e]`, added up over experts.

        Args:
            role: The weight's.
            x: [rows, experts, K], multiplied with the parts.
            parts: [rows, experts].

        Returns:
            [rows, N].
        """
        ...

    def head(self, x: Array) -> Array:
        """Logits, float32 [rows, hidden_size] to [rows, vocab]."""
        ...


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
    return _softcap(weights.head(normed), spec.logits_softcap)


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
    logits = _softcap(weights.head(normed), spec.logits_softcap)
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
    hidden = weights.embed(token_ids)
    told = _layer_inputs(spec, weights, token_ids, hidden)
    kept: dict[int, tuple[Array, Array]] = {}
    for layer in range(spec.num_layers):
        if layer == 0 and states is not None:
            read, hidden = _read_states(spec, weights, hidden, states)
        else:
            read = _read(spec, weights, f"layers.{layer}.input_norm", hidden)
        if spec.is_linear(layer):
            of_kind = _of_space if isinstance(spec.linear, StateSpaceSpec) else _attend_linearly
            attended = of_kind(spec, layer, weights, read)
        else:
            found = tables[spec.rope_of(layer)] if spec.rotates(layer) else None
            attended = _attend(spec, layer, weights, read, found, kept)
        if layer == spec.num_layers - 1:  # what follows mixes no positions
            hidden, attended = hidden[logits_indices], attended[logits_indices]
            told = told[logits_indices]
        projected = weights.linear(f"layers.{layer}.o", attended)
        added = _output(spec, weights, f"layers.{layer}.o", projected)
        if spec.parallel_layers:
            if spec.parallel_norms:
                read = _read(spec, weights, f"layers.{layer}.post_norm", hidden)
            elif layer == spec.num_layers - 1:
                read = read[logits_indices]
            hidden = hidden + added + _feed_forward(spec, layer, weights, read)
            continue
        hidden = hidden + added
        if not spec.has_mlp(layer):
            continue
        read = _read(spec, weights, f"layers.{layer}.post_norm", hidden)
        hidden = hidden + _feed_forward(spec, layer, weights, read, hidden)
        hidden = _end(spec, layer, weights, hidden, told)
    return _norm(spec, weights, "final_norm", hidden), hidden


def _layer_inputs(
    spec: ArchSpec, weights: WeightSource, token_ids: NDArray[np.int64], embedded: Array
) -> Array:
    """What layers are told of each token, [num_tokens, num_layers, layer_input_size]."""
    if spec.layer_input_size is None:
        return np.empty((len(token_ids), 0, 0), np.float32)
    shape = (len(token_ids), spec.num_layers, spec.layer_input_size)
    found = weights.embed(token_ids, LAYER_INPUTS).reshape(shape)
    product = weights.linear(f"{LAYER_INPUTS}.product", embedded).reshape(shape)
    return found + _rms_norm(product, weights.vector(f"{LAYER_INPUTS}.norm"), spec.inner_eps)


def _end(spec: ArchSpec, layer: int, weights: WeightSource, hidden: Array, told: Array) -> Array:
    """The stream behind a layer: what it was told goes in, and it may be scaled."""
    role = f"layers.{layer}."
    if spec.layer_input_size is not None:
        gate = ACTIVATIONS[spec.hidden_act](weights.linear(role + "input_gate", hidden))
        added = weights.linear(role + "input_out", gate * told[:, layer])
        hidden = hidden + _output(spec, weights, role + "input_out", added)
    return hidden * weights.vector(role + "scale") if spec.layer_scales else hidden


def _read_states(
    spec: ArchSpec, weights: WeightSource, embedded: Array, states: tuple[Array, Array]
) -> tuple[Array, Array]:
    """What a head's first layer reads, [num_tokens, 2 * hidden], and the stream it adds to."""
    draft, (features, own) = spec.draft, states
    assert draft is not None
    epsilon = spec.rms_norm_eps
    if draft.joint_norm:
        features = _rms_norm(features, weights.vector("joint_norm"), epsilon)
    if draft.apart_norm:
        parts = np.split(features, len(draft.target_layers), axis=-1)
        normed = [
            _rms_norm(part, weights.vector(f"apart_norm.{place}"), epsilon)
            for place, part in enumerate(parts)
        ]
        features = np.concatenate(normed, axis=-1)
    hidden = weights.linear("features", features) + own
    token = _rms_norm(embedded, weights.vector("layers.0.input_norm"), epsilon)
    state = _rms_norm(hidden, weights.vector("layers.0.hidden_norm"), epsilon)
    read = np.concatenate([token, state], axis=-1)
    return read, state if draft.norm_before_residual else hidden


def _read(spec: ArchSpec, weights: WeightSource, role: str, hidden: Array) -> Array:
    """What attention or the feed-forward layer reads; [num_tokens, hidden]."""
    if spec.raw_inputs:
        return hidden
    return _norm(spec, weights, role, hidden)


def _norm(spec: ArchSpec, weights: WeightSource, role: str, hidden: Array) -> Array:
    """The residual stream, normalized; [num_tokens, hidden]."""
    if spec.layer_norms:
        hidden = hidden - hidden.mean(-1, keepdims=True)
    normed = _rms_norm(hidden, weights.vector(role), spec.rms_norm_eps)
    return normed + weights.vector(f"{role}_bias") if spec.norm_biases else normed


def _feed_forward(
    spec: ArchSpec, layer: int, weights: WeightSource, x: Array, hidden: Array | None = None
) -> Array:
    """What the feed-forward layer adds; [num_tokens, hidden].

    It reads x, and experts apart from a shared layer the stream, `hidden`.
    """
    experts, prefix = spec.experts_of(layer), f"layers.{layer}."
    if experts is None:
        output = _dense(spec, prefix, weights, x)
    elif experts.apart:
        assert hidden is not None
        routed, read = (
            _norm(spec, weights, prefix + name, hidden) for name in ("router_norm", "experts_norm")
        )
        made = (
            ("shared_out_norm", _dense(spec, f"{prefix}shared.", weights, x)),
            ("experts_out_norm", _of_experts(spec, experts, prefix, weights, read, routed)),
        )
        normed = [
            _rms_norm(one, weights.vector(prefix + name), spec.inner_eps) for name, one in made
        ]
        output = normed[0] + normed[1]
    else:
        output = _of_experts(spec, experts, prefix, weights, x, x)
        if experts.shared_size is not None:
            shared = _dense(spec, f"{prefix}shared.", weights, x)
            if experts.shared_gated:
                shared *= sigmoid(weights.linear(f"{prefix}shared.gate", x))
            output = output + shared
    return _output(spec, weights, prefix + "down", output)


def _of_experts(
    spec: ArchSpec,
    experts: ExpertsSpec,
    prefix: str,
    weights: WeightSource,
    x: Array,
    routed: Array,
) -> Array:
    """What experts make of x, chosen by what the router reads; [num_tokens, hidden]."""
    logits = weights.linear(prefix + "router", routed)
    correction = weights.vector(prefix + "correction") if experts.corrected else None
    parts = _routing(experts, logits, correction)
    if spec.ungated:
        up = weights.linear(prefix + "experts.up", x).reshape(len(x), experts.count, experts.size)
        gated = ACTIVATIONS[spec.hidden_act](up)
    else:
        joined = weights.linear(prefix + "experts.gate_up", x)
        halves = joined.reshape(len(x), experts.count, 2, experts.size)
        gate, up = halves[:, :, 0], halves[:, :, 1]
        is_gelu = spec.hidden_act == "gelu_tanh"
        gated = ACTIVATIONS["gelu_tanh"](gate) * up if is_gelu else _gated(experts, gate, up)
    return weights.sum_of_experts(prefix + "experts.down", gated * parts[..., None], parts)


def _dense(spec: ArchSpec, prefix: str, weights: WeightSource, x: Array) -> Array:
    """One feed-forward layer, with a gate or without; [num_tokens, hidden]."""
    if spec.ungated:
        activated = _activated(spec, prefix, weights, weights.linear(prefix + "up", x))
        return weights.linear(prefix + "down", activated)
    gate, up = np.split(weights.linear(prefix + "gate_up", x), 2, axis=-1)
    return weights.linear(prefix + "down", ACTIVATIONS[spec.hidden_act](gate) * up)


def _activated(spec: ArchSpec, prefix: str, weights: WeightSource, x: Array) -> Array:
    """The activation of a feed-forward layer without a gate."""
    if spec.hidden_act == "xielu":
        return xielu(x, *(weights.vector(prefix + name) for name in XIELU))
    return ACTIVATIONS[spec.hidden_act](x)


def _gated(experts: ExpertsSpec, gate: Array, up: Array) -> Array:
    """What experts have between their products."""
    if experts.limit is not None:
        limit = np.float32(experts.limit)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    alpha, offset = np.float32(experts.alpha or 1), np.float32(experts.up_offset or 0)
    return silu(alpha * gate) / alpha * (up + offset)


def _routing(experts: ExpertsSpec, logits: Array, correction: Array | None) -> Array:
    """What each expert's output is multiplied with, 0 for most; [num_tokens, experts]."""
    if experts.sigmoid:
        scores = sigmoid(logits)
    else:
        exponentials = np.exp(logits - logits.max(-1, keepdims=True))
        scores = exponentials / exponentials.sum(-1, keepdims=True)
    ranked = logits if correction is None else scores + correction
    if experts.groups is not None:
        ranked = _in_best_groups(experts, scores if correction is None else ranked)
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : experts.per_token]
    parts: Array = np.zeros_like(scores)
    np.put_along_axis(parts, chosen, np.take_along_axis(scores, chosen, -1), -1)
    return parts / parts.sum(-1, keepdims=True) if experts.normalized else parts


def _in_best_groups(experts: ExpertsSpec, ranked: Array) -> Array:
    """The scores of experts whose groups are chosen, and -inf; [num_tokens, experts]."""
    assert experts.groups is not None
    assert experts.groups_per_token is not None
    assert experts.group_best is not None
    members = ranked.reshape(len(ranked), experts.groups, -1)
    totals = np.sort(members, axis=-1)[..., -experts.group_best :].sum(-1)
    chosen = np.argsort(-totals, axis=-1, kind="stable")[:, : experts.groups_per_token]
    found = np.full_like(members, -np.inf)
    own = chosen[..., None]
    np.put_along_axis(found, own, np.take_along_axis(members, own, 1), 1)
    return found.reshape(ranked.shape)


def _output(spec: ArchSpec, weights: WeightSource, role: str, output: Array) -> Array:
    """What attention or the feed-forward layer adds; [num_tokens, hidden]."""
    if not spec.output_norms:
        return output
    return _rms_norm(output, weights.vector(f"{role}_norm"), spec.inner_eps)


def _attend(
    spec: ArchSpec,
    layer: int,
    weights: WeightSource,
    x: Array,
    tables: tuple[Array, Array] | None,
    kept: dict[int, tuple[Array, Array]],
) -> Array:
    """Causal self-attention; [num_tokens, hidden] to [num_tokens, attended_size].

    `kept` are keys and values of the layers before, and takes those of this one.
    Without `tables` nothing rotates.
    """
    if spec.latent is not None:
        assert tables is not None
        heads = _of_latents(spec, spec.latent, layer, weights, x, tables)
    else:
        heads = _of_heads(spec, layer, weights, x, tables, kept)
    result = _mixed(spec, layer, weights, *heads)
    if spec.attention_gate:
        result *= sigmoid(weights.linear(f"layers.{layer}.attention_gate", x))
    return result


def _of_heads(
    spec: ArchSpec,
    layer: int,
    weights: WeightSource,
    x: Array,
    tables: tuple[Array, Array] | None,
    kept: dict[int, tuple[Array, Array]],
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of all query heads, [num_tokens, num_heads, head_size] each."""
    tokens, size = len(x), spec.heads_of(layer).head_size
    qkv = weights.linear(f"layers.{layer}.qkv", x)
    edges = np.cumsum(spec.qkv_parts(layer))[:-1]
    whole = np.split(qkv, edges, axis=-1)
    heads = [part.reshape(tokens, -1, size) for part in whole]
    if spec.qk_norm_last:
        assert tables is not None
        return _turned(spec, layer, weights, heads, tables)
    if len(heads) == 2:  # keys are values
        heads.append(heads[1])
    if spec.qk_norm:
        for at, name in enumerate(("q_norm", "k_norm")[: len(whole)]):
            normed = whole[at] if spec.whole_qk_norm else heads[at]
            weight = weights.vector(f"layers.{layer}.{name}")
            if spec.apart_qk_norm:
                normed = normed - normed.mean(-1, keepdims=True)
                weight = weight.reshape(-1, spec.head_size)
            normed = _rms_norm(normed, weight, spec.inner_eps)
            heads[at] = normed.reshape(heads[at].shape)
    if tables is not None:
        embedding = spec.rope_of(layer)
        heads[:2] = [_rotate(one, tables, embedding) for one in heads[:2]]
    if len(heads) == 1:
        return _of_each_query(spec, heads[0], *kept[spec.kv_source(layer)])
    q, k, v = heads
    if spec.value_norm:
        v = _rms_norm(v, np.ones(size, np.float32), spec.inner_eps)
    kept[layer] = k, v
    return _of_each_query(spec, q, k, v)


def _turned(
    spec: ArchSpec,
    layer: int,
    weights: WeightSource,
    heads: list[Array],
    tables: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """What `_of_heads` returns where RoPE is ahead of the norms."""
    q, k = (
        _rms_norm(
            _rotate(part, tables, spec.rope),
            weights.vector(f"layers.{layer}.{name}"),
            spec.inner_eps,
        )
        for part, name in zip(heads[:2], ("q_norm", "k_norm"), strict=True)
    )
    return _of_each_query(spec, q, k, heads[2])


def _of_each_query(spec: ArchSpec, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Keys and values for each query head, and these."""
    shared = spec.num_heads // k.shape[1]
    return q, np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)


def _of_latents(
    spec: ArchSpec,
    latent: LatentSpec,
    layer: int,
    weights: WeightSource,
    x: Array,
    tables: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """Likewise where keys and values are made of latents, which here they really are."""
    tokens, heads, role = len(x), spec.num_heads, f"layers.{layer}."
    width = latent.query_rank or heads * latent.query_size
    edges = [width, width + latent.kv_rank]
    queries, latents, turning = np.split(weights.linear(role + "qkv", x), edges, axis=-1)
    if latent.query_rank is not None:
        normed = _rms_norm(queries, weights.vector(role + "q_latent_norm"), spec.inner_eps)
        queries = weights.linear(role + "q_b", normed)
    latents = _rms_norm(latents, weights.vector(role + "latent_norm"), spec.inner_eps)
    keys, v = (
        weights.linear(role + name, latents).reshape(tokens, heads, -1) for name in ("k_up", "v_up")
    )
    embedding = spec.rope_of(layer)
    plain, turned = np.split(queries.reshape(tokens, heads, -1), [latent.nope_size], axis=-1)
    turned = _rotate(turned, tables, embedding)
    shared = np.repeat(_rotate(turning[:, None], tables, embedding), heads, axis=1)
    return np.concatenate([plain, turned], -1), np.concatenate([keys, shared], -1), v


def _mixed(
    spec: ArchSpec, layer: int, weights: WeightSource, q: Array, k: Array, v: Array
) -> Array:
    """Values by the softmax of what queries make of keys; [num_tokens, attended_size]."""
    tokens = len(q)
    scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(spec.scale)
    scores = _softcap(scores, spec.attention_softcap)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    window = spec.sliding_window[layer]
    visible = (distance >= 0) & (distance < (window or tokens))
    scores = np.where(visible, scores, -np.inf)
    if spec.attention_sinks:
        sinks = weights.vector(f"layers.{layer}.sinks")[:, None, None]
        scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:2], 1))], axis=-1)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    seen = scores[..., :tokens]
    result: Array = np.einsum("hqk,khd->qhd", seen, v).reshape(tokens, -1)
    return result


def _attend_linearly(spec: ArchSpec, layer: int, weights: WeightSource, x: Array) -> Array:
    """A layer of a gated delta net; [num_tokens, hidden] to [num_tokens, value_width]."""
    if isinstance(spec.linear, ShortConvSpec):
        return _convolved(spec.linear, layer, weights, x)
    assert isinstance(spec.linear, LinearAttentionSpec)
    linear, role = spec.linear, f"layers.{layer}.linear."
    qkv = weights.linear(role + "qkv", x)
    beta, decay = np.split(weights.linear(role + "ba", x), 2, axis=-1)
    kernel = weights.vector(role + "conv").reshape(linear.channels, linear.kernel)
    rate = -np.exp(weights.vector(role + "a_log"))
    decay = np.exp(rate * softplus(decay + weights.vector(role + "dt_bias")))
    result = delta_net(linear, silu(convolve(qkv, kernel)), sigmoid(beta), decay)
    result = _rms_norm(result, weights.vector(role + "norm"), spec.rms_norm_eps)
    gate = silu(weights.linear(role + "z", x))
    return result.reshape(gate.shape) * gate


def _convolved(conv: ShortConvSpec, layer: int, weights: WeightSource, x: Array) -> Array:
    """A layer that is a convolution; [num_tokens, hidden] to [num_tokens, channels]."""
    role = f"layers.{layer}.linear."
    before, behind, values = np.split(weights.linear(role + "in", x), 3, axis=-1)
    kernel = weights.vector(role + "conv").reshape(conv.channels, conv.kernel)
    result = convolve(before * values, kernel)
    if conv.bias:
        result += weights.vector(role + "conv_bias")
    return behind * result


def _of_space(spec: ArchSpec, layer: int, weights: WeightSource, x: Array) -> Array:
    """A layer of a state space; [num_tokens, hidden] to [num_tokens, value_width]."""
    assert isinstance(spec.linear, StateSpaceSpec)
    space, role = spec.linear, f"layers.{layer}.linear."
    kernel = weights.vector(role + "conv").reshape(space.channels, space.kernel)
    mixed = convolve(weights.linear(role + "mixed", x), kernel)
    if space.conv_bias:
        mixed = mixed + weights.vector(role + "conv_bias")
    edges = [space.value_width, space.value_width + space.group_width]
    values, given, taken = (
        part.reshape(len(x), count, -1)
        for part, count in zip(
            np.split(silu(mixed), edges, axis=-1),
            (space.heads, space.groups, space.groups),
            strict=True,
        )
    )
    steps = softplus(weights.linear(role + "dt", x) + weights.vector(role + "dt_bias"))
    decay = np.exp(-np.exp(weights.vector(role + "a_log")) * steps)
    result = state_space(space, values * steps[..., None], given, taken, decay)
    result = result + values * weights.vector(role + "skip")[:, None]
    gated = result.reshape(len(x), -1) * silu(weights.linear(role + "z", x))
    groups = gated.reshape(len(x), space.groups, -1)
    normed = _rms_norm(groups, np.float32(1), spec.inner_eps)
    return normed.reshape(gated.shape) * weights.vector(role + "norm")


def _softcap(x: Array, cap: float | None) -> Array:
    """`cap * tanh(x / cap)`, or x itself."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def _rotate(x: Array, tables: tuple[Array, Array], embedding: RopeSpec) -> Array:
    """RoPE on the leading channels of each head; x [num_tokens, heads, head_size]."""
    cos, sin = (table[:, None] for table in tables)  # one row for all heads
    half = embedding.rotary_dim // 2
    if embedding.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return rotated


def _rms_norm(x: Array, weight: Array | np.float32, epsilon: float) -> Array:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return normed
