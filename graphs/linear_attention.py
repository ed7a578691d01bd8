"""The operators of layers that keep a state of each sequence, in slots of a pool.

`com.microsoft.VarlenCausalConvWithState` and `com.microsoft.GatedDeltaNet` take the states of a
batch's rows and return those behind their last tokens. What a step reads is gathered from a pool
before, and what it writes is scattered to other slots behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from onnxport.graphs import contract, ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_nodes import CHANNEL_DECAY


@dataclass(frozen=True, slots=True)
class StatePool:
    """A graph input with the states of all slots, [num_states, …], and the output it becomes."""

    past: str
    present: str
    name: str  # of the operator, which names of nodes begin with

    def read(self, g: GraphBuilder) -> str:
        """The states that the rows of a batch begin with, [batch, …]."""
        return g.node("Gather", [self.past, contract.STATE_READS], name=f"{self.name}.read", axis=0)

    def write(self, g: GraphBuilder, states: str) -> None:
        """Put what the rows leave, [batch, …], into their slots; others stay as they are."""
        numbers = ops.cast(g, contract.STATE_WRITES, TensorProto.INT64, f"{self.name}.slots")
        slots = g.node("Unsqueeze", [numbers, ops.last_axis(g)], name=f"{self.name}.column")
        written = [self.past, slots, states]
        g.node("ScatterND", written, outputs=[self.present], name=f"{self.name}.write")


def causal_convolution(
    g: GraphBuilder,
    x: str,
    weight: str,
    pool: StatePool,
    bias: str = "",
    *,
    activation: str = "silu",
) -> str:
    """A convolution of each channel for itself, over a token and those before it.

    Args:
        g: The builder.
        x: [num_tokens, channels].
        weight: [channels, 1, kernel], the token's own last.
        pool: [num_states, channels, kernel - 1], of x's type: inputs, the latest last.
        bias: [channels]; "": none.
        activation: Of what it gives: "silu" or "none".

    Returns:
        [num_tokens, channels].
    """
    output, states = g.node(
        "VarlenCausalConvWithState",
        [x, weight, contract.CUMULATIVE_SEQUENCE_LENGTHS, bias, pool.read(g)],
        outputs=[".out", ".state"],
        domain=contract.MICROSOFT,
        name=pool.name,
        activation=activation,
    )
    pool.write(g, states)
    return output


def gated_delta_net(
    g: GraphBuilder,
    qkv: str,
    decay: str,
    beta: str,
    pool: StatePool,
    *,
    a_log: str,
    dt_bias: str,
    has_sigmoid: bool = True,
    by_channel: bool = False,
) -> str:
    """Queries of a state that each token changes (arXiv:2412.06464).

    Queries and keys are normalized by the operator, queries are scaled with 1 / sqrt(key_size), and
    a state is multiplied with exp(-exp(a_log) * softplus(decay + dt_bias)).

    Args:
        g: The builder.
        qkv: Queries, keys and values, [num_tokens, channels].
        decay: float32 [num_tokens, value_heads], or with `by_channel` [num_tokens, value_heads *
            key_size].
        beta: float32 [num_tokens, value_heads]; its sigmoid, or it itself, is how much of a value
            is new.
        pool: float32 [num_states, value_heads, value_size, key_size].
        a_log: float32 [value_heads].
        dt_bias: float32, as many as `decay` has of a token.
        has_sigmoid: Whether the operator takes beta's sigmoid.
        by_channel: Each channel of a key has a decay, which its column of a state is multiplied
            with (Kimi Delta Attention, arXiv:2510.26692).

    Returns:
        [num_tokens, value_heads, value_size].
    """
    lengths = contract.CUMULATIVE_SEQUENCE_LENGTHS
    output, states = g.node(
        "GatedDeltaNet",
        [qkv, "", "", lengths, decay, beta, pool.read(g), a_log, dt_bias],
        outputs=[".out", ".state"],
        domain=contract.MICROSOFT,
        name=pool.name,
        update_rule="gated_delta",
        gate_activation="qwen",
        beta_activation="sigmoid" if has_sigmoid else "none",
        qk_l2_norm=1,
        **{CHANNEL_DECAY: 1 if by_channel else None},
    )
    pool.write(g, states)
    return output


def state_space(
    g: GraphBuilder,
    taken: str,
    given: str,
    value: str,
    decay: str,
    pool: StatePool,
    *,
    a_log: str,
    dt_bias: str,
) -> str:
    """What is taken of a state that each token adds to (Mamba-2, arXiv:2405.21060).

    A head's state is multiplied with exp(-exp(a_log) * softplus(decay + dt_bias)), then a token's
    values times what its group gives are added, and then it is multiplied with what the group
    takes.

    Args:
        g: The builder.
        taken: The group's C, [num_tokens, groups, state_size].
        given: The group's B, likewise.
        value: What is added, [num_tokens, heads, head_size].
        decay: float32 [num_tokens, heads].
        pool: float32 [num_states, heads, head_size, state_size].
        a_log: float32 [heads].
        dt_bias: Likewise.

    Returns:
        [num_tokens, heads, head_size].
    """
    lengths = contract.CUMULATIVE_SEQUENCE_LENGTHS
    output, states = g.node(
        "GatedDeltaNet",
        [taken, given, value, lengths, decay, "", pool.read(g), a_log, dt_bias],
        outputs=[".out", ".state"],
        domain=contract.MICROSOFT,
        name=pool.name,
        update_rule="gated",
        gate_activation="qwen",
        scale=1.0,
    )
    pool.write(g, states)
    return output
