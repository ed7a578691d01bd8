"""Experts of a feed-forward layer, and the choice among them, as ONNX Runtime's operators take it.

`com.microsoft.MoE` and `QMoE` choose by logits and weigh by their softmax. Where a model chooses
or weighs otherwise, standard operators ahead of them make logits that come to the same: those of
the experts that a token is given to stay, or are logarithms of their scores where these are no
softmax, for the softmax of logarithms is the scores over their sum; and all others are far below.
So every kernel and every pass knows one kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto

from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.contract import MICROSOFT
from onnxport.graphs.inspect import attribute_float, attribute_int, attribute_text
from onnxport.graphs.whole_vectors import in_whole_vectors

GELU: Final = "gelu"  # activation_type
RELU2: Final = "relu2"  # likewise, of experts without a gate
FP4: Final = "fp4"  # QMoE's quant_type where it is given; without, quantized to integers
GLOBAL_SCALES: Final = (15, 16)  # QMoE's inputs with a number for each expert, of MXFP4 alone
# Offsets of gate_up's blocks and of down's, in floats. QMoE's schema has zero points in their
# places, in integers, so ONNX Runtime refuses a graph that has them, and does not compute without.
OFFSETS: Final = (11, 12)
DOWN_BITS: Final = "fc2_expert_weight_bits"  # an attribute, where they are not `expert_weight_bits`

LEFT_OUT: Final = -65504.0  # the logit of an expert that is not chosen; the lowest float16
_LEAST_SCORE: Final = 1e-30  # whose logarithm, -69, is far above that


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Value names of the weights of all experts, and how they are quantized.

    Of each expert `gate_up` has twice as many rows as it has features between its products: gate's
    and up's take turns, and so they do in its bias. Without a gate it is up. Quantized weights are
    uint8 [experts, rows, columns * bits / 8] in the format of `matmul_nbits`, with scales [experts,
    rows, columns / block_size], and may have offsets of that shape, as `ops.add_offsets` adds them.
    """

    count: int
    gate_up: str  # [experts, 2 * size, hidden], or [experts, size, hidden] without a gate
    down: str  # [experts, hidden, size]
    gate_up_scales: str = ""
    down_scales: str = ""
    gate_up_bias: str = ""  # [experts, its rows], of x's type; omitted where down's is
    down_bias: str = ""  # [experts, hidden]
    gate_up_offsets: str = ""  # of x's type; omitted where there are none
    down_offsets: str = ""
    bits: int | None = None  # 4 or 8; None: weights are of x's type, without scales
    down_bits: int | None = None  # of down; None: as many
    block_size: int | None = None  # what divides both numbers of columns
    is_fp4: bool = False  # numbers are E2M1, scales are exponents, E8M0: MXFP4, in blocks of 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Swiglu:
    """What an expert has between its products, see `graphs.experts_spec.ExpertsSpec`.

    `g * sigmoid(alpha * g) * (u + up_offset)` of `g = min(gate, limit)` and
    `u = min(max(up, -limit), limit)`; or, without these, `gelu_tanh(gate) * up`, or of up alone
    the square of its ReLU.
    """

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None  # None: there is none
    is_gelu: bool = False  # see `ops.gelu_tanh`
    is_relu2: bool = False  # there is no gate, see `ops.relu_squared`

    @property
    def parts(self) -> int:
        """Rows of the first product that make a feature."""
        return 1 if self.is_relu2 else 2

    def attributes(self) -> dict[str, Any]:
        """Those of `MoE` and `QMoE`, where gate and up take turns.

        ONNX Runtime's operators have no gated GELU, and refuse rows that do not fit one that is not
        gated; nor do they know a ReLU's square, which they refuse by its name. So a graph that has
        one of these needs our own, or `split_experts`.
        """
        if self.is_relu2:
            return {"activation_type": RELU2}
        if self.is_gelu:
            return {"activation_type": GELU, "swiglu_fusion": 1}
        return {
            "activation_type": "swiglu",
            "activation_alpha": self.alpha,
            "activation_beta": self.up_offset,
            "swiglu_limit": self.limit,
            "swiglu_fusion": 1,  # ONNX Runtime's CPU kernel has no other
        }

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Swiglu:
        """What a `MoE` or `QMoE` has."""
        limit = attribute_float(node, "swiglu_limit", math.inf)
        kind = attribute_text(node, "activation_type")
        if kind in (GELU, RELU2):
            return cls(is_gelu=kind == GELU, is_relu2=kind == RELU2)
        return cls(
            alpha=attribute_float(node, "activation_alpha", 1.0),
            up_offset=attribute_float(node, "activation_beta", 0.0),
            limit=None if math.isinf(limit) else limit,
        )


def bits_of(node: onnx.NodeProto) -> tuple[int, int]:
    """The bits of gate_up and of down that a `QMoE` has."""
    both = attribute_int(node, "expert_weight_bits", 4)
    return attribute_int(node, "fc1_expert_weight_bits", both), attribute_int(node, DOWN_BITS, both)


