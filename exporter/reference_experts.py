"""Feed-forward layers and experts in NumPy, float32: part of `exporter.reference`."""

from __future__ import annotations

import numpy as np

from onnxport.exporter.activations import ACTIVATIONS, sigmoid, silu, xielu
from onnxport.exporter.plan_experts import XIELU
from onnxport.exporter.reference_parts import Array, WeightSource, norm, normed_output, rms_norm
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec


def feed_forward(
    spec: ArchSpec, layer: int, weights: WeightSource, x: Array, hidden: Array | None = None
) -> Array:
    """What the feed-forward layer adds; [num_tokens, hidden].

    It reads x, and experts apart from a shared layer the stream, `hidden`.
    """
    experts, prefix = spec.experts_of(layer), f"layers.{layer}."
    if experts is None:
        output = _dense(spec, prefix, weights, x, spec.gate_cutoff(layer))
    elif experts.apart:
        assert hidden is not None
        routed, read = (
            norm(spec, weights, prefix + name, hidden) for name in ("router_norm", "experts_norm")
        )
        made = (
            ("shared_out_norm", _dense(spec, f"{prefix}shared.", weights, x)),
            ("experts_out_norm", _of_experts(spec, experts, prefix, weights, read, routed)),
        )
        normed = [
            rms_norm(one, weights.vector(prefix + name), spec.inner_eps) for name, one in made
        ]
        output = normed[0] + normed[1]
    else:
        output = _of_experts(spec, experts, prefix, weights, x, x)
        if experts.shared_size is not None:
            shared = _dense(spec, f"{prefix}shared.", weights, x)
            if experts.shared_gated:
                shared *= sigmoid(weights.linear(f"{prefix}shared.gate", x))
            output = output + shared
        if experts.sum_normed:
            output = rms_norm(output, weights.vector(prefix + "sum_norm"), spec.rms_norm_eps)
    return normed_output(spec, weights, layer, "down", output)


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
    if experts.scaled_inputs:
        x = x * sigmoid(logits.max(-1, keepdims=True))
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


def _dense(
    spec: ArchSpec, prefix: str, weights: WeightSource, x: Array, cutoff: float | None = None
) -> Array:
    """One feed-forward layer, with a gate or without; [num_tokens, hidden]."""
    if spec.ungated:
        activated = _activated(spec, prefix, weights, weights.linear(prefix + "up", x))
        return weights.linear(prefix + "down", activated)
    gate, up = np.split(weights.linear(prefix + "gate_up", x), 2, axis=-1)
    if cutoff is not None:
        least = gate.mean(-1, keepdims=True) + gate.std(-1, keepdims=True) * np.float32(cutoff)
        gate = np.maximum(gate - least, 0)
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
    if experts.jitter is not None:
        return mixed_sparsely(experts.jitter, logits)
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


def mixed_sparsely(jitter: float, logits: Array) -> Array:
    """SparseMixer's weights, of two experts a token; [num_tokens, experts]."""
    parts: Array = np.zeros_like(logits)
    rest, rows = logits.copy(), np.arange(len(logits))
    for _ in range(2):
        index = rest.argmax(-1)
        value = rest[rows, index][:, None]
        size = np.maximum(np.maximum(np.abs(logits), value), np.finfo(np.float32).tiny)
        near = np.where((value - rest) / size > 2 * jitter, 0, np.exp(rest - value))
        parts[rows, index] = 1 / near.sum(-1)
        rest[rows, index] = -np.inf
    return parts


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
