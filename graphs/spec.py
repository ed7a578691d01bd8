"""What a decoder is: the frozen description that exporter and runtime share.

It is stored in the manifest. Reading is strict: a key that is not known, missing, or of the wrong
type is an error, because each of them changes what the model computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onnxport.graphs.altup_spec import AltUpSpec
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.fields import construct, plain, without_nulls
from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.heads_spec import HeadsSpec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import (
    LinearAttentionSpec,
    LinearSpec,
    StateSpaceSpec,
    linear_to_json,
)
from onnxport.graphs.multipliers_spec import MultipliersSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec_checks import check_spec
from onnxport.graphs.spec_fields import LATER, read_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """A decoder-only transformer. Sizes are elements, `context_length` is tokens.

    Raises ValueError when sizes contradict each other.
    """

    family: str  # llama, mistral, qwen2, qwen3, …
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int  # query heads; the most of any layer: see `layer_heads`
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str  # one of spec_checks.HIDDEN_ACTS
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on queries and keys: see `whole_qk_norm`, `qk_norm_last`
    tie_word_embeddings: bool
    context_length: int  # longest sequence, rows of the cos and sin tables
    sliding_window: tuple[int | None, ...]  # per layer: visible tokens with the query's own, or all
    rope: RopeSpec
    attention_scale: float | None = None  # of QK^T; None: 1 / sqrt(head_size)
    residual_scale: float | None = None  # what is stored times it: see `output_scale`; None: 1
    logits_scale: float | None = None  # likewise the final norm's weight
    rotated_layers: tuple[bool, ...] | None = None  # which of them RoPE rotates; None: all
    output_norms: bool | None = None  # RMSNorm on what attention and MLP add; None: without
    inner_norm_eps: float | None = None  # of norms on heads and on outputs; None: rms_norm_eps
    local_rope: RopeSpec | None = None  # of layers with a sliding window; None: rope
    raw_inputs: bool | None = None  # attention and MLP read the residual stream; None: norms of it
    whole_qk_norm: bool | None = None  # over all heads of a token at once; None: over each head
    attention_softcap: float | None = None  # c: QK^T, scaled, is c * tanh(it / c); None: as it is
    logits_softcap: float | None = None  # likewise the logits
    experts: ExpertsSpec | None = None  # of feed-forward layers; None: each is one
    attention_sinks: bool | None = None  # a logit a head that takes part of the softmax; None: none
    stream_scale: float | None = None  # what the residual stream is that over; None: 1
    draft: DraftSpec | None = None  # it is a draft head; None: a model
    # Attention is of latents: `head_size` and `num_kv_heads` are then of what the cache holds.
    latent: LatentSpec | None = None
    linear: LinearSpec | None = None  # of layers without attention; None: all have it
    qk_norm_last: bool | None = None  # norms of heads are behind RoPE; None: ahead of it
    layer_norms: bool | None = None  # LayerNorm; None: RMSNorm
    # Attention and MLP read one norm, and what both make is added at once; None: one after another.
    parallel_layers: bool | None = None
    attention_gate: bool | None = None  # heads' output is times a sigmoid of a product; None: not
    ungated: bool | None = None  # feed-forward layers are down(act(up)); None: down(act(gate) * up)
    mlp_layers: tuple[bool, ...] | None = None  # which have a feed-forward layer; None: all
    norm_biases: bool | None = None  # of LayerNorms; None: without
    # Of parallel layers: the MLP reads a norm of its own of the same stream; None: attention's.
    parallel_norms: bool | None = None
    head_bias: bool | None = None  # logits have biases; None: without
    # Norms of heads are LayerNorms without biases, each head's with a weight of its own; None: not.
    apart_qk_norm: bool | None = None
    # Of layers without a window, where these have other heads than `head_size` and `num_kv_heads`,
    # which then are of the others; None: all layers have these.
    global_heads: HeadsSpec | None = None
    value_norm: bool | None = None  # RMSNorm without weights on each head's value; None: without
    # So many layers at the end read the K/V of the last layer before them that sees as much.
    shared_kv_layers: int | None = None  # None: each has its own
    shared_kv_intermediate_size: int | None = None  # of these layers; None: intermediate_size
    layer_scales: bool | None = None  # the stream behind a layer is times a number of its own
    # Channels of what each layer is told of each token by a table and a product of the embedding,
    # and adds to the stream at its end; None: nothing.
    layer_input_size: int | None = None
    multipliers: MultipliersSpec | None = None  # of outputs of products; None: all are 1, or lost
    # Rows of the table of `layer_input_size`; tokens behind have the first. None: each has one.
    layer_input_rows: int | None = None
    altup: AltUpSpec | None = None  # there are several residual streams; None: one
    # Of each layer's gate what is less than so many deviations above its mean is 0; None: nothing.
    gate_cutoffs: tuple[float | None, ...] | None = None
    head_gates: bool | None = None  # `attention_gate` has a number a head; None: one a channel
    learned_positions: int | None = None  # rows of a table, added by position; None: there is none
    # Of a token in the embedding, of which a product makes the stream, and of this another one what
    # the head reads; None: hidden_size.
    embedding_size: int | None = None
    # LayerNorms are of the stream, behind what attention and MLP add; None: of what these read.
    stream_norms: bool | None = None
    no_final_norm: bool | None = None  # the head reads the stream; None: a norm of it
    inverse_layer_scale: bool | None = None  # QK^T is over the number of the layer, from 1
    qkv_bound: float | None = None  # of queries, keys and values ahead of RoPE; None: none
    embedding_norm: bool | None = None  # the stream begins with a norm of embeddings; None: these
    # Layers that keep a state have norms of what they read, whatever `raw_inputs` and
    # `output_norms` say of the others; None: they are as these.
    state_input_norms: bool | None = None
    softplus_gates: bool | None = None  # it is a softplus of the product; None: a sigmoid
    layer_heads: tuple[int, ...] | None = None  # query heads of each layer; None: num_heads
    window_sinks: bool | None = None  # layers with a window alone have sinks; None: all
    # Channels of a head's values, which caches have room for head_size of; None: head_size.
    value_size: int | None = None
    value_scale: float | None = None  # what values are times: `o` is stored times it; None: 1
    query_growth: GrowthSpec | None = None  # queries grow with their positions; None: they do not
    # Windows are chunks, one behind the other: a token sees its own chunk; None: windows slide.
    chunked_windows: bool | None = None
    # Norms of heads have no weights, and layers that do not rotate have none; None: as `qk_norm`.
    unweighted_qk_norm: bool | None = None

    def __post_init__(self) -> None:
        """Check that sizes agree, and that parts go together."""
        check_spec(self)

    @property
    def token_size(self) -> int:
        """Width of the embedding and of what the head reads."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def cache_parts(self) -> int:
        """Caches of a layer: keys and values, or rows of latents alone, that both are made of."""
        return 2 if self.latent is None else 1

    @property
    def attended_size(self) -> int:
        """Width of what the output projection of attention reads, where layers are alike."""
        return self.num_heads * (self.head_size if self.latent is None else self.latent.value_size)

    @property
    def q_size(self) -> int:
        """Width of all query heads, num_heads * head_size, where layers are alike."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads, num_kv_heads * head_size, likewise."""
        return self.num_kv_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Width of the packed projection: queries, then keys, then values; likewise."""
        return self.q_size + 2 * self.kv_size

    def heads_of(self, layer: int) -> HeadsSpec:
        """The heads of a layer."""
        if self.global_heads is not None and self.sliding_window[layer] is None:
            return self.global_heads
        return HeadsSpec(
            head_size=self.head_size, num_kv_heads=self.num_kv_heads, keys_are_values=False
        )

    def query_heads(self, layer: int) -> int:
        """The query heads of a layer."""
        return self.num_heads if self.layer_heads is None else self.layer_heads[layer]

    def qkv_parts(self, layer: int) -> tuple[int, ...]:
        """Widths of a layer's packed projection: queries, and its own keys and values, if any."""
        heads = self.heads_of(layer)
        queries = self.query_heads(layer) * heads.head_size
        keys = heads.num_kv_heads * heads.head_size
        values = heads.num_kv_heads * (self.value_size or heads.head_size)
        if self.kv_source(layer) != layer:
            return (queries,)
        return (queries, keys) if heads.keys_are_values else (queries, keys, values)

    def attended_width(self, layer: int) -> int:
        """Width of what a layer's output projection of attention reads."""
        if self.latent is not None:
            return self.attended_size
        return self.query_heads(layer) * (self.value_size or self.heads_of(layer).head_size)

    def has_sinks(self, layer: int) -> bool:
        """Whether heads of a layer have sinks."""
        everywhere = not self.window_sinks or self.sliding_window[layer] is not None
        return bool(self.attention_sinks) and everywhere

    @property
    def has_even_caches(self) -> bool:
        """Whether all layers that have keys and values have as many, of one size."""
        kinds = {self.heads_of(layer) for layer in self.cached_layers}
        return len({(kind.head_size, kind.num_kv_heads) for kind in kinds}) <= 1

    @property
    def has_mixed_layers(self) -> bool:
        """Whether layers have other heads than others, or read their keys and values."""
        return self.global_heads is not None or self.shared_kv_layers is not None

    def gate_size(self, layer: int) -> int:
        """Numbers of a token that a layer's `attention_gate` multiplies heads with."""
        return self.query_heads(layer) * (1 if self.head_gates else self.head_size)

    @property
    def has_gqa_graph(self) -> bool:
        """Whether a model has the graph that onnxruntime-genai's Generator runs."""
        lacks = self.has_mixed_layers or self.has_gelu_experts or self.has_ungated_experts
        lacks = lacks or self.has_channel_decays
        lacks = lacks or bool(self.chunked_windows) or self.value_size is not None
        return self.latent is None and not lacks

    @property
    def has_channel_decays(self) -> bool:
        """Whether layers with a state have a decay of each channel (Kimi Delta Attention)."""
        return isinstance(self.linear, LinearAttentionSpec) and self.linear.gate_rank is not None

    @property
    def has_gelu_experts(self) -> bool:
        """Whether experts have a GELU, which ONNX Runtime's operators lack: `experts.Swiglu`."""
        return self.experts is not None and self.hidden_act == "gelu_tanh"

    @property
    def has_ungated_experts(self) -> bool:
        """Whether experts have no gate, which ONNX Runtime's operators lack, too."""
        return self.experts is not None and bool(self.ungated)

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads, most often its own."""
        if self.shared_kv_layers is None or layer < self.num_layers - self.shared_kv_layers:
            return layer
        own = self.sliding_window[: self.num_layers - self.shared_kv_layers]
        return max(one for one, seen in enumerate(own) if seen == self.sliding_window[layer])

    def inner_size(self, layer: int) -> int:
        """Features between the products of a layer's feed-forward layer."""
        wide = self.shared_kv_intermediate_size
        return self.intermediate_size if wide is None or self.kv_source(layer) == layer else wide

    def gate_cutoff(self, layer: int) -> float | None:
        """Deviations above the mean up to which numbers of a layer's gate are 0; None: none is."""
        return None if self.gate_cutoffs is None else self.gate_cutoffs[layer]

    @property
    def num_layer_inputs(self) -> int:
        """Rows of the table of what layers are told of tokens."""
        return self.vocab_size if self.layer_input_rows is None else self.layer_input_rows

    @property
    def num_logits(self) -> int:
        """Tokens that have a logit: all, but for a draft head."""
        return self.vocab_size if self.draft is None else self.draft.vocab_size

    def attention_inputs(self, layer: int) -> int:
        """Channels that the projections of a layer's attention read."""
        joined = layer == 0 and self.draft is not None and not self.draft.is_mtp
        return 2 * self.hidden_size if joined else self.hidden_size

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers that keep a state of each sequence."""
        return tuple(layer for layer in range(self.num_layers) if self.is_linear(layer))

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        return tuple(
            layer
            for layer in range(self.num_layers)
            if self.has_attention(layer) and self.kv_source(layer) == layer
        )

    def is_linear(self, layer: int) -> bool:
        """Whether a layer keeps a state of each sequence, most often in place of attention."""
        return self.linear is not None and self.linear.layers[layer]

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention, be it beside a state."""
        return self.has_both or not self.is_linear(layer)

    @property
    def has_both(self) -> bool:
        """Whether every layer has attention and a state space, which read one norm."""
        return isinstance(self.linear, StateSpaceSpec) and bool(self.linear.beside_attention)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has a feed-forward layer, or experts, behind what mixes positions."""
        return self.mlp_layers is None or self.mlp_layers[layer]

    def norms_inputs(self, layer: int) -> bool:
        """Whether what attention (or a state) and MLP of a layer read is normalized."""
        return not self.raw_inputs or self._is_apart(layer)

    def norms_outputs(self, layer: int) -> bool:
        """Whether what they add is."""
        return bool(self.output_norms) and not self._is_apart(layer)

    def _is_apart(self, layer: int) -> bool:
        return bool(self.state_input_norms) and self.is_linear(layer)

    def rotates(self, layer: int) -> bool:
        """Whether RoPE rotates the queries and keys of a layer."""
        return self.rotated_layers is None or self.rotated_layers[layer]

    def rotates_within(self, layer: int) -> bool:
        """Whether it does that at the end, where attention itself can do it."""
        return self.rotates(layer) and not self.qk_norm_last

    def norms_heads(self, layer: int) -> bool:
        """Whether queries and keys of a layer are normalized."""
        return self.qk_norm and (self.rotates(layer) or not self.unweighted_qk_norm)

    def grows(self, layer: int) -> bool:
        """Whether queries of a layer grow with their positions."""
        growth = self.query_growth
        return growth is not None and not (growth.without_rope and self.rotates(layer))

    @property
    def counts_positions(self) -> bool:
        """Whether a graph needs the position of each token outside of attention itself."""
        counts = bool(self.qk_norm_last) or self.learned_positions is not None
        return counts or any(map(self.grows, range(self.num_layers)))

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """The experts of a layer; None: it is one feed-forward layer of `intermediate_size`."""
        if self.experts is None or self.experts.layers is None:
            return self.experts
        return self.experts if self.experts.layers[layer] else None

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings of layers with attention that rotate; none: nothing does."""
        rotating = (
            layer
            for layer in range(self.num_layers)
            if self.rotates(layer) and self.has_attention(layer)
        )
        return tuple(dict.fromkeys(map(self.rope_of, rotating)))

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary embedding of a layer."""
        if self.local_rope is not None and self.sliding_window[layer] is not None:
            return self.local_rope
        return self.rope

    @property
    def inner_eps(self) -> float:
        """The epsilon of norms that do not read the residual stream."""
        return self.rms_norm_eps if self.inner_norm_eps is None else self.inner_norm_eps

    @property
    def output_scale(self) -> float:
        """What o_proj and down_proj are stored times; the norms behind them are, if there are."""
        return 1.0 if self.residual_scale is None or self.output_norms else self.residual_scale

    @property
    def scale(self) -> float:
        """What QK^T is multiplied with, but for `inverse_layer_scale`."""
        if self.attention_scale is not None:
            return self.attention_scale
        return 1.0 / math.sqrt(self.head_size)

    def scale_of(self, layer: int) -> float:
        """What QK^T of a layer is multiplied with."""
        return self.scale / (layer + 1) if self.inverse_layer_scale else self.scale

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        inner = {"rope": self.rope.to_json()}
        if self.local_rope is not None:
            inner["local_rope"] = self.local_rope.to_json()
        if self.experts is not None:
            inner["experts"] = self.experts.to_json()
        if self.linear is not None:
            inner["linear"] = linear_to_json(self.linear)
        for name in ("draft", "latent", "global_heads", "multipliers", "altup", "query_growth"):
            if (part := getattr(self, name)) is not None:
                inner[name] = plain(part)
        return without_nulls(plain(self), LATER) | inner

    @classmethod
    def from_json(cls, value: Any) -> ArchSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        return construct(cls, "model", read_fields(value))
