"""Both graphs of a decoder: paged, and GroupQueryAttention over one contiguous cache.

They share every node but attention and the shapes around it, and every weight. Activations are
[num_tokens, hidden] in the paged graph and [batch, seq, hidden] in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxport.exporter.draft_inputs import declare_states, normed_features
from onnxport.exporter.graph_parts import (
    activation_dtype,
    attributes,
    declare_pools,
    declare_rows_of_caches,
    rope_tables,
    sinks,
)
from onnxport.exporter.latent_graph import attend_latents
from onnxport.exporter.linear_batch import declare_rows, find_padding, mix_by_rows
from onnxport.exporter.linear_layer import (
    DeltaInputs,
    Mix,
    declare_slots,
    linear_attention,
    mix_by_slots,
)
from onnxport.exporter.plan import EMBEDDING, FEATURES, FINAL_NORM, HEAD, LAYER_INPUTS
from onnxport.exporter.plan_experts import XIELU
from onnxport.exporter.rotation import Rotation, rotation_of_rows, rotation_of_tokens
from onnxport.exporter.short_conv import (
    ConvInputs,
    Convolve,
    convolve_by_rows,
    convolve_by_slots,
    short_convolution,
)
from onnxport.exporter.space_batch import scan_by_rows
from onnxport.exporter.space_layer import (
    Scan,
    Scanned,
    SpaceInputs,
    scan_by_slots,
    state_space_layer,
)
from onnxport.exporter.weights import StoredMatrix, StoredWeights
from onnxport.graphs import contract as names
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.experts import ExpertWeights, Routing, Swiglu, expert_layer
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec, ShortConvSpec, StateSpaceSpec
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import TensorRef, numpy_dtype

ACCURACY_LEVEL = 4  # MatMulNBits may round activations to int8 blocks; a provider may lower it

_ACTIVATIONS: Final[Mapping[str, Callable[[GraphBuilder, str], str]]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": ops.gelu_tanh,
    "relu2": ops.relu_squared,
}

Attend = Callable[[int, "str | tuple[str, ...]"], str]  # (layer, qkv) -> attended


@dataclass(frozen=True, slots=True)
class _Decoder:
    """One graph under construction."""

    g: GraphBuilder
    spec: ArchSpec
    weights: StoredWeights
    leading: tuple[int, ...]  # reshape dimensions before the last: (0,) or (0, 0)
    attend: Attend
    mix: Mix  # of gated delta nets
    scan: Scan  # of state spaces
    convolve: Convolve  # of layers that are that
    rotation: Rotation | None  # of queries and keys ahead of their norms; None: attention rotates
    kept: dict[int, tuple[str, str]] = field(default_factory=dict)  # layers' own keys and values

    def body(self, select: Callable[[str], str] | None) -> tuple[str, str]:
        """Token ids to hidden states, normalized and as they are.

        `select` picks the rows that need logits. It is applied after the last attention, for what
        follows mixes no positions; None: all.
        """
        g, spec = self.g, self.spec
        hidden = self.embed()
        told = self.layer_inputs(hidden)
        delta = ""
        for layer in range(spec.num_layers):
            with g.scope(f"layers.{layer}"):
                if spec.draft is not None and layer == 0:
                    read, hidden = self.read_states(spec.draft, hidden)
                else:
                    read, hidden = self.read(hidden, delta, f"layers.{layer}.input_norm")
                attended = self.attention(layer, read)
                if layer == spec.num_layers - 1 and select is not None:
                    attended, hidden = select(attended), select(hidden)
                    if spec.parallel_layers and not spec.parallel_norms:
                        read = select(read)
                    if told:
                        told = (*told[:-1], select(told[-1]))
                delta = self.output(f"layers.{layer}.o", self.linear(f"layers.{layer}.o", attended))
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
                    end = self.end(layer, hidden, delta, told[layer] if told else "")
                    hidden, delta = end, ""
        return self.norm(hidden, delta, FINAL_NORM)

    def layer_inputs(self, embedded: str) -> tuple[str, ...]:
        """What each layer is told of the tokens, [..., layer_input_size]; none where it is not."""
        g, size, layers = self.g, self.spec.layer_input_size, self.spec.num_layers
        if size is None:
            return ()
        with g.scope(LAYER_INPUTS):
            found = self.embed(LAYER_INPUTS)
            product = self.linear(f"{LAYER_INPUTS}.product", embedded)
            apart = ops.reshape(g, product, (*self.leading, layers, size), "apart")
            weight = g.weight(self.weights.vectors[f"{LAYER_INPUTS}.norm"])
            normed = ops.rms_norm(g, apart, weight, self.spec.inner_eps, "norm")
            joined = ops.reshape(g, normed, (*self.leading, layers * size), "join")
            both = g.node("Add", [found, joined], name="both")
            sizes = g.constant(np.full(layers, size, np.int64), "sizes")
            return tuple(g.node("Split", [both, sizes], outputs=layers, name="split", axis=-1))

    def end(self, layer: int, hidden: str, delta: str, told: str) -> str:
        """The stream behind a layer: what it was told goes in, and it may be scaled."""
        g, role = self.g, f"layers.{layer}"
        hidden = g.node("Add", [hidden, delta], name="residual")
        if told:
            gate = self.linear(f"{role}.input_gate", hidden)
            activated = _ACTIVATIONS[self.spec.hidden_act](g, gate)
            gated = g.node("Mul", [activated, told], name="told")
            added = self.output(f"{role}.input_out", self.linear(f"{role}.input_out", gated))
            hidden = g.node("Add", [hidden, added], name="residual.told")
        if self.spec.layer_scales:
            weight = g.weight(self.weights.vectors[f"{role}.scale"])
            hidden = g.node("Mul", [hidden, weight], name="residual.scaled")
        return hidden

    def embed(self, role: str = EMBEDDING) -> str:
        """Rows of the embedding table, or of another one."""
        g, matrix = self.g, self.weights.matrices[role]
        if matrix.block is None:
            return g.node("Gather", [g.weight(matrix.weight), names.INPUT_IDS], name="embed")
        assert matrix.scales is not None
        assert matrix.zero_points is None
        padded = matrix.block.num_blocks(matrix.columns) * matrix.block.block_size
        dims = (matrix.rows, padded * matrix.block.bits // 8)
        rows = ops.gather_block_quantized(
            g,
            g.weight(matrix.weight.view(f"{role}.rows", dims)),
            names.INPUT_IDS,
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
        given = self.linear(FEATURES, features)
        own = ops.cast(self.g, names.DRAFT_HIDDEN_STATES, dtype, "own.cast")
        hidden = self.g.node("Add", [given, own], name="states")
        token, _ = self.norm(embedded, "", "layers.0.input_norm")
        state, _ = self.norm(hidden, "", "layers.0.hidden_norm")
        read = self.g.node("Concat", [token, state], name="token_and_state", axis=-1)
        return read, state if draft.norm_before_residual else hidden

    def read(self, hidden: str, delta: str, role: str) -> tuple[str, str]:
        """Add `delta` if there is one; returns (what attention or MLP reads, hidden)."""
        if not self.spec.raw_inputs:
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

    def attention(self, layer: int, x: str) -> str:
        """Attention, times the sigmoid of a product where the model has that; or a state."""
        if self.spec.is_linear(layer):
            parts = (self.g, self.spec, self.weights, layer, x)
            if isinstance(self.spec.linear, StateSpaceSpec):
                return state_space_layer(*parts, self.linear, self.scan, self.leading)
            if isinstance(self.spec.linear, ShortConvSpec):
                return short_convolution(*parts, self.linear, self.convolve)
            return linear_attention(*parts, self.linear, self.mix, self.leading)
        attended = self.heads(layer, x)
        if not self.spec.attention_gate:
            return attended
        gate = self.linear(f"layers.{layer}.attention_gate", x)
        part = self.g.node("Sigmoid", [gate], name="attention_gate.sigmoid")
        return self.g.node("Mul", [attended, part], name="attention.gated")

    def heads(self, layer: int, x: str) -> str:
        """Packed projection and attention; with QK-norm the heads are normalized between."""
        g, spec = self.g, self.spec
        if spec.latent is not None:
            return attend_latents(g, spec, self.weights, layer, x, self.linear, self.attend)
        qkv = self.linear(f"layers.{layer}.qkv", x)
        if not spec.qk_norm:
            return self.attend(layer, qkv)
        if self.rotation is not None:
            return self.attend(layer, self.rotated_heads(layer, qkv, self.rotation))
        parts = spec.qkv_parts(layer)
        if len(parts) == 1:
            q = self.head_norm(qkv, layer, "q_norm", parts[0])
            return self.attend(layer, (q, *self.kept[spec.kv_source(layer)]))
        sizes = g.constant(np.array(parts, np.int64), "sizes")
        q, k, *own = g.node("Split", [qkv, sizes], outputs=len(parts), name="split", axis=-1)
        v = own[0] if own else k
        q = self.head_norm(q, layer, "q_norm", parts[0])
        k = self.head_norm(k, layer, "k_norm", parts[1])
        if spec.value_norm:
            v = self.head_norm(v, layer, "", parts[1])
        self.kept[layer] = k, v
        return self.attend(layer, (q, k, v))

    def rotated_heads(self, layer: int, qkv: str, rotation: Rotation) -> tuple[str, str, str]:
        """Queries and keys rotated and then normalized, head by head, and values."""
        g, spec = self.g, self.spec
        sizes = g.constant(np.array([spec.q_size + spec.kv_size, spec.kv_size], np.int64), "sizes")
        both, v = g.node("Split", [qkv, sizes], outputs=2, name="split", axis=-1)
        heads = ops.reshape(g, both, (*self.leading, -1, spec.head_size), "heads")
        counts = g.constant(np.array([spec.num_heads, spec.num_kv_heads], np.int64), "counts")
        turned = rotation.apply(g, heads)
        parts = g.node("Split", [turned, counts], outputs=2, name="split.heads", axis=-2)
        q, k = (
            self.head_norm(part, layer, name, size)
            for part, name, size in zip(
                parts, ("q_norm", "k_norm"), (spec.q_size, spec.kv_size), strict=True
            )
        )
        return q, k, v

    def head_norm(self, x: str, layer: int, name: str, size: int) -> str:
        """A norm over each head of x [..., size], or over all of it; of values without a name."""
        g, channels, role = self.g, self.spec.heads_of(layer).head_size, f"layers.{layer}.{name}"
        if self.spec.apart_qk_norm:
            return self.apart_norm(x, role, size)
        if name:
            weight = g.weight(self.weights.vectors[role])
        else:
            ones = np.ones(channels, numpy_dtype(activation_dtype(self.weights)))
            weight, name = g.constant(ones, "ones"), "v_norm"
        if self.spec.whole_qk_norm:
            return ops.rms_norm(g, x, weight, self.spec.inner_eps, name)
        heads = ops.reshape(g, x, (*self.leading, -1, channels), f"{name}.heads")
        normed = ops.rms_norm(g, heads, weight, self.spec.inner_eps, name)
        return ops.reshape(g, normed, (*self.leading, size), f"{name}.join")

    def apart_norm(self, x: str, role: str, size: int) -> str:
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

    def mlp(self, layer: int, x: str, hidden: str = "") -> str:
        """What the feed-forward layer adds, with a gate or without, or that of experts.

        It reads x, and experts apart from a shared layer the stream.
        """
        experts, role = self.spec.experts_of(layer), f"layers.{layer}"
        if experts is None:
            return self.output(f"{role}.down", self.dense(role, x))
        if experts.apart:
            return self.output(f"{role}.down", self.experts_apart(layer, experts, x, hidden))
        added = self.experts(layer, experts, x, x)
        if experts.shared_size is not None:
            added = self.g.node("Add", [added, self.shared(layer, experts, x)], name="added")
        return self.output(f"{role}.down", added)

    def activate(self, role: str, x: str) -> str:
        """The activation of a feed-forward layer without a gate."""
        g, weights = self.g, self.weights
        if self.spec.hidden_act != "xielu":
            return _ACTIVATIONS[self.spec.hidden_act](g, x)
        stored = (weights.vectors[f"{role}.{name}"] for name in XIELU)
        numbers = ops.Xielu(*(g.weight(one.view(one.name, ())) for one in stored))
        return ops.xielu(g, x, numbers, activation_dtype(weights))

    def dense(self, role: str, x: str) -> str:
        """One feed-forward layer, with a gate or without."""
        g = self.g
        if self.spec.ungated:
            up = self.activate(role, self.linear(f"{role}.up", x))
            return self.linear(f"{role}.down", up)
        gate_up = self.linear(f"{role}.gate_up", x)
        gate, up = g.node("Split", [gate_up], outputs=2, name="split", axis=-1, num_outputs=2)
        gated = g.node("Mul", [_ACTIVATIONS[self.spec.hidden_act](g, gate), up], name="gated")
        return self.linear(f"{role}.down", gated)

    def shared(self, layer: int, experts: ExpertsSpec, x: str) -> str:
        """The feed-forward layer beside experts, which each token is given to."""
        g, role = self.g, f"layers.{layer}.shared"
        with g.scope("shared"):
            y = self.dense(role, x)
            if not experts.shared_gated:
                return y
            part = g.node("Sigmoid", [self.linear(f"{role}.gate", x)], name="part")
            return g.node("Mul", [y, part], name="weighted")

    def experts_apart(self, layer: int, experts: ExpertsSpec, x: str, hidden: str) -> str:
        """What a shared layer makes of x, and experts of the stream, normalized and added."""
        g, role = self.g, f"layers.{layer}"
        routed, _ = self.norm(hidden, "", f"{role}.router_norm")
        read, _ = self.norm(hidden, "", f"{role}.experts_norm")
        parts = (
            ("shared_out_norm", self.shared(layer, experts, x)),
            ("experts_out_norm", self.experts(layer, experts, read, routed)),
        )
        normed = [
            ops.rms_norm(
                g, made, g.weight(self.weights.vectors[f"{role}.{name}"]), self.spec.inner_eps, name
            )
            for name, made in parts
        ]
        return g.node("Add", normed, name="added")

    def experts(self, layer: int, experts: ExpertsSpec, x: str, routed: str) -> str:
        """The experts of x that a router chooses for each token by what it reads."""
        g, matrices = self.g, self.weights.matrices
        logits = self.linear(f"layers.{layer}.router", routed)
        correction = ""
        if experts.corrected:
            correction = g.weight(self.weights.vectors[f"layers.{layer}.correction"])
        first_role = "up" if self.spec.ungated else "gate_up"
        gate_up = matrices[f"layers.{layer}.experts.{first_role}"]
        down = matrices[f"layers.{layer}.experts.down"]
        assert gate_up.block == down.block
        first, second = (_of_experts(g, matrix, experts.count) for matrix in (gate_up, down))
        weights = ExpertWeights(
            count=experts.count,
            gate_up=first.weight,
            down=second.weight,
            gate_up_scales=first.scales,
            down_scales=second.scales,
            gate_up_bias=first.bias,
            down_bias=second.bias,
            bits=gate_up.block.bits if gate_up.block else None,
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

    def output(self, role: str, projected: str) -> str:
        """What attention or the feed-forward layer adds: a projection, normalized or as it is."""
        if not self.spec.output_norms:
            return projected
        norm = f"{role}_norm"
        weight, epsilon = self.g.weight(self.weights.vectors[norm]), self.spec.inner_eps
        return ops.rms_norm(self.g, projected, weight, epsilon, norm.rpartition(".")[2])

    def linear(self, role: str, x: str) -> str:
        """`x @ matrix.T + bias`."""
        g, matrix = self.g, self.weights.matrices[role]
        bias = "" if matrix.bias is None else g.weight(matrix.bias)
        weight, name = g.weight(matrix.weight), role.rpartition(".")[2]
        if matrix.block is None:
            assert not matrix.by_rows
            return ops.linear(g, x, weight, bias, name)
        assert matrix.scales is not None
        return ops.matmul_nbits(
            g,
            x,
            weight,
            g.weight(matrix.scales),
            k=matrix.columns,
            n=matrix.rows,
            bits=matrix.block.bits,
            block_size=matrix.block.block_size,
            zero_points="" if matrix.zero_points is None else g.weight(matrix.zero_points),
            bias=bias,
            accuracy_level=ACCURACY_LEVEL,
            name=name,
        )

    def logits(self, normed: str) -> None:
        """The output `logits`, float32 whatever the activations are."""
        g, matrix = self.g, self.weights.matrices[HEAD]
        if matrix.block is None and matrix.by_rows:
            values = self.tied_head(matrix, normed)
        else:
            values = self.linear(HEAD, normed)
        cap, name = self.spec.logits_softcap, "head.cast"
        if cap is not None:
            values = ops.softcap(g, ops.cast(g, values, TensorProto.FLOAT, name), cap, "head.cap")
            name = "head.capped"
        g.node("Cast", [values], outputs=[names.LOGITS], name=name, to=TensorProto.FLOAT)

    def tied_head(self, matrix: StoredMatrix, normed: str) -> str:
        """A dense table [vocab, hidden] serves the embedding and, transposed, the head."""
        g, weight = self.g, self.g.weight(matrix.weight)
        if len(self.leading) == 1:
            return g.node("Gemm", [normed, weight], name=HEAD, transB=1)
        rows = ops.reshape(g, normed, (-1, self.spec.hidden_size), "head.rows")
        flat = g.node("Gemm", [rows, weight], name=HEAD, transB=1)
        shape = g.node("Shape", [names.INPUT_IDS], name="head.shape")
        vocab = g.constant(np.array([self.spec.vocab_size], np.int64), "vocab")
        dims = g.node("Concat", [shape, vocab], name="head.dims", axis=0)
        return g.node("Reshape", [flat, dims], name="head.unflatten")


class _OfExperts(NamedTuple):
    """Values of all experts; empty names of what there is not."""

    weight: str
    scales: str
    bias: str


def _of_experts(g: GraphBuilder, matrix: StoredMatrix, count: int) -> _OfExperts:
    """What lies one below the other, one behind the other."""
    assert matrix.zero_points is None
    rows, block = matrix.rows // count, matrix.block
    columns = matrix.columns if block is None else matrix.columns * block.bits // 8

    def apart(ref: TensorRef | None, *dims: int) -> str:
        return "" if ref is None else g.weight(ref.view(ref.name, (count, rows, *dims)))

    return _OfExperts(
        apart(matrix.weight, columns),
        apart(matrix.scales, 0 if block is None else block.num_blocks(matrix.columns)),
        apart(matrix.bias),
    )


def paged_graph(spec: ArchSpec, weights: StoredWeights) -> onnx.ModelProto:
    """The paged graph of the contract: packed sequences, block tables, caches in place."""
    g = GraphBuilder("paged")
    dtype = activation_dtype(weights)
    g.input(names.INPUT_IDS, TensorProto.INT64, [names.NUM_TOKENS])
    int32_inputs: tuple[tuple[str, list[int | str]], ...] = (
        (names.BLOCK_TABLE, [names.BATCH, names.MAX_NUM_BLOCKS]),
        (names.CUMULATIVE_SEQUENCE_LENGTHS, [names.BATCH_PLUS_ONE]),
        (names.PAST_SEQUENCE_LENGTHS, [names.BATCH]),
        (names.ATTENTION_METADATA, [3]),
        (names.LOGITS_INDICES, [names.NUM_LOGITS]),
    )
    for name, dims in int32_inputs:
        g.input(name, TensorProto.INT32, dims)
    g.output(names.LOGITS, TensorProto.FLOAT, [names.NUM_LOGITS, spec.num_logits])
    if spec.draft is not None:
        declare_states(g, spec.draft, spec.hidden_size)
    declare_pools(g, spec, dtype)
    declare_slots(g, spec, dtype)
    tables = rope_tables(g, spec, weights, dtype)

    def attend(layer: int, qkv: str | tuple[str, ...]) -> str:
        cos, sin = tables[layer]
        source = spec.kv_source(layer)
        caches = names.cache_names(source, spec.cache_parts)
        if source != layer:
            caches = tuple((present, "") for _, present in caches)
        return ops.paged_attention(
            g,
            qkv,
            caches,
            cumulative_sequence_lengths=names.CUMULATIVE_SEQUENCE_LENGTHS,
            past_sequence_lengths=names.PAST_SEQUENCE_LENGTHS,
            block_table=names.BLOCK_TABLE,
            attention_metadata=names.ATTENTION_METADATA,
            attributes=attributes(spec, layer),
            cos=cos,
            sin=sin,
            sinks=sinks(g, weights, layer),
        )

    def select(x: str) -> str:
        return g.node("Gather", [x, names.LOGITS_INDICES], name="select", axis=0)

    rotation = rotation_of_tokens(g, spec, weights) if spec.qk_norm_last else None
    mix = partial(mix_by_slots, g)

    def scan(layer: int, inputs: SpaceInputs) -> Scanned:
        assert isinstance(spec.linear, StateSpaceSpec)
        return scan_by_slots(g, spec.linear, dtype, layer, inputs)

    ways = (mix, scan, partial(convolve_by_slots, g))
    decoder = _Decoder(g, spec, weights, (0,), attend, *ways, rotation)
    normed, hidden = decoder.body(select)
    decoder.logits(normed)
    if spec.draft is not None:
        told = normed if spec.draft.norm_output else hidden
        last = names.LAST_HIDDEN_STATES
        g.node("Cast", [told], outputs=[last], name="last.cast", to=TensorProto.FLOAT)
    return g.build()


def gqa_graph(spec: ArchSpec, weights: StoredWeights) -> onnx.ModelProto:
    """The graph of onnxruntime-genai's Generator: a batch, an attention mask, one cache each.

    There is none of attention of latents: its operator wants keys and values of every head. Nor of
    layers with other heads than others, or with the keys and values of others, for
    onnxruntime-genai knows one size of all caches, and one for each layer. Nor of experts with a
    GELU, which ONNX Runtime's own operators refuse.
    """
    assert spec.has_gqa_graph
    g = GraphBuilder("gqa")
    dtype = activation_dtype(weights)
    g.input(names.INPUT_IDS, TensorProto.INT64, [names.BATCH, "seq"])
    g.input(names.ATTENTION_MASK, TensorProto.INT64, [names.BATCH, "total_sequence_length"])
    g.output(names.LOGITS, TensorProto.FLOAT, [names.BATCH, "seq", spec.vocab_size])
    declare_rows_of_caches(g, spec, dtype)
    declare_rows(g, spec, dtype)
    tables = rope_tables(g, spec, weights, dtype)
    less_one, longest = ops.gqa_sequence_lengths(g, names.ATTENTION_MASK)

    def attend(layer: int, qkv: str | tuple[str, ...]) -> str:
        cos, sin = tables[layer]
        return ops.group_query_attention(
            g,
            qkv,
            names.past_key(layer),
            names.past_value(layer),
            (names.present_key(layer), names.present_value(layer)),
            sequence_lengths_minus_one=less_one,
            total_sequence_length=longest,
            attributes=attributes(spec, layer),
            cos=cos,
            sin=sin,
            sinks=sinks(g, weights, layer),
        )

    padding = None if spec.linear is None else find_padding(g, spec.linear)

    def mix(layer: int, inputs: DeltaInputs) -> str:
        assert isinstance(spec.linear, LinearAttentionSpec)
        assert padding is not None
        return mix_by_rows(g, spec.linear, dtype, padding, layer, inputs)

    def scan(layer: int, inputs: SpaceInputs) -> Scanned:
        assert isinstance(spec.linear, StateSpaceSpec)
        assert padding is not None
        return scan_by_rows(g, spec.linear, padding, layer, inputs)

    def convolve(layer: int, inputs: ConvInputs) -> str:
        assert padding is not None
        return convolve_by_rows(g, padding, layer, inputs)

    rotation = rotation_of_rows(g, spec, weights, less_one) if spec.qk_norm_last else None
    decoder = _Decoder(g, spec, weights, (0, 0), attend, mix, scan, convolve, rotation)
    decoder.logits(decoder.body(None)[0])
    return g.build()
