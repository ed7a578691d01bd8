"""Read the operators of layers that keep states, refusing what is not understood."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.inspect import input_at

if TYPE_CHECKING:
    import onnx

CAUSAL_CONV: Final = "VarlenCausalConvWithState"
DELTA_NET: Final = "GatedDeltaNet"
# Our own attribute of a delta net: 1 where decay is [num_tokens, value_heads * key_size] and
# dt_bias [value_heads * key_size], as Kimi Delta Attention has them (arXiv:2510.26692).
CHANNEL_DECAY: Final = "channel_decay"
LENGTH_EPSILON: Final = 1e-6  # added to the sum of squares of a query or key, as transformers does


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalConvNode:
    """One com.microsoft.VarlenCausalConvWithState; inputs are names, "" where omitted."""

    name: str
    input: str  # [num_tokens, channels]
    weight: str  # [channels, 1, kernel]
    lengths: str
    bias: str
    state: str  # [batch, channels, kernel - 1]
    output: str
    final_state: str
    has_silu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetNode:
    """One com.microsoft.GatedDeltaNet; inputs are names, "" where omitted."""

    name: str
    query: str  # without a key and a value, all three of them
    key: str
    value: str
    lengths: str
    decay: str
    beta: str  # with the delta rule
    state: str  # [batch, value_heads, value_size, key_size]
    a_log: str
    dt_bias: str
    output: str
    final_state: str
    has_delta_rule: bool  # or a token's value is added to what is kept, whatever that knows of it
    scale: float | None  # None: 1 / sqrt(key_size)
    has_qwen_gate: bool  # the decay is made of a_log and dt_bias
    has_sigmoid: bool  # beta is one
    is_normalized: bool  # queries and keys are
    has_channels: (
        bool  # decay and dt_bias have a number for each channel of a key, not for each head
    )

    @property
    def is_packed(self) -> bool:
        """Whether the query input holds keys and values, too."""
        return not self.key


def is_linear_node(node: onnx.NodeProto) -> bool:
    """Whether it is one of the operators, of its own domain."""
    return bool(node.op_type in (CAUSAL_CONV, DELTA_NET) and node.domain == contract.MICROSOFT)


def read_linear_node(node: onnx.NodeProto) -> CausalConvNode | DeltaNetNode:
    """Read one of the operators. Raises ArtifactError for what is not understood."""
    return _read_conv(node) if node.op_type == CAUSAL_CONV else _read_delta(node)


def _read_conv(node: onnx.NodeProto) -> CausalConvNode:
    known = ("activation", "dilation", "state_update_capacity")
    found = _attributes(node, known, {"dilation": 1, "state_update_capacity": 0})
    activation = _text(node, found, "activation", ("none", "silu", "swish"))
    _require(node, (0, 1, 2, 4), at_most=5)
    return CausalConvNode(
        name=node.name,
        input=node.input[0],
        weight=node.input[1],
        lengths=node.input[2],
        bias=node.input[3],
        state=node.input[4],
        output=node.output[0],
        final_state=node.output[1],
        has_silu=activation != "none",
    )


def _read_delta(node: onnx.NodeProto) -> DeltaNetNode:
    activations = ("gate_activation", "beta_activation", "qk_l2_norm", CHANNEL_DECAY)
    known = (*activations, "update_rule", "scale", "chunk_size", "state_update_capacity")
    found = _attributes(node, known, {"state_update_capacity": 0})
    rule = _text(node, found, "update_rule", ("gated_delta", "gated"))
    gate = _text(node, found, "gate_activation", ("none", "qwen"))
    beta = _text(node, found, "beta_activation", ("none", "sigmoid"))
    required = (0, 3, 4, 5, 6) if rule == "gated_delta" else (0, 3, 4, 6)
    _require(node, required, at_most=9)
    if rule == "gated" and found.get(CHANNEL_DECAY, 0):
        raise ArtifactError(
            f"{DELTA_NET} {node.name!r} has update_rule 'gated' and {CHANNEL_DECAY}, which is "
            "understood with 'gated_delta' alone"
        )
    if rule == "gated" and input_at(node, 5):
        raise ArtifactError(
            f"{DELTA_NET} {node.name!r} has update_rule 'gated' and the beta {node.input[5]!r}; "
            "beta is understood with 'gated_delta' alone"
        )
    pairs = [(input_at(node, 1), input_at(node, 2)), (input_at(node, 7), input_at(node, 8))]
    if any(bool(one) != bool(other) for one, other in pairs) or bool(pairs[1][0]) != (
        gate == "qwen"
    ):
        raise ArtifactError(
            f"{DELTA_NET} {node.name!r} must have a key and a value or neither, and a_log and "
            f"dt_bias with the gate qwen alone; its inputs are {list(node.input)}"
        )
    return DeltaNetNode(
        name=node.name,
        query=node.input[0],
        key=pairs[0][0],
        value=pairs[0][1],
        lengths=node.input[3],
        decay=node.input[4],
        beta=node.input[5],
        state=node.input[6],
        a_log=pairs[1][0],
        dt_bias=pairs[1][1],
        output=node.output[0],
        final_state=node.output[1],
        has_delta_rule=rule == "gated_delta",
        scale=found.get("scale") or None,
        has_qwen_gate=gate == "qwen",
        has_sigmoid=beta == "sigmoid",
        is_normalized=bool(found.get("qk_l2_norm", 0)),
        has_channels=bool(found.get(CHANNEL_DECAY, 0)),
    )


def _attributes(
    node: onnx.NodeProto, known: Collection[str], fixed: dict[str, int | str]
) -> dict[str, Any]:
    """What a node's attributes say; those that are `fixed` must be what they are by default."""
    from onnx import helper

    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    given = {k: v.decode() if isinstance(v, bytes) else v for k, v in given.items()}
    if unknown := sorted(set(given) - set(known)):
        raise ArtifactError(
            f"{node.op_type} {node.name!r} has attributes that are not understood: {unknown}"
        )
    for name, wanted in fixed.items():
        if given.get(name, wanted) != wanted:
            raise ArtifactError(
                f"{node.op_type} {node.name!r} has {name} {given[name]!r}; {wanted!r} alone is "
                "understood"
            )
    return given


def _text(node: onnx.NodeProto, found: dict[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    value = found.get(name, allowed[0])
    if value not in allowed:
        raise ArtifactError(
            f"{node.op_type} {node.name!r} has {name} {value!r}; it must be one of {allowed}"
        )
    return str(value)


def _require(node: onnx.NodeProto, required: tuple[int, ...], *, at_most: int) -> None:
    """Check which inputs there are, and that there are two outputs."""
    missing = [place for place in required if not input_at(node, place)]
    outputs = [name for name in node.output if name]
    if missing or any(node.input[at_most:]) or len(node.output) != 2 or len(outputs) != 2:
        raise ArtifactError(
            f"{node.op_type} {node.name!r} has inputs {list(node.input)} and outputs "
            f"{list(node.output)}; inputs {list(required)} are needed, of at most {at_most}, and "
            "two outputs"
        )