def offsets_of(node: onnx.NodeProto) -> tuple[str, str]:
    """The offsets of gate_up and of down that a `QMoE` has; empty names of what there is not."""
    first, second = (node.input[at] if at < len(node.input) else "" for at in OFFSETS)
    return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen and weighed, see `graphs.experts_spec.ExpertsSpec`."""

    per_token: int
    normalized: bool
    sigmoid: bool = False
    correction: str = ""  # float32 [experts], added to scores where they choose; or omitted
    groups: int | None = None  # None: there are none
    groups_per_token: int = 1
    group_best: int = 1
    jitter: float | None = None  # of SparseMixer; None: another softmax


_SILU: Final = Swiglu()


def expert_layer(
    g: GraphBuilder,
    x: str,
    logits: str,
    weights: ExpertWeights,
    routing: Routing,
    swiglu: Swiglu = _SILU,
    *,
    dtype: int = TensorProto.FLOAT,
    flatten: bool = False,
    accuracy_level: int | None = None,
    name: str = "experts",
) -> str:
    """`sum over chosen e of weight[e] * down[e](swiglu(gate[e](x), up[e](x)))`, or without a gate.

    Args:
        g: The builder.
        x: Activations [..., hidden].
        logits: The router's [..., experts], of x's type.
        weights: Of the experts.
        routing: Which are chosen, and their weights.
        swiglu: What is between an expert's products; as it is, `silu(gate) * up`.
        dtype: x's type.
        flatten: Whether there is more than one axis ahead of the last.
        accuracy_level: As of `matmul_nbits`.
        name: Node name.
    """
    is_plain = not routing.sigmoid and not routing.correction and routing.jitter is None
    if not is_plain or routing.groups is not None:
        axes = (0, 0) if flatten else (0,)
        chosen, total = _route(g, logits, routing, dtype, (*axes, weights.count))
    elif routing.normalized:
        chosen, total = logits, ""
    else:
        probabilities = g.node("Softmax", [logits], name="probabilities", axis=-1)
        largest, _ = g.node("TopK", [probabilities, _count(g, routing)], outputs=2, name="largest")
        chosen, total = logits, g.node("ReduceSum", [largest, ops.last_axis(g)], name="total")
    rows = ops.reshape(g, chosen, (-1, weights.count), f"{name}.rows") if flatten else chosen
    attributes = {"k": routing.per_token, "normalize_routing_weights": 1, **swiglu.attributes()}
    y = _operator(g, x, rows, weights, attributes, accuracy_level, name)
    # ONNX Runtime 1.31's CPU kernels go wrong where they are to leave the weights as they are.
    return y if routing.normalized else g.node("Mul", [y, total], name="weighted")


def _route(
    g: GraphBuilder, logits: str, routing: Routing, dtype: int, dims: tuple[int, ...]
) -> tuple[str, str]:
    """Logits that stand for the choice and the weights, and the sum of scores that were chosen.

    `dims` are those of the logits, as `ops.reshape` takes them.
    """
    wide = logits
    if dtype != TensorProto.FLOAT:
        wide = ops.cast(g, logits, TensorProto.FLOAT, "router.wide")
    if routing.jitter is not None:
        scores = wide
        index, found = mixed_sparsely(g, wide, routing.jitter)
    else:
        scores, index, found = _scored(g, wide, routing, dims)
    if routing.sigmoid or routing.jitter is not None:
        stand = _logarithms(g, found, routing.per_token)
    else:
        stand = g.node("GatherElements", [wide, index], name="kept", axis=-1)
    low = g.constant(np.array(LEFT_OUT, np.float32), "left_out")
    others = g.node("Min", [scores, low], name="others")  # no score is below
    made = g.node("ScatterElements", [others, index, stand], name="made", axis=-1)
    total = ""
    if not routing.normalized:
        total = g.node("ReduceSum", [found, ops.last_axis(g)], name="total")
    if dtype == TensorProto.FLOAT:
        return made, total
    return (
        ops.cast(g, made, dtype, "router.narrow"),
        ops.cast(g, total, dtype, "total.narrow") if total else "",
    )


def _scored(
    g: GraphBuilder, wide: str, routing: Routing, dims: tuple[int, ...]
) -> tuple[str, str, str]:
    """Scores of all experts, which are chosen, and the scores of these."""
    if routing.sigmoid:
        scores = g.node("Sigmoid", [wide], name="scores")
    else:
        scores = g.node("Softmax", [wide], name="scores", axis=-1)
    ranked = scores
    if routing.correction:
        ranked = g.node("Add", [scores, routing.correction], name="ranked")
    if routing.groups is not None:
        ranked = _in_best_groups(g, ranked, routing, routing.groups, dims)
    _, index = g.node("TopK", [ranked, _count(g, routing)], outputs=2, name="largest")
    return scores, index, g.node("GatherElements", [scores, index], name="chosen", axis=-1)


def mixed_sparsely(g: GraphBuilder, logits: str, jitter: float) -> tuple[str, str]:
    """The two experts with the largest logits, and the score of each: see `ExpertsSpec.jitter`."""
    two, one = (g.constant(np.array([count], np.int64), "count") for count in (2, 1))
    largest, index = g.node("TopK", [logits, two], outputs=2, name="largest")
    sizes = g.constant(np.array([1, 1], np.int64), "one_each")
    values = g.node("Split", [largest, sizes], outputs=2, name="largest.each", axis=-1)
    _, first = g.node("TopK", [logits, one], outputs=2, name="first")
    nothing = g.node("Sub", [values[0], values[0]], name="nothing")
    least = g.node("Add", [nothing, g.constant(np.array(LEFT_OUT, np.float32), "left_out")])
    rest = g.node("ScatterElements", [logits, first, least], name="rest", axis=-1)
    bound = g.constant(np.array(2 * jitter, np.float32), "bound")
    zero = g.constant(np.array(0.0, np.float32), "zero")
    size = g.node("Abs", [logits], name="size")
    found = []
    for value, among in zip(values, (logits, rest), strict=True):
        below = g.node("Sub", [value, among], name="below")
        part = g.node("Div", [below, g.node("Max", [size, value], name="of")], name="part")
        is_far = g.node("Greater", [part, bound], name="is_far")
        each = g.node("Exp", [g.node("Neg", [below], name="above")], name="each")
        near = g.node("Where", [is_far, zero, each], name="near")
        total = g.node("ReduceSum", [near, ops.last_axis(g)], name="near.total")
        found.append(g.node("Reciprocal", [total], name="score"))
    return index, g.node("Concat", found, name="chosen", axis=-1)


def _in_best_groups(
    g: GraphBuilder, ranked: str, routing: Routing, groups: int, dims: tuple[int, ...]
) -> str:
    """Scores as they are where experts are in groups that are chosen, and far below elsewhere."""
    *axes, count = dims
    members = ops.reshape(g, ranked, (*axes, groups, count // groups), "groups")
    best = g.constant(np.array([routing.group_best], np.int64), "group_best")
    values, _ = g.node("TopK", [members, best], outputs=2, name="best")
    totals = g.node("ReduceSum", [values, ops.last_axis(g)], name="group_scores", keepdims=0)
    chosen = g.constant(np.array([routing.groups_per_token], np.int64), "groups_per_token")
    largest, index = g.node("TopK", [totals, chosen], outputs=2, name="best_groups")
    low = g.constant(np.array(LEFT_OUT, np.float32), "left_out")
    others = g.node("Min", [totals, low], name="other_groups")
    nothing = g.node("Sub", [largest, largest], name="nothing")
    added = g.node("ScatterElements", [others, index, nothing], name="of_groups", axis=-1)
    added = g.node("Unsqueeze", [added, ops.last_axis(g)], name="of_members")
    return ops.reshape(g, g.node("Add", [members, added], name="in_groups"), dims, "members")


def _logarithms(g: GraphBuilder, scores: str, count: int) -> str:
    """Logarithms of scores [..., count], with the same bits wherever a row stands."""
    least = g.constant(np.array(_LEAST_SCORE, np.float32), "least_score")
    positive = g.node("Max", [scores, least], name="positive")
    return in_whole_vectors(g, "Log", positive, count, "logarithms")


def _operator(
    g: GraphBuilder,
    x: str,
    rows: str,
    weights: ExpertWeights,
    attributes: dict[str, Any],
    accuracy_level: int | None,
    name: str,
) -> str:
    """MoE or QMoE, which weighs experts so that their weights add up to 1."""
    first, second = [weights.gate_up], [weights.down]
    if weights.bits is not None:
        first.append(weights.gate_up_scales)
        second.append(weights.down_scales)
    inputs = [x, rows, *first, weights.gate_up_bias, *second, weights.down_bias]
    offsets = [weights.gate_up_offsets, weights.down_offsets]
    if any(offsets):
        inputs += [*[""] * (OFFSETS[0] - len(inputs)), *offsets]
    if weights.is_fp4:  # the operator wants a scale of all of an expert besides
        ones = g.constant(np.ones(weights.count, np.float32), "global_scale")
        inputs += [*[""] * (GLOBAL_SCALES[0] - len(inputs)), ones, ones]
    if weights.bits is None:
        return g.node("MoE", inputs, outputs=None, domain=MICROSOFT, name=name, **attributes)
    return g.node(
        "QMoE",
        inputs,
        outputs=None,
        domain=MICROSOFT,
        name=name,
        quant_type=FP4 if weights.is_fp4 else None,
        expert_weight_bits=weights.bits,
        **({} if weights.down_bits in (None, weights.bits) else {DOWN_BITS: weights.down_bits}),
        block_size=weights.block_size,
        weights_prepacked=0,
        accuracy_level=accuracy_level,
        **attributes,
    )


def _count(g: GraphBuilder, routing: Routing) -> str:
    return g.constant(np.array([routing.per_token], np.int64), "per_token")
