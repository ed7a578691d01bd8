"""Several streams in NumPy, float32: part of `exporter.reference`. See `exporter.altup`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.plan_altup import EPSILON, MERGE, START
from onnxport.exporter.reference_attention import attend
from onnxport.exporter.reference_experts import feed_forward
from onnxport.exporter.reference_parts import (
    Array,
    WeightSource,
    norm,
    normed_output,
    of_told,
    rms_norm,
)
from onnxport.graphs.altup_spec import AltUpSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec

Tables = Mapping[RopeSpec, tuple[Array, Array]]


def altup_forward(
    spec: ArchSpec,
    altup: AltUpSpec,
    weights: WeightSource,
    read: tuple[Array, Array, Tables],
    logits_indices: NDArray[np.int32],
) -> tuple[Array, Array]:
    """The last hidden states, [num_logits, hidden]: normalized and as they are.

    `read` are the embedding, [num_tokens, hidden], what layers are told, [num_tokens, num_layers,
    layer_input_size], and the RoPE tables.
    """
    embedded, told, tables = read
    streams = _begun(spec, altup, weights, embedded)
    kept: dict[int, tuple[Array, Array]] = {}
    for layer in range(spec.num_layers):
        role = f"layers.{layer}."
        router = _router(spec, role, weights)
        streams = _foretold(spec, altup, role, weights, router, streams)
        active = streams[:, altup.active]
        x = norm(spec, weights, role + "input_norm", active)
        attended = attend(spec, layer, weights, x, tables[spec.rope_of(layer)], kept)
        if layer == spec.num_layers - 1:  # what follows mixes no positions
            streams, active, x = (one[logits_indices] for one in (streams, active, x))
            attended, told = attended[logits_indices], told[logits_indices]
        projected = weights.linear(role + "o", attended)
        added = normed_output(spec, weights, layer, "o", projected)
        hidden = _augmented(spec, role, weights, active + added, x)
        made = hidden + feed_forward(
            spec, layer, weights, norm(spec, weights, role + "post_norm", hidden)
        )
        parts = weights.linear(role + "altup.correct", _modes(spec, router, made)) + 1
        streams = streams + parts[..., None] * (made - active)[:, None]
        chooser = streams[:, altup.active]
        if altup.scaled:
            chooser = chooser * weights.vector(role + "altup.scale")
        streams[:, 1:] += of_told(spec, layer, weights, chooser, told[:, layer])[:, None]
    hidden = _merged(spec, weights, streams)
    return norm(spec, weights, "final_norm", hidden), hidden


def _begun(spec: ArchSpec, altup: AltUpSpec, weights: WeightSource, embedded: Array) -> Array:
    """All streams, [num_tokens, streams, hidden]."""
    further = weights.linear(START, embedded)
    further = further.reshape(len(embedded), altup.streams - 1, -1)
    sized = _sized(spec, further, _size(embedded)[:, None])
    return np.concatenate([embedded[:, None], sized], axis=1)


def _merged(spec: ArchSpec, weights: WeightSource, streams: Array) -> Array:
    first = streams[:, 0]
    size, total = _size(first), first
    for at in range(1, streams.shape[1]):
        product = weights.linear(MERGE.format(at - 1), streams[:, at])
        total = total + _sized(spec, product, size)
    return total / np.float32(streams.shape[1])


def _router(spec: ArchSpec, role: str, weights: WeightSource) -> tuple[Array, Array]:
    """The weight of a norm and a matrix [hidden, streams], which a layer has two uses for."""
    whole = np.eye(spec.hidden_size, dtype=np.float32)
    return weights.vector(role + "altup.norm"), weights.linear(role + "altup.router", whole)


def _foretold(
    spec: ArchSpec,
    altup: AltUpSpec,
    role: str,
    weights: WeightSource,
    router: tuple[Array, Array],
    streams: Array,
) -> Array:
    modes = _modes(spec, router, streams[:, altup.active])
    parts = weights.linear(role + "altup.predict", modes)
    parts = parts.reshape(len(streams), altup.streams, altup.streams)
    foretold: Array = np.matmul(parts, streams) + streams
    return foretold


def _augmented(
    spec: ArchSpec, role: str, weights: WeightSource, attended: Array, x: Array
) -> Array:
    """The stream behind attention, with what LAuReL makes of what that read."""
    product = weights.linear(role + "laurel.right", weights.linear(role + "laurel.left", x))
    normed = rms_norm(product, weights.vector(role + "laurel.norm"), spec.inner_eps)
    laurel = x * np.float32(spec.residual_scale or 1) + normed
    return (attended + laurel) * np.float32(math.sqrt(0.5))


def _modes(spec: ArchSpec, router: tuple[Array, Array], x: Array) -> Array:
    """What coefficients are made of: a number for each stream, from -1 to 1."""
    weight, matrix = router
    product = rms_norm(x, weight, spec.rms_norm_eps) @ matrix
    modes: Array = np.tanh(product / np.float32(spec.hidden_size))
    return modes


def _size(x: Array) -> Array:
    """The root of the mean square of each row."""
    size: Array = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))
    return size


def _sized(spec: ArchSpec, x: Array, size: Array) -> Array:
    """What has that size in place of its own."""
    return rms_norm(x, np.float32(1), EPSILON / spec.hidden_size) * size
