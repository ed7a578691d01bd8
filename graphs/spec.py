"""What a decoder is: the frozen description that exporter and runtime share.

It is stored in the manifest. Reading is strict: a key that is not known, missing, or of the wrong
type is an error, because each of them changes what the model computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.errors import ArtifactError
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.fields import (
    NONE,
    check_fields,
    construct,
    flags,
    is_a,
    plain,
    require,
    with_nulls,
    without_nulls,
)
from onnxport.graphs.heads_spec import HeadsSpec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import (
    LinearSpec,
    ShortConvSpec,
    linear_from_json,
    linear_to_json,
)

GATES: Final = ("silu", "gelu_tanh")  # activations of feed-forward layers with a gate
HIDDEN_ACTS: Final = (*GATES, "gelu", "relu2", "xielu")

# RoPE type -> the optional RopeSpec fields that it needs (the others stay None).
ROPE_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_context_length"),
    "llama3": ("factor", "original_context_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_context_length", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("original_context_length", "factors"),
    "proportional": ("factor", "rotated_pairs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding; the exporter turns it into the cos and sin tables.

    Parameters are those of transformers' `modeling_rope_utils`. Raises ValueError when a
    parameter of the type is missing, or one of another type is given.
    """

    type: str  # default, linear, dynamic, llama3, yarn, longrope, proportional
    theta: float  # base of the geometric frequency series
    rotary_dim: int  # leading channels of a head that rotate, even
    interleaved: bool = False  # pairs (0, 1), (2, 3), … instead of (i, i + rotary_dim / 2)
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)
    factor: float | None = None  # context extension ratio
    original_context_length: int | None = None  # tokens that the model was first trained on
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn, rotations where interpolation starts
    beta_slow: float | None = None  # yarn, rotations where interpolation is complete
    truncate: bool | None = None  # yarn, round the correction range to whole channels
    factors: tuple[float, ...] | None = None  # longrope, of each pair's wavelength
    rotated_pairs: int | None = None  # proportional, the first of rotary_dim / 2 that really turn

    def __post_init__(self) -> None:
        """Hold the parameters to what the type needs."""
        if self.type not in ROPE_PARAMETERS:
            raise ValueError(f"rope type {self.type!r} is not one of {sorted(ROPE_PARAMETERS)}")
        require(self.theta > 0, f"rope theta {self.theta} must be positive")
        require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            f"rotary_dim {self.rotary_dim} must be positive and even",
        )
        needed = ROPE_PARAMETERS[self.type]
        for field in dataclasses.fields(self):
            if field.default is not None:
                continue
            given = getattr(self, field.name) is not None
            if given != (field.name in needed):
                found = "is not a parameter of" if given else "is missing for"
                raise ValueError(f"{field.name} {found} rope type {self.type!r}, needs {needed}")
        if self.factors is not None:
            require(
                len(self.factors) == self.rotary_dim // 2 and all(one > 0 for one in self.factors),
                f"factors are {self.factors} for {self.rotary_dim // 2} pairs of channels; there "
                "must be one for each, all positive",
            )
        if self.rotated_pairs is not None:
            require(
                0 < self.rotated_pairs <= self.rotary_dim // 2,
                f"rotated_pairs is {self.rotated_pairs}; it must be from 1 to the "
                f"{self.rotary_dim // 2} pairs of channels",
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return without_nulls(plain(self), _LATER_OF_ROPE)

    @classmethod
    def from_json(cls, value: Any) -> RopeSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("rope", with_nulls(value, _LATER_OF_ROPE), _ROPE_FIELDS)
        if fields["factors"] is not None:
            if not all(is_a(factor, float) for factor in fields["factors"]):
                raise ArtifactError("rope.factors has an entry that is no finite number")
            fields["factors"] = tuple(map(float, fields["factors"]))
        return construct(cls, "rope", fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """A decoder-only transformer. Sizes are elements, `context_length` is tokens.

    Raises ValueError when sizes contradict each other.
    """

    family: str  # llama, mistral, qwen2, qwen3, …
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str  # one of HIDDEN_ACTS
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

    def __post_init__(self) -> None:
        """Check that the sizes agree."""
        for name in _SIZES:
            require(getattr(self, name) > 0, f"{name} must be positive, is {getattr(self, name)}")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        global_size = self.head_size if self.global_heads is None else self.global_heads.head_size
        require(
            self.rope.rotary_dim <= global_size,
            f"rotary_dim {self.rope.rotary_dim} exceeds head_size {global_size}",
        )
        require(
            self.local_rope is None or self.local_rope.rotary_dim <= self.head_size,
            f"local_rope {self.local_rope} exceeds head_size {self.head_size}",
        )
        require(
            len(self.sliding_window) == self.num_layers,
            f"sliding_window has {len(self.sliding_window)} entries for {self.num_layers} layers",
        )
        require(
            all(window is None or window > 0 for window in self.sliding_window),
            f"sliding windows must be positive or None, are {self.sliding_window}",
        )
        require(
            self.rotated_layers is None or len(self.rotated_layers) == self.num_layers,
            f"rotated_layers are {self.rotated_layers} for {self.num_layers} layers",
        )
        require(
            self.experts is None
            or self.experts.layers is None
            or len(self.experts.layers) == self.num_layers,
            f"experts are {self.experts} for {self.num_layers} layers",
        )
        bounded = self.experts and (
            self.experts.alpha or self.experts.up_offset or self.experts.limit
        )
        require(
            not bounded or self.hidden_act == "silu",
            f"experts with alpha, up_offset or limit have the activation silu, hidden_act is "
            f"{self.hidden_act!r}",
        )
        require(
            self.experts is None or not self.experts.apart or bool(self.output_norms),
            "experts apart need output_norms",
        )
        for name in _POSITIVE:
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be positive, is {value}")
        require(
            not self.raw_inputs or self.residual_scale is None,
            "residual_scale needs norms on what layers read, and raw_inputs says there are none",
        )
        if self.latent is not None:
            self._check_latent(self.latent)
        require(
            not (self.attention_gate and self.qkv_bias),
            "attention_gate and qkv_bias exclude each other",
        )
        self._check_linear()
        self._check_mlp()
        self._check_heads()
        self._check_order()
        self._check_parallel()
        self._check_ungated()
        if self.hidden_act not in HIDDEN_ACTS:
            raise ValueError(f"hidden_act {self.hidden_act!r} is not one of {HIDDEN_ACTS}")

    def _check_latent(self, latent: LatentSpec) -> None:
        """Check what goes with latent attention."""
        require(
            (self.num_kv_heads, self.head_size) == (1, latent.row_size),
            f"of latent attention a token has one row of {latent.row_size} channels in the cache: "
            f"num_kv_heads is {self.num_kv_heads} and head_size is {self.head_size}",
        )
        require(
            self.rope.rotary_dim == latent.rope_size and self.rotated_layers is None,
            f"latent attention rotates {latent.rope_size} channels in every layer, and rotary_dim "
            f"is {self.rope.rotary_dim}, rotated_layers are {self.rotated_layers}",
        )
        require(
            self.attention_scale is not None,
            "latent attention needs an attention_scale, for rows are wider than heads",
        )
        others = {
            "qkv_bias": self.qkv_bias,
            "qk_norm": self.qk_norm,
            "attention_sinks": self.attention_sinks,
            "attention_softcap": self.attention_softcap,
            "sliding_window": any(self.sliding_window),
            "draft": self.draft,
            "linear": self.linear,
            "attention_gate": self.attention_gate,
        }
        found = [name for name, one in others.items() if one]
        require(not found, f"latent attention does not go with {' and '.join(found)}")

    def _check_linear(self) -> None:
        """Check what layers without attention need."""
        if self.linear is None:
            return
        require(
            len(self.linear.layers) == self.num_layers,
            f"linear.layers are {list(self.linear.layers)} for {self.num_layers} layers",
        )
        require(
            not isinstance(self.linear, ShortConvSpec) or self.linear.channels == self.hidden_size,
            f"short convolutions have a channel for each of the residual stream's "
            f"{self.hidden_size}; linear is {self.linear}",
        )
        require(self.draft is None, "a draft head has attention in each layer, linear says not")
        require(
            self.sliding_window == (None,) * self.num_layers,
            f"beside linear attention no layer has a sliding window; they are "
            f"{self.sliding_window}",
        )

    def _check_mlp(self) -> None:
        """Check what goes with layers without a feed-forward layer."""
        if self.mlp_layers is None:
            return
        require(
            len(self.mlp_layers) == self.num_layers,
            f"mlp_layers are {self.mlp_layers} for {self.num_layers} layers",
        )
        others = {
            "draft": self.draft,
            "parallel_layers": self.parallel_layers,
            "output_norms": self.output_norms,
        }
        found = [other for other, one in others.items() if one]
        require(not found, f"mlp_layers does not go with {' and '.join(found)}")
        bare = [i for i in range(self.num_layers) if self.experts_of(i) and not self.has_mlp(i)]
        require(not bare, f"layers {bare} have experts, and by mlp_layers no feed-forward layer")

    def _check_heads(self) -> None:
        """Check what goes with layers that differ, and with what they add besides."""
        found = [name for name in _OF_LAYERS if getattr(self, name)]
        others = {
            "qkv_bias": self.qkv_bias,
            "whole_qk_norm": self.whole_qk_norm,
            "attention_gate": self.attention_gate,
            "raw_inputs": self.raw_inputs,
            "parallel_layers": self.parallel_layers,
            "qk_norm_last": self.qk_norm_last,
            "draft": self.draft,
            "latent": self.latent,
            "linear": self.linear,
            "ungated": self.ungated,
            "mlp_layers": self.mlp_layers,
            "norm_biases": self.norm_biases,
            "apart_qk_norm": self.apart_qk_norm,
            "qk_norm = false": not self.qk_norm,
            "output_norms = false": not self.output_norms,
        }
        wrong = [name for name, one in others.items() if one]
        require(
            not (found and wrong), f"{' and '.join(found)} does not go with {' and '.join(wrong)}"
        )
        if self.global_heads is not None:
            heads = self.global_heads
            require(
                self.num_heads % heads.num_kv_heads == 0,
                f"num_heads {self.num_heads} is not a multiple of the {heads.num_kv_heads} KV "
                "heads of layers without a window",
            )
            require(
                len(set(map(bool, self.sliding_window))) == 2,
                "global_heads needs layers with and without a window",
            )
            require(
                heads.head_size == self.head_size or self.local_rope is not None,
                "global_heads of another size needs a local_rope",
            )
            require(
                self.attention_scale is not None,
                "global_heads needs an attention_scale, for heads are of two sizes",
            )
        shared = self.shared_kv_layers
        if shared is None:
            require(
                self.shared_kv_intermediate_size is None,
                "shared_kv_intermediate_size needs shared_kv_layers",
            )
            return
        own = self.sliding_window[: max(0, self.num_layers - shared)]
        require(
            0 < shared < self.num_layers and set(own) == set(self.sliding_window),
            f"shared_kv_layers is {shared} of {self.num_layers} layers; ahead of these there must "
            f"be one of each window: {self.sliding_window}",
        )

    def _check_parallel(self) -> None:
        """Check what goes with LayerNorm, and with attention and MLP side by side."""
        others = {
            "raw_inputs": self.raw_inputs,
            "output_norms": self.output_norms,
            "qk_norm": self.qk_norm and self.layer_norms and not self.apart_qk_norm,
            "draft": self.draft,
            "latent": self.latent,
            "linear": self.linear,
        }
        for name in ("layer_norms", "parallel_layers"):
            found = [other for other, one in others.items() if one]
            require(
                not (getattr(self, name) and found),
                f"{name} does not go with {' and '.join(found)}",
            )

        require(
            bool(self.layer_norms) or not self.norm_biases,
            "norm_biases needs layer_norms, for other norms have none",
        )
        require(
            bool(self.parallel_layers) or not self.parallel_norms,
            "parallel_norms needs parallel_layers, for others have both norms anyway",
        )

        require(
            not self.apart_qk_norm or (self.qk_norm and not self.whole_qk_norm),
            f"apart_qk_norm is of norms of each head: qk_norm is {self.qk_norm}, whole_qk_norm is "
            f"{self.whole_qk_norm}",
        )

    def _check_ungated(self) -> None:
        """Check what goes with feed-forward layers without a gate, and with a bias of logits."""
        require(
            bool(self.ungated) or self.hidden_act in GATES or self.hidden_act not in HIDDEN_ACTS,
            f"hidden_act {self.hidden_act!r} needs layers without a gate, ungated; with one it is "
            f"one of {GATES}",
        )
        require(not (self.ungated and self.draft), "ungated does not go with draft")
        experts = self.experts
        require(
            not self.ungated
            or experts is None
            or (self.hidden_act == "relu2" and not experts.biased and not experts.apart),
            f"experts without a gate have the activation relu2, no biases, and one norm with a "
            f"layer beside them: hidden_act is {self.hidden_act!r}, experts are {experts}",
        )
        require(
            not (self.head_bias and (self.tie_word_embeddings or self.draft)),
            "head_bias needs a head of a model's own; embeddings have no bias",
        )

    def _check_order(self) -> None:
        """Check what goes with norms of queries and keys behind RoPE."""
        if not self.qk_norm_last:
            return
        require(
            self.qk_norm and not self.whole_qk_norm and not self.apart_qk_norm,
            f"qk_norm_last is of norms that heads share: qk_norm is {self.qk_norm}, whole_qk_norm "
            f"is {self.whole_qk_norm}, apart_qk_norm is {self.apart_qk_norm}",
        )
        require(
            self.ropes == (self.rope,) and self.rotated_layers is None,
            f"ahead of norms one RoPE rotates all layers; local_rope is {self.local_rope}, "
            f"rotated_layers are {self.rotated_layers}",
        )
        require(
            self.rope.rotary_dim == self.head_size and not self.rope.interleaved,
            f"ahead of norms all of {self.head_size} channels rotate, and no neighbours do: "
            f"rotary_dim is {self.rope.rotary_dim}, interleaved is {self.rope.interleaved}",
        )

    @property
    def cache_parts(self) -> int:
        """Caches of a layer: keys and values, or rows of latents alone, that both are made of."""
        return 2 if self.latent is None else 1

    @property
    def attended_size(self) -> int:
        """Width of what the output projection of attention reads, but of `global_heads`."""
        return self.num_heads * (self.head_size if self.latent is None else self.latent.value_size)

    @property
    def q_size(self) -> int:
        """Width of all query heads, num_heads * head_size, but of `global_heads`."""
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

    def qkv_parts(self, layer: int) -> tuple[int, ...]:
        """Widths of a layer's packed projection: queries, and its own keys and values, if any."""
        heads = self.heads_of(layer)
        queries, keys = self.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size
        if self.kv_source(layer) != layer:
            return (queries,)
        return (queries, keys) if heads.keys_are_values else (queries, keys, keys)

    @property
    def has_even_caches(self) -> bool:
        """Whether all layers that have keys and values have as many, of one size."""
        kinds = {self.heads_of(layer) for layer in self.cached_layers}
        return len({(kind.head_size, kind.num_kv_heads) for kind in kinds}) <= 1

    @property
    def has_mixed_layers(self) -> bool:
        """Whether layers have other heads than others, or read their keys and values."""
        return self.global_heads is not None or self.shared_kv_layers is not None

    @property
    def has_gqa_graph(self) -> bool:
        """Whether a model has the graph that onnxruntime-genai's Generator runs."""
        lacks = self.has_mixed_layers or self.has_gelu_experts or self.has_ungated_experts
        return self.latent is None and not lacks

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

    @property
    def num_logits(self) -> int:
        """Tokens that have a logit: all, but for a draft head."""
        return self.vocab_size if self.draft is None else self.draft.vocab_size

    def attention_inputs(self, layer: int) -> int:
        """Channels that the projections of a layer's attention read."""
        return 2 * self.hidden_size if self.draft and layer == 0 else self.hidden_size

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers that keep a state of each sequence, and no keys and values."""
        return tuple(layer for layer in range(self.num_layers) if self.is_linear(layer))

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        return tuple(
            layer
            for layer in range(self.num_layers)
            if not self.is_linear(layer) and self.kv_source(layer) == layer
        )

    def is_linear(self, layer: int) -> bool:
        """Whether a layer keeps a state of each sequence in place of keys and values."""
        return self.linear is not None and self.linear.layers[layer]

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has a feed-forward layer, or experts, behind what mixes positions."""
        return self.mlp_layers is None or self.mlp_layers[layer]

    def rotates(self, layer: int) -> bool:
        """Whether RoPE rotates the queries and keys of a layer."""
        return self.rotated_layers is None or self.rotated_layers[layer]

    def rotates_within(self, layer: int) -> bool:
        """Whether it does that at the end, where attention itself can do it."""
        return self.rotates(layer) and not self.qk_norm_last

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
            if self.rotates(layer) and not self.is_linear(layer)
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
        """What QK^T is multiplied with."""
        if self.attention_scale is not None:
            return self.attention_scale
        return 1.0 / math.sqrt(self.head_size)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        inner = {"rope": self.rope.to_json()}
        if self.local_rope is not None:
            inner["local_rope"] = self.local_rope.to_json()
        if self.experts is not None:
            inner["experts"] = self.experts.to_json()
        if self.draft is not None:
            inner["draft"] = plain(self.draft)
        if self.latent is not None:
            inner["latent"] = plain(self.latent)
        if self.linear is not None:
            inner["linear"] = linear_to_json(self.linear)
        if self.global_heads is not None:
            inner["global_heads"] = plain(self.global_heads)
        return without_nulls(plain(self), _LATER) | inner

    @classmethod
    def from_json(cls, value: Any) -> ArchSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("model", with_nulls(value, _LATER), _ARCH_FIELDS)
        windows = fields["sliding_window"]
        if not all(window is None or is_a(window, int) for window in windows):
            raise ArtifactError(f"model.sliding_window has an entry that is no integer: {windows}")
        fields["sliding_window"] = tuple(windows)
        fields["rotated_layers"] = flags("model.rotated_layers", fields["rotated_layers"])
        fields["mlp_layers"] = flags("model.mlp_layers", fields["mlp_layers"])
        fields["rope"] = RopeSpec.from_json(fields["rope"])
        if fields["local_rope"] is not None:
            fields["local_rope"] = RopeSpec.from_json(fields["local_rope"])
        if fields["experts"] is not None:
            fields["experts"] = ExpertsSpec.from_json(fields["experts"])
        if fields["draft"] is not None:
            fields["draft"] = DraftSpec.from_json(fields["draft"])
        if fields["latent"] is not None:
            fields["latent"] = LatentSpec.from_json(fields["latent"])
        if fields["linear"] is not None:
            fields["linear"] = linear_from_json(fields["linear"])
        if fields["global_heads"] is not None:
            fields["global_heads"] = HeadsSpec.from_json(fields["global_heads"])
        return construct(cls, "model", fields)


_ROPE_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "type": (str,),
    "theta": (float,),
    "rotary_dim": (int,),
    "interleaved": (bool,),
    "attention_factor": (float,),
    "factor": (float, NONE),
    "original_context_length": (int, NONE),
    "low_freq_factor": (float, NONE),
    "high_freq_factor": (float, NONE),
    "beta_fast": (float, NONE),
    "beta_slow": (float, NONE),
    "truncate": (bool, NONE),
    "factors": (list, NONE),
    "rotated_pairs": (int, NONE),
}
_SIZES: Final = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "vocab_size",
    "rms_norm_eps",
    "context_length",
)
_POSITIVE: Final = (
    *("inner_norm_eps", "attention_softcap", "logits_softcap", "stream_scale"),
    *("shared_kv_intermediate_size", "layer_input_size"),
)
# What layers of one model may differ in, or have besides.
_OF_LAYERS: Final = (
    "global_heads",
    "value_norm",
    "shared_kv_layers",
    "layer_scales",
    "layer_input_size",
)
_ARCH_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "family": (str,),
    **dict.fromkeys(_SIZES, (int,)),
    "rms_norm_eps": (float,),
    "hidden_act": (str,),
    "qkv_bias": (bool,),
    "o_bias": (bool,),
    "mlp_bias": (bool,),
    "qk_norm": (bool,),
    "tie_word_embeddings": (bool,),
    "sliding_window": (list,),
    "rope": (dict,),
    "attention_scale": (float, NONE),
    "residual_scale": (float, NONE),
    "logits_scale": (float, NONE),
    "rotated_layers": (list, NONE),
    "output_norms": (bool, NONE),
    "inner_norm_eps": (float, NONE),
    "local_rope": (dict, NONE),
    "raw_inputs": (bool, NONE),
    "whole_qk_norm": (bool, NONE),
    "attention_softcap": (float, NONE),
    "logits_softcap": (float, NONE),
    "experts": (dict, NONE),
    "attention_sinks": (bool, NONE),
    "stream_scale": (float, NONE),
    "draft": (dict, NONE),
    "latent": (dict, NONE),
    "linear": (dict, NONE),
    "attention_gate": (bool, NONE),
    "ungated": (bool, NONE),
    "mlp_layers": (list, NONE),
    "qk_norm_last": (bool, NONE),
    "layer_norms": (bool, NONE),
    "parallel_layers": (bool, NONE),
    "norm_biases": (bool, NONE),
    "parallel_norms": (bool, NONE),
    "head_bias": (bool, NONE),
    "apart_qk_norm": (bool, NONE),
    "global_heads": (dict, NONE),
    "value_norm": (bool, NONE),
    "shared_kv_layers": (int, NONE),
    "shared_kv_intermediate_size": (int, NONE),
    "layer_scales": (bool, NONE),
    "layer_input_size": (int, NONE),
}
# Fields that artifacts of before lack, as those do today where they are None.
_LATER: Final = (
    *("residual_scale", "logits_scale", "rotated_layers"),
    *("output_norms", "inner_norm_eps", "local_rope"),
    *("raw_inputs", "whole_qk_norm", "attention_softcap", "logits_softcap"),
    *("experts", "attention_sinks", "stream_scale", "draft"),
    *("latent", "linear", "attention_gate", "qk_norm_last"),
    *("layer_norms", "parallel_layers", "ungated", "mlp_layers"),
    *("norm_biases", "parallel_norms", "head_bias", "apart_qk_norm"),
    *("global_heads", "value_norm", "shared_kv_layers", "shared_kv_intermediate_size"),
    *("layer_scales", "layer_input_size"),
)
_LATER_OF_ROPE: Final = ("factors", "rotated_pairs")
