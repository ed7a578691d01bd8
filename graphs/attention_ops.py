"""Nodes of attention: the operators of both graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.contract import MICROSOFT
from onnxport.graphs.ops import cast

# A head's channels, and those of them that rotate, are multiples of it where RoPE is part of ONNX
# Runtime's own attention (CheckRotaryCaches in group_query_attention_helper.h).
ROTARY_MULTIPLE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionAttributes:
    """What PagedAttention and GroupQueryAttention share; None leaves an attribute out."""

    num_heads: int
    kv_num_heads: int
    scale: float | None = None  # None: 1 / sqrt(head_size)
    softcap: float | None = None
    local_window_size: int | None = None  # tokens that a query sees, its own included
    # Of PagedAttention alone, and not in ONNX Runtime's schema: a window does not slide, but is the
    # chunk of so many tokens that the query's own is in.
    local_window_chunked: bool = False
    do_rotary: bool = True
    rotary_interleaved: bool = False
    # Of PagedAttention alone: attention of latents, of a cache of keys in front of whose rows so
    # many channels are the values; RoPE begins behind them.
    v_head_size: int | None = None

    def attributes(self) -> dict[str, int | float | str | None]:
        """The ONNX attributes."""
        return {
            "num_heads": self.num_heads,
            "kv_num_heads": self.kv_num_heads,
            "scale": self.scale,
            "softcap": self.softcap,
            "local_window_size": self.local_window_size,
            "local_window_chunked": int(self.local_window_chunked) or None,
            "do_rotary": int(self.do_rotary),
            "rotary_interleaved": int(self.rotary_interleaved),
            "v_head_size": self.v_head_size,
            "rotary_offset": self.v_head_size,
            "kv_cache_layout": None if self.v_head_size is None else "LATENT",
        }


def paged_attention(
    g: GraphBuilder,
    qkv: str | tuple[str, ...],
    caches: tuple[tuple[str, str], ...],
    *,
    cumulative_sequence_lengths: str,
    past_sequence_lengths: str,
    block_table: str,
    attention_metadata: str,
    attributes: AttentionAttributes,
    cos: str = "",
    sin: str = "",
    sinks: str = "",
    name: str = "attention",
) -> str:
    """The canonical `com.microsoft.PagedAttention`; returns the output [num_tokens, q_size].

    Args:
        g: The builder.
        qkv: Packed projections [num_tokens, q_size + 2 * kv_size], or three values: queries
            [num_tokens, q_size], keys and values [num_tokens, kv_size]. Of latents the first two.
        caches: Of keys, and of values but for latents: the graph input [num_blocks, block_size,
            kv_heads, head_size], and the graph output that it is updated as. Or the graph output of
            another layer and "", where that one has written the same keys and values.
        cumulative_sequence_lengths: int32 [batch + 1].
        past_sequence_lengths: int32 [batch].
        block_table: int32 [batch, max_num_blocks].
        attention_metadata: int32 [3], host.
        attributes: Heads, scale, window, RoPE.
        cos: [context_length, rotary_dim / 2], of qkv's dtype; omitted without RoPE.
        sin: Likewise.
        sinks: [num_heads], of qkv's dtype: a logit of each head that takes part of the softmax and
            has no value; or omitted.
        name: Node name.
    """
    pasts, presents = zip(*caches, strict=True)
    inputs = [*_filled(*((qkv,) if isinstance(qkv, str) else qkv), count=3)]
    inputs += [*_filled(*pasts, count=2), cumulative_sequence_lengths]
    inputs += [past_sequence_lengths, block_table, cos, sin]
    inputs += ["", sinks, "", "", "", "", attention_metadata]
    outputs = g.node(
        "PagedAttention",
        inputs,
        outputs=[".out", *filter(None, presents)],
        domain=MICROSOFT,
        name=name,
        **attributes.attributes(),
    )
    return outputs[0]


def group_query_attention(
    g: GraphBuilder,
    qkv: str | tuple[str, ...],
    key_cache: str,
    value_cache: str,
    presents: tuple[str, str],
    *,
    sequence_lengths_minus_one: str,
    total_sequence_length: str,
    attributes: AttentionAttributes,
    cos: str = "",
    sin: str = "",
    sinks: str = "",
    name: str = "attention",
) -> str:
    """`com.microsoft.GroupQueryAttention` on packed or separate QKV; returns [batch, seq, q_size].

    Args:
        g: The builder.
        qkv: Packed projections [batch, seq, q_size + 2 * kv_size], or queries, keys and values.
        key_cache: Graph input [batch, kv_heads, past, head_size].
        value_cache: Graph input of the same shape.
        presents: Names of the updated caches, which are graph outputs.
        sequence_lengths_minus_one: int32 [batch], total (past + new) lengths less one.
        total_sequence_length: int32 scalar, the longest total length.
        attributes: Heads, scale, window, RoPE.
        cos: [context_length, rotary_dim / 2], of qkv's dtype; omitted without RoPE.
        sin: Likewise.
        sinks: [num_heads], of qkv's dtype: a logit of each head that takes part of the softmax and
            has no value; or omitted.
        name: Node name.
    """
    inputs = [*_filled(*((qkv,) if isinstance(qkv, str) else qkv), count=3)]
    inputs += [key_cache, value_cache]
    inputs += [sequence_lengths_minus_one, total_sequence_length, cos, sin, "", "", sinks]
    outputs = g.node(
        "GroupQueryAttention",
        inputs,
        outputs=[".out", *presents],
        domain=MICROSOFT,
        name=name,
        **attributes.attributes(),
    )
    return outputs[0]


def _filled(*names: str, count: int) -> list[str]:
    """Names of inputs, with those that are omitted."""
    return [*names, *[""] * (count - len(names))]


def gqa_sequence_lengths(g: GraphBuilder, attention_mask: str) -> tuple[str, str]:
    """Derive GroupQueryAttention's length inputs from an attention mask.

    Args:
        g: The builder.
        attention_mask: int64 [batch, total_sequence_length] of zeros and ones.

    Returns:
        int32 [batch] of row sums less one, and the int32 scalar total_sequence_length.
    """
    axis = g.constant(np.array([1], np.int64), "axis")
    rows = g.node("ReduceSum", [attention_mask, axis], name="lengths", keepdims=0)
    less_one = g.node("Sub", [rows, g.constant(np.array(1, np.int64), "one")], name="lengths.less")
    shape = g.node("Shape", [attention_mask], name="mask.shape")
    total = g.node("Gather", [shape, g.constant(np.array(1, np.int64), "one")], name="total")
    return cast(g, less_one, TensorProto.INT32), cast(g, total, TensorProto.INT32)
