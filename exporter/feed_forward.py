"""Feed-forward layers in both graphs: with a gate or without, of experts, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from onnx import TensorProto

from onnxport.exporter.graph_parts import ACCURACY_LEVEL, activation_dtype
from onnxport.exporter.plan_experts import XIELU
from onnxport.exporter.weights import StoredMatrix, StoredWeights
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.experts import ExpertWeights, Routing, Swiglu, expert_layer
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import TensorRef

ACTIVATIONS: Final[Mapping[str, Callable[[GraphBuilder, str], str]]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": ops.gelu_tanh,
    "relu": ops.relu,
    "relu2": ops.relu_squared,
}


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The feed-forward layers of one graph."""

    g: GraphBuilder
    spec: ArchSpec
    weights: StoredWeights
    leading: tuple[int, ...]  # reshape dimensions before the last: (0,) or (0, 0)
    linear: Callable[[str, str], str]  # (role, x) -> their product
    norm: Callable[[str, str, str], tuple[str, str]]  # (hidden, "", role) -> (normed, hidden)

    def made(self, layer: int, x: str, hidden: str) -> str:
        """What the feed-forward layer makes, with a gate or without, or that of experts.

        It reads x, and experts apart from a shared layer the stream, `hidden`.
        """
        experts = self.spec.experts_of(layer)
        if experts is None:
            return self._dense(f"layers.{layer}", x, self.spec.gate_cutoff(layer))
        if experts.apart:
            return self._experts_apart(layer, experts, x, hidden)
        added = self._experts(layer, experts, x, x)
        if experts.shared_size is not None:
            added = self.g.node("Add", [added, self._shared(layer, experts, x)], name="added")
        if not experts.sum_normed:
            return added
        weight = self.g.weight(self.weights.vectors[f"layers.{layer}.sum_norm"])
        return ops.rms_norm(self.g, added, weight, self.spec.rms_norm_eps, "sum_norm")

    def _activate(self, role: str, x: str) -> str:
        """The activation of a feed-forward layer without a gate."""
        g, weights = self.g, self.weights
        if self.spec.hidden_act != "xielu":
            return ACTIVATIONS[self.spec.hidden_act](g, x)
        stored = (weights.vectors[f"{role}.{name}"] for name in XIELU)
        numbers = ops.Xielu(*(g.weight(one.view(one.name, ())) for one in stored))
        return ops.xielu(g, x, numbers, activation_dtype(weights))

    def _dense(self, role: str, x: str, cutoff: float | None = None) -> str:
        """One feed-forward layer, with a gate, which may be cut off, or without."""
        g = self.g
        if self.spec.ungated:
            up = self._activate(role, self.linear(f"{role}.up", x))
            return self.linear(f"{role}.down", up)
        gate_up = self.linear(f"{role}.gate_up", x)
        gate, up = g.node("Split", [gate_up], outputs=2, name="split", axis=-1, num_outputs=2)
        if cutoff is not None:
            gate = ops.above_deviations(g, gate, cutoff, activation_dtype(self.weights))
        gated = g.node("Mul", [ACTIVATIONS[self.spec.hidden_act](g, gate), up], name="gated")
        return self.linear(f"{role}.down", gated)

    def _shared(self, layer: int, experts: ExpertsSpec, x: str) -> str:
        """The feed-forward layer beside experts, which each token is given to."""
        g, role = self.g, f"layers.{layer}.shared"
        with g.scope("shared"):
            y = self._dense(role, x)
            if not experts.shared_gated:
                return y
            part = g.node("Sigmoid", [self.linear(f"{role}.gate", x)], name="part")
            return g.node("Mul", [y, part], name="weighted")

    def _experts_apart(self, layer: int, experts: ExpertsSpec, x: str, hidden: str) -> str:
        """What a shared layer makes of x, and experts of the stream, normalized and added."""
        g, role = self.g, f"layers.{layer}"
        routed, _ = self.norm(hidden, "", f"{role}.router_norm")
        read, _ = self.norm(hidden, "", f"{role}.experts_norm")
        parts = (
            ("shared_out_norm", self._shared(layer, experts, x)),
            ("experts_out_norm", self._experts(layer, experts, read, routed)),
        )
        normed = [
            ops.rms_norm(
                g, made, g.weight(self.weights.vectors[f"{role}.{name}"]), self.spec.inner_eps, name
            )
            for name, made in parts
        ]
        return g.node("Add", normed, name="added")

    def _experts(self, layer: int, experts: ExpertsSpec, x: str, routed: str) -> str:
        """The experts of x that a router chooses for each token by what it reads."""
        g, matrices = self.g, self.weights.matrices
        logits = self.linear(f"layers.{layer}.router", routed)
        if experts.scaled_inputs:
            x = self._scaled(x, logits)
        correction = ""
        if experts.corrected:
            correction = g.weight(self.weights.vectors[f"layers.{layer}.correction"])
        first_role = "up" if self.spec.ungated else "gate_up"
        gate_up = matrices[f"layers.{layer}.experts.{first_role}"]
        down = matrices[f"layers.{layer}.experts.down"]
        formats = [one.block for one in (gate_up, down) if one.block is not None]
        assert len({(one.block_size, one.is_fp4) for one in formats}) == len(formats[:1])
        assert len(formats) in (0, 2)
        first, second = (_of_experts(g, matrix, experts.count) for matrix in (gate_up, down))
        weights = ExpertWeights(
            count=experts.count,
            gate_up=first.weight,
            down=second.weight,
            gate_up_scales=first.scales,
            down_scales=second.scales,
            gate_up_bias=first.bias,
            down_bias=second.bias,
            gate_up_offsets=first.offsets,
            down_offsets=second.offsets,
            bits=gate_up.block.bits if gate_up.block else None,
            down_bits=down.block.bits if down.block else None,
            block_size=gate_up.block.block_size if gate_up.block else None,
            is_fp4=gate_up.block is not None and gate_up.block.is_fp4,
        )
        routing = Routing(
            per_token=experts.per_token,
            normalized=experts.normalized,
            sigmoid=bool(experts.sigmoid),
            correction=correction,
            groups=experts.groups,
            groups_per_token=experts.groups_per_token or 1,
            group_best=experts.group_best or 1,
            jitter=experts.jitter,
        )
        alpha, offset = experts.alpha or 1.0, experts.up_offset or 0.0
        return expert_layer(
            g,
            x,
            logits,
            weights,
            routing,
            Swiglu(
                alpha=alpha,
                up_offset=offset,
                limit=experts.limit,
                is_gelu=self.spec.has_gelu_experts,
                is_relu2=bool(self.spec.ungated),
            ),
            dtype=activation_dtype(self.weights),
            flatten=len(self.leading) > 1,
            accuracy_level=ACCURACY_LEVEL,
        )

    def _scaled(self, x: str, logits: str) -> str:
        """What the one expert of a token reads: x times the largest score."""
        g, dtype = self.g, activation_dtype(self.weights)
        is_wide = dtype == TensorProto.FLOAT
        wide = logits if is_wide else ops.cast(g, logits, TensorProto.FLOAT, "router.wide")
        # Of whole rows: a vector's last numbers may be rounded otherwise than others.
        scores = g.node("Sigmoid", [wide], name="scores")
        part = g.node("ReduceMax", [scores, ops.last_axis(g)], name="score")
        part = part if is_wide else ops.cast(g, part, dtype, "score.narrow")
        return g.node("Mul", [x, part], name="scaled")


class _OfExperts(NamedTuple):
    """Values of all experts; empty names of what there is not."""

    weight: str
    scales: str
    bias: str
    offsets: str


def _of_experts(g: GraphBuilder, matrix: StoredMatrix, count: int) -> _OfExperts:
    """What lies one below the other, one behind the other."""
    assert matrix.zero_points is None
    rows, block = matrix.rows // count, matrix.block
    columns = matrix.columns if block is None else matrix.columns * block.bits // 8
    blocks = 0 if block is None else block.num_blocks(matrix.columns)

    def apart(ref: TensorRef | None, *dims: int) -> str:
        return "" if ref is None else g.weight(ref.view(ref.name, (count, rows, *dims)))

    return _OfExperts(
        apart(matrix.weight, columns),
        apart(matrix.scales, blocks),
        apart(matrix.bias),
        apart(matrix.offsets, blocks),
    )
