"""Attention of heads in both graphs: their projection, norms and rotation ahead of the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import helper

from onnxport.exporter.graph_parts import activation_dtype
from onnxport.exporter.latent_graph import attend_latents
from onnxport.exporter.rotation import Positions, Rotation
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import numpy_dtype

Attend = Callable[[int, "str | tuple[str, ...]"], str]  # (layer, qkv) -> attended


@dataclass(frozen=True, slots=True)
class Heads:
    """What makes queries, keys and values of one graph."""

    g: GraphBuilder
    spec: ArchSpec
    weights: StoredWeights
    leading: tuple[int, ...]  # reshape dimensions before the last: (0,) or (0, 0)
    linear: Callable[[str, str], str]  # (role, x) -> their product
    attend: Attend
    positions: Positions  # what is made of them beside attention
    kept: dict[int, tuple[str, str]]  # layers' own keys and values; takes those of this one

    def attended(self, layer: int, x: str) -> str:
        """Packed projection and attention; with QK-norm the heads are normalized between."""
        g, spec = self.g, self.spec
        if spec.latent is not None:
            return attend_latents(g, spec, self.weights, layer, x, self.linear, self._attend)
        qkv = self.linear(f"layers.{layer}.qkv", x)
        if spec.qkv_bound is not None:
            kind = numpy_dtype(activation_dtype(self.weights))
            edges = (np.array(edge, kind) for edge in (-spec.qkv_bound, spec.qkv_bound))
            qkv = g.node(
                "Clip", [qkv, *(g.constant(edge, "bound") for edge in edges)], name="bound"
            )
        if not spec.norms_heads(layer) and spec.value_size is None:
            if not spec.grows(layer):
                return self.attend(layer, qkv)
            return self._attend(layer, self._apart(layer, qkv))
        if self.positions.rotation is not None:
            return self._attend(layer, self._rotated(layer, qkv, self.positions.rotation))
        parts = spec.qkv_parts(layer)
        if len(parts) == 1:
            q = self._head_norm(qkv, layer, "q_norm", parts[0])
            return self._attend(layer, (q, *self.kept[spec.kv_source(layer)]))
        q, k, *own = self._apart(layer, qkv)
        v = own[0] if own else k
        if spec.norms_heads(layer):
            q = self._head_norm(q, layer, "q_norm", parts[0])
            k = self._head_norm(k, layer, "k_norm", parts[1])
        if spec.value_norm:
            v = self._head_norm(v, layer, "", parts[1])
        if spec.value_size is not None:
            return self._narrow(layer, spec.value_size, q, k, v)
        self.kept[layer] = k, v
        return self._attend(layer, (q, k, v))

    def _attend(self, layer: int, parts: tuple[str, ...]) -> str:
        """Attention of queries, which may grow with their positions, keys and values."""
        if self.spec.grows(layer):
            grown = self.g.node("Mul", [parts[0], self.positions.growth], name="q.grown")
            parts = (grown, *parts[1:])
        return self.attend(layer, parts)

    def _apart(self, layer: int, qkv: str) -> tuple[str, ...]:
        """The packed projection's parts."""
        parts = self.spec.qkv_parts(layer)
        sizes = self.g.constant(np.array(parts, np.int64), "sizes")
        split = self.g.node("Split", [qkv, sizes], outputs=len(parts), name="split", axis=-1)
        return tuple(split)

    def _narrow(self, layer: int, size: int, q: str, k: str, v: str) -> str:
        """Attention where values have fewer channels than keys, `size` of them.

        Operators and caches have one size for both: values are filled up with zeros, and what is
        found of these is left out.
        """
        g, heads = self.g, self.spec.heads_of(layer)
        wide, kind = heads.head_size, numpy_dtype(activation_dtype(self.weights))
        first, end, axis, room = (
            g.constant(np.array(numbers, np.int64), "narrow")
            for numbers in ([0], [size], [-1], [0, wide - size])
        )
        nothing = g.constant(np.array(0, kind), "nothing")
        values = ops.reshape(g, v, (*self.leading, -1, size), "v.heads")
        values = g.node("Pad", [values, room, nothing, axis], name="v.wide")
        v = ops.reshape(g, values, (*self.leading, heads.num_kv_heads * wide), "v.join")
        found = self._attend(layer, (q, k, v))
        found = ops.reshape(g, found, (*self.leading, -1, wide), "attended.heads")
        found = g.node("Slice", [found, first, end, axis], name="attended.narrow")
        width = self.spec.attended_width(layer)
        return ops.reshape(g, found, (*self.leading, width), "attended.join")

    def _rotated(self, layer: int, qkv: str, rotation: Rotation) -> tuple[str, str, str]:
        """Queries and keys rotated and then normalized, head by head, and values."""
        g, spec = self.g, self.spec
        sizes = g.constant(np.array([spec.q_size + spec.kv_size, spec.kv_size], np.int64), "sizes")
        both, v = g.node("Split", [qkv, sizes], outputs=2, name="split", axis=-1)
        heads = ops.reshape(g, both, (*self.leading, -1, spec.head_size), "heads")
        counts = g.constant(np.array([spec.num_heads, spec.num_kv_heads], np.int64), "counts")
        turned = rotation.apply(g, heads)
        parts = g.node("Split", [turned, counts], outputs=2, name="split.heads", axis=-2)
        q, k = (
            self._head_norm(part, layer, name, size)
            for part, name, size in zip(
                parts, ("q_norm", "k_norm"), (spec.q_size, spec.kv_size), strict=True
            )
        )
        return q, k, v

    def _head_norm(self, x: str, layer: int, name: str, size: int) -> str:
        """A norm over each head of x [..., size], or over all of it.

        Of values, which have no name, it is without weights.
        """
        g, channels, role = self.g, self.spec.heads_of(layer).head_size, f"layers.{layer}.{name}"
        if self.spec.apart_qk_norm:
            return self._apart_norm(x, role, size)
        if name and not self.spec.unweighted_qk_norm:
            weight = g.weight(self.weights.vectors[role])
        else:
            ones = np.ones(channels, numpy_dtype(activation_dtype(self.weights)))
            weight, name = g.constant(ones, "ones"), name or "v_norm"
        if self.spec.whole_qk_norm:
            return ops.rms_norm(g, x, weight, self.spec.inner_eps, name)
        heads = ops.reshape(g, x, (*self.leading, -1, channels), f"{name}.heads")
        normed = ops.rms_norm(g, heads, weight, self.spec.inner_eps, name)
        return ops.reshape(g, normed, (*self.leading, size), f"{name}.join")

    def _apart_norm(self, x: str, role: str, size: int) -> str:
        """LayerNorm over each head of x [..., size], each with a weight of its own."""
        g, name, head = self.g, role.rpartition(".")[2], self.spec.head_size
        stored = self.weights.vectors[role]
        kind = helper.tensor_dtype_to_np_dtype(stored.data_type)
        heads = ops.reshape(g, x, (*self.leading, -1, head), f"{name}.heads")
        ones = g.constant(np.ones(head, kind), "ones")
        normed = ops.layer_norm(g, heads, ones, self.spec.inner_eps, name)
        weight = g.weight(stored.view(stored.name, (size // head, head)))
        scaled = g.node("Mul", [normed, weight], name=f"{name}.scaled")
        return ops.reshape(g, scaled, (*self.leading, size), f"{name}.join")
