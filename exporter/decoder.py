"""What both graphs of a decoder share: `paged_graph`, and `gqa_graph` over one contiguous cache.

They share every node but attention and the shapes around it, and every weight. Activations are
[num_tokens, hidden] in the paged graph and [batch, seq, hidden] in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto

from onnxport.exporter.altup import altup_body
from onnxport.exporter.attention_gate import gated
from onnxport.exporter.draft_inputs import normed_features, token_and_state
from onnxport.exporter.feed_forward import FeedForward
from onnxport.exporter.graph_parts import (
    activation_dtype,
    product,
    tied_head,
)
from onnxport.exporter.heads import Attend, Heads
from onnxport.exporter.layer_inputs import ending, layer_inputs
from onnxport.exporter.linear_layer import (
    Mix,
    linear_attention,
)
from onnxport.exporter.plan import (
    EMBEDDING,
    EMBEDDING_NORM,
    FEATURES,
    FINAL_NORM,
    HEAD,
    TOKEN_OUT,
)
from onnxport.exporter.positions import stream
from onnxport.exporter.rotation import Positions
from onnxport.exporter.short_conv import (
    Convolve,
    short_convolution,
)
from onnxport.exporter.space_layer import (
    Scan,
    state_space_layer,
)
from onnxport.exporter.stream_norms import normed_stream
from onnxport.exporter.weights import StoredWeights
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.linear_spec import ShortConvSpec, StateSpaceSpec
from onnxport.graphs.spec import ArchSpec


@dataclass(frozen=True, slots=True)
class Decoder:
    """One graph under construction."""

    g: GraphBuilder
    spec: ArchSpec
    weights: StoredWeights
    leading: tuple[int, ...]  # reshape dimensions before the last: (0,) or (0, 0)
    attend: Attend
    mix: Mix  # of gated delta nets
    scan: Scan  # of state spaces
    convolve: Convolve  # of layers that are that
    positions: Positions  # what is made of them beside attention
    kept: dict[int, tuple[str, str]] = field(default_factory=dict)  # layers' own keys and values

    def body(self, select: Callable[[str], str] | None) -> tuple[str, str]:
        """Token ids to hidden states, normalized and as they are.

        `select` picks the rows that need logits. It is applied after the last attention, for what
        follows mixes no positions; None: all.
        """
        g, spec = self.g, self.spec
        if spec.altup is not None:
            return altup_body(self, spec.altup, select)
        hidden = stream(self)
        if spec.stream_norms:
            return normed_stream(self, hidden, select)
        if spec.embedding_norm:
            hidden, _ = self.norm(hidden, "", EMBEDDING_NORM)
        told = layer_inputs(self, hidden)
        delta = ""
        for layer in range(spec.num_layers):
            with g.scope(f"layers.{layer}"):
                if spec.draft is not None and layer == 0:
                    read, hidden = self.read_states(spec.draft, hidden)
                else:
                    read, hidden = self.read(hidden, delta, f"layers.{layer}.input_norm")
                mixed = self.mixed(layer, read)
                if layer == spec.num_layers - 1 and select is not None:
                    mixed = {role: select(one) for role, one in mixed.items()}
                    hidden = select(hidden)
                    if spec.parallel_layers and not spec.parallel_norms:
                        read = select(read)
                    if told:
                        told = (*told[:-1], select(told[-1]))
                delta = self.output(f"layers.{layer}.o", self.projected(mixed))
                if spec.parallel_layers:
                    if spec.parallel_norms:
                        read, hidden = self.read(hidden, "", f"layers.{layer}.post_norm")
                    delta = g.node("Add", [delta, self.mlp(layer, read)], name="both")
                    continue
                if not spec.has_mlp(layer):
                    continue
                read, hidden = self.read(hidden, delta, f"layers.{layer}.post_norm")
                delta = self.mlp(layer, read, hidden)
                if told or spec.layer_scales:
                    end = ending(self, layer, hidden, delta, told[layer] if told else "")
                    hidden, delta = end, ""
        return self.final_norm(hidden, delta)

    def embed(self, role: str = EMBEDDING, ids: str = names.INPUT_IDS) -> str:
        """Rows of the embedding table, or of another one."""
        g, matrix = self.g, self.weights.matrices[role]
        if matrix.block is None:
            return g.node("Gather", [g.weight(matrix.weight), ids], name="embed")
        assert matrix.scales is not None
        assert matrix.zero_points is None
        assert matrix.offsets is None
        padded = matrix.block.num_blocks(matrix.columns) * matrix.block.block_size
        dims = (matrix.rows, padded * matrix.block.bits // 8)
        rows = ops.gather_block_quantized(
            g,
            g.weight(matrix.weight.view(f"{role}.rows", dims)),
            ids,
            g.weight(matrix.scales),
            bits=matrix.block.bits,
            block_size=matrix.block.block_size,
            name="embed",
        )
        if padded == matrix.columns:
            return rows
        start, stop, axis = (
            g.constant(np.array([value], np.int64), "slice") for value in (0, matrix.columns, -1)
        )
        return g.node("Slice", [rows, start, stop, axis], name="embed.unpad")

    def read_states(self, draft: DraftSpec, embedded: str) -> tuple[str, str]:
        """What the first layer of a draft head reads, and the stream that it adds to."""
        dtype = activation_dtype(self.weights)
        features = normed_features(self.g, draft, self.weights, dtype, self.spec.rms_norm_eps)
        given = features if draft.is_mtp else self.linear(FEATURES, features)
        own = ops.cast(self.g, names.DRAFT_HIDDEN_STATES, dtype, "own.cast")
        hidden = self.g.node("Add", [given, own], name="states")
        if draft.is_mtp:
            both = token_and_state(self.g, self.weights, embedded, hidden, self.spec.rms_norm_eps)
            return self.read(self.linear(FEATURES, both), "", "layers.0.input_norm")
        token, _ = self.norm(embedded, "", "layers.0.input_norm")
        state, _ = self.norm(hidden, "", "layers.0.hidden_norm")
        read = self.g.node("Concat", [token, state], name="token_and_state", axis=-1)
        return read, state if draft.norm_before_residual else hidden

    def read(self, hidden: str, delta: str, role: str) -> tuple[str, str]:
        """Add `delta` if there is one; returns (what attention or MLP reads, hidden)."""
        if role in self.weights.vectors:
            return self.norm(hidden, delta, role)
        if delta:
            hidden = self.g.node("Add", [hidden, delta], name="residual")
        return hidden, hidden

    def norm(self, hidden: str, delta: str, role: str) -> tuple[str, str]:
        """Add `delta` if there is one, and normalize; returns (normed, hidden)."""
        weight = self.g.weight(self.weights.vectors[role])
        name = role.rpartition(".")[2]
        epsilon = self.spec.rms_norm_eps
        if self.spec.layer_norms:
            if delta:
                hidden = self.g.node("Add", [hidden, delta], name="residual")
            stored = self.weights.vectors.get(f"{role}_bias")
            bias = "" if stored is None else self.g.weight(stored)
            return ops.layer_norm(self.g, hidden, weight, epsilon, name, bias), hidden
        if not delta:
            return ops.rms_norm(self.g, hidden, weight, epsilon, name), hidden
        return ops.skip_rms_norm(self.g, hidden, delta, weight, epsilon, name)

    def final_norm(self, hidden: str, delta: str) -> tuple[str, str]:
        """What the head reads, and the stream; both are the stream where there is no final norm."""
        if not self.spec.no_final_norm:
            return self.norm(hidden, delta, FINAL_NORM)
        if delta:
            hidden = self.g.node("Add", [hidden, delta], name="residual")
        return self.g.node("Identity", [hidden], name=FINAL_NORM), hidden

    def mixed(self, layer: int, x: str) -> dict[str, str]:
        """Attention, a state, or both, by the role of what makes of it what the layer adds."""
        role, found = f"layers.{layer}.o", {}
        if self.spec.has_attention(layer):
            found[role] = self.attention(layer, x)
        if self.spec.is_linear(layer):
            role = f"layers.{layer}.linear.o" if self.spec.has_both else role
            found[role] = self.state(layer, x)
        return found

    def projected(self, mixed: dict[str, str]) -> str:
        """The sum of what is made of attention and of a state, where a layer has both."""
        first, *others = (self.linear(role, one) for role, one in mixed.items())
        for other in others:
            first = self.g.node("Add", [first, other], name="mixed")
        return first

    def state(self, layer: int, x: str) -> str:
        """What keeps a state of each sequence."""
        parts = (self.g, self.spec, self.weights, layer, x)
        if isinstance(self.spec.linear, StateSpaceSpec):
            return state_space_layer(*parts, self.linear, self.scan, self.leading)
        if isinstance(self.spec.linear, ShortConvSpec):
            return short_convolution(*parts, self.linear, self.convolve)
        return linear_attention(*parts, self.linear, self.mix, self.leading)

    def attention(self, layer: int, x: str) -> str:
        """Attention, times the sigmoid or softplus of a product where the model has that."""
        attended = Heads(
            self.g,
            self.spec,
            self.weights,
            self.leading,
            self.linear,
            self.attend,
            self.positions,
            self.kept,
        ).attended(layer, x)
        if not self.spec.attention_gate:
            return attended
        gate = self.linear(f"layers.{layer}.attention_gate", x)
        dtype = activation_dtype(self.weights)
        return gated(self.g, self.spec, layer, attended, gate, leading=self.leading, dtype=dtype)

    def mlp(self, layer: int, x: str, hidden: str = "") -> str:
        """What the feed-forward layer adds. It reads x, and some experts the stream."""
        layers = FeedForward(self.g, self.spec, self.weights, self.leading, self.linear, self.norm)
        return self.output(f"layers.{layer}.down", layers.made(layer, x, hidden))

    def output(self, role: str, projected: str) -> str:
        """What attention or the feed-forward layer adds: a projection, normalized or as it is."""
        norm = f"{role}_norm"
        if norm not in self.weights.vectors:
            return projected
        weight, epsilon = self.g.weight(self.weights.vectors[norm]), self.spec.inner_eps
        return ops.rms_norm(self.g, projected, weight, epsilon, norm.rpartition(".")[2])

    def linear(self, role: str, x: str) -> str:
        """`x @ matrix.T + bias`."""
        return product(self.g, self.weights, role, x, is_flat=len(self.leading) == 1)

    def logits(self, normed: str) -> None:
        """The output `logits`, float32 whatever the activations are."""
        g, matrix = self.g, self.weights.matrices[HEAD]
        if self.spec.embedding_size is not None:
            normed = self.linear(TOKEN_OUT, normed)
        if matrix.block is None and matrix.by_rows:
            values = tied_head(g, self.weights, normed, is_flat=len(self.leading) == 1)
        else:
            values = self.linear(HEAD, normed)
        cap, name = self.spec.logits_softcap, "head.cast"
        if cap is not None:
            values = ops.softcap(g, ops.cast(g, values, TensorProto.FLOAT, name), cap, "head.cap")
            name = "head.capped"
        g.node("Cast", [values], outputs=[names.LOGITS], name=name, to=TensorProto.FLOAT)
