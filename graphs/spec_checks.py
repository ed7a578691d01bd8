"""What an ArchSpec is held to: which sizes and parts of a decoder go together.

`spec.ArchSpec` calls `check_spec` when it is made. The first contradiction found is the one told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from onnxport.graphs.fields import require
from onnxport.graphs.heads_checks import check_heads
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.learned_checks import check_learned
from onnxport.graphs.linear_spec import ShortConvSpec

if TYPE_CHECKING:
    from onnxport.graphs.spec import ArchSpec

GATES: Final = ("silu", "gelu_tanh")  # activations of feed-forward layers with a gate
HIDDEN_ACTS: Final = (*GATES, "gelu", "relu", "relu2", "xielu")
SIZES: Final = (
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
    *("shared_kv_intermediate_size", "layer_input_size", "layer_input_rows", "qkv_bound"),
    *("learned_positions", "embedding_size", "value_size", "value_scale"),
)


def check_spec(spec: ArchSpec) -> None:
    """Check that sizes agree, and that parts go together. Raises ValueError when not."""
    _check_sizes(spec)
    _check_experts(spec)
    for name in _POSITIVE:
        value = getattr(spec, name)
        require(value is None or value > 0, f"{name} must be positive, is {value}")
    require(
        not spec.raw_inputs or spec.residual_scale is None,
        "residual_scale needs norms on what layers read, and raw_inputs says there are none",
    )
    if spec.latent is not None:
        _check_latent(spec, spec.latent)
    require(
        spec.draft is None
        or not spec.draft.is_mtp
        or spec.draft.target_hidden_size == spec.hidden_size,
        f"a draft head without target_layers is as wide as its target: hidden_size is "
        f"{spec.hidden_size}, draft is {spec.draft}",
    )
    require(
        not (spec.attention_gate and spec.qkv_bias),
        "attention_gate and qkv_bias exclude each other",
    )
    for name in ("head_gates", "softplus_gates"):
        require(
            bool(spec.attention_gate) or not getattr(spec, name),
            f"{name} needs attention_gate, whose numbers it is about",
        )
    _check_linear(spec)
    _check_multipliers(spec)
    _check_streams(spec)
    _check_mlp(spec)
    check_heads(spec)
    _check_parallel(spec)
    _check_ungated(spec)
    check_learned(spec)
    if spec.hidden_act not in HIDDEN_ACTS:
        raise ValueError(f"hidden_act {spec.hidden_act!r} is not one of {HIDDEN_ACTS}")


def _check_sizes(spec: ArchSpec) -> None:
    """Check sizes, and what has an entry for each layer."""
    for name in SIZES:
        require(getattr(spec, name) > 0, f"{name} must be positive, is {getattr(spec, name)}")
    require(
        spec.num_heads % spec.num_kv_heads == 0,
        f"num_heads {spec.num_heads} is not a multiple of num_kv_heads {spec.num_kv_heads}",
    )
    global_size = spec.head_size if spec.global_heads is None else spec.global_heads.head_size
    require(
        spec.rope.rotary_dim <= global_size,
        f"rotary_dim {spec.rope.rotary_dim} exceeds head_size {global_size}",
    )
    require(
        spec.local_rope is None or spec.local_rope.rotary_dim <= spec.head_size,
        f"local_rope {spec.local_rope} exceeds head_size {spec.head_size}",
    )
    require(
        len(spec.sliding_window) == spec.num_layers,
        f"sliding_window has {len(spec.sliding_window)} entries for {spec.num_layers} layers",
    )
    require(
        all(window is None or window > 0 for window in spec.sliding_window),
        f"sliding windows must be positive or None, are {spec.sliding_window}",
    )
    require(
        spec.rotated_layers is None or len(spec.rotated_layers) == spec.num_layers,
        f"rotated_layers are {spec.rotated_layers} for {spec.num_layers} layers",
    )


def _check_experts(spec: ArchSpec) -> None:
    """Check what goes with experts."""
    require(
        spec.experts is None
        or spec.experts.layers is None
        or len(spec.experts.layers) == spec.num_layers,
        f"experts are {spec.experts} for {spec.num_layers} layers",
    )
    bounded = spec.experts and (spec.experts.alpha or spec.experts.up_offset or spec.experts.limit)
    require(
        not bounded or spec.hidden_act == "silu",
        f"experts with alpha, up_offset or limit have the activation silu, hidden_act is "
        f"{spec.hidden_act!r}",
    )
    require(
        spec.experts is None or not spec.experts.apart or bool(spec.output_norms),
        "experts apart need output_norms",
    )


def _check_latent(spec: ArchSpec, latent: LatentSpec) -> None:
    """Check what goes with latent attention."""
    require(
        (spec.num_kv_heads, spec.head_size) == (1, latent.row_size),
        f"of latent attention a token has one row of {latent.row_size} channels in the cache: "
        f"num_kv_heads is {spec.num_kv_heads} and head_size is {spec.head_size}",
    )
    require(
        spec.rope.rotary_dim == latent.rope_size and not any(spec.rotated_layers or ()),
        f"latent attention rotates {latent.rope_size} channels in every layer, or in none, and "
        f"rotary_dim is {spec.rope.rotary_dim}, rotated_layers are {spec.rotated_layers}",
    )
    require(
        spec.attention_scale is not None,
        "latent attention needs an attention_scale, for rows are wider than heads",
    )
    others = {
        "qkv_bias": spec.qkv_bias,
        "qk_norm": spec.qk_norm,
        "attention_sinks": spec.attention_sinks,
        "attention_softcap": spec.attention_softcap,
        "sliding_window": any(spec.sliding_window),
        "draft with target_layers": spec.draft and not spec.draft.is_mtp,
        "a state beside it": spec.has_both,
        "attention_gate": spec.attention_gate,
    }
    found = [name for name, one in others.items() if one]
    require(not found, f"latent attention does not go with {' and '.join(found)}")


def _check_linear(spec: ArchSpec) -> None:
    """Check what layers without attention need."""
    if spec.linear is None:
        require(not spec.state_input_norms, "state_input_norms needs linear")
        return
    require(
        len(spec.linear.layers) == spec.num_layers,
        f"linear.layers are {list(spec.linear.layers)} for {spec.num_layers} layers",
    )
    require(
        not isinstance(spec.linear, ShortConvSpec) or spec.linear.channels == spec.hidden_size,
        f"short convolutions have a channel for each of the residual stream's "
        f"{spec.hidden_size}; linear is {spec.linear}",
    )
    require(spec.draft is None, "a draft head has attention in each layer, linear says not")
    require(
        not any(spec.sliding_window[layer] for layer in spec.linear_layers),
        f"a layer that keeps a state has no sliding window; they are {spec.sliding_window}",
    )
    require(
        not spec.state_input_norms or (bool(spec.raw_inputs) and not spec.has_both),
        "state_input_norms tells layers with a state from others, which have raw_inputs",
    )
    others = {"output_norms": spec.output_norms, "attention_gate": spec.attention_gate}
    found = [name for name, one in others.items() if one]
    require(
        not (spec.has_both and found),
        f"attention beside state spaces does not go with {' and '.join(found)}",
    )


def _check_streams(spec: ArchSpec) -> None:
    """Check what goes with several streams, with gates that are cut off, and a normed beginning."""
    require(
        not (spec.embedding_norm and (spec.draft or spec.altup or spec.layer_input_size)),
        "embedding_norm does not go with draft, altup and layer_input_size",
    )
    rows, cutoffs = spec.layer_input_rows, spec.gate_cutoffs
    require(
        rows is None or (spec.layer_input_size is not None and rows < spec.vocab_size),
        f"layer_input_rows is {rows}, of {spec.vocab_size} tokens; it needs layer_input_size",
    )
    require(
        cutoffs is None or (len(cutoffs) == spec.num_layers and not spec.ungated),
        f"gate_cutoffs are {cutoffs} for the gates of {spec.num_layers} layers",
    )
    if spec.altup is None:
        require(cutoffs is None, "gate_cutoffs need altup")
        return
    others = {
        "experts": spec.experts,
        "layer_scales": spec.layer_scales,
        "layer_input_size = None": not spec.layer_input_size,
    }
    found = [name for name, one in others.items() if one]
    require(not found, f"altup does not go with {' and '.join(found)}")


def _check_multipliers(spec: ArchSpec) -> None:
    """Check what goes with multipliers of products."""
    if spec.multipliers is None:
        return
    others = {
        "qkv_bias": spec.qkv_bias,
        "o_bias": spec.o_bias,
        "mlp_bias": spec.mlp_bias,
        "attention_gate": spec.attention_gate,
        "draft": spec.draft,
        "experts": spec.experts,
        "latent": spec.latent,
        "output_norms": spec.output_norms,
        "ungated": spec.ungated,
    }
    found = [name for name, one in others.items() if one]
    require(not found, f"multipliers do not go with {' and '.join(found)}")


def _check_mlp(spec: ArchSpec) -> None:
    """Check what goes with layers without a feed-forward layer."""
    if spec.mlp_layers is None:
        return
    require(
        len(spec.mlp_layers) == spec.num_layers,
        f"mlp_layers are {spec.mlp_layers} for {spec.num_layers} layers",
    )
    others = {
        "draft": spec.draft,
        "parallel_layers": spec.parallel_layers,
        "output_norms": spec.output_norms,
    }
    found = [other for other, one in others.items() if one]
    require(not found, f"mlp_layers does not go with {' and '.join(found)}")
    bare = [i for i in range(spec.num_layers) if spec.experts_of(i) and not spec.has_mlp(i)]
    require(not bare, f"layers {bare} have experts, and by mlp_layers no feed-forward layer")


def _check_parallel(spec: ArchSpec) -> None:
    """Check what goes with LayerNorm, and with attention and MLP side by side."""
    others = {
        "raw_inputs": spec.raw_inputs,
        "output_norms": spec.output_norms,
        "qk_norm": spec.qk_norm and spec.layer_norms and not spec.apart_qk_norm,
        "draft": spec.draft,
        "latent": spec.latent,
        "linear": spec.linear,
    }
    for name in ("layer_norms", "parallel_layers"):
        found = [other for other, one in others.items() if one]
        require(
            not (getattr(spec, name) and found),
            f"{name} does not go with {' and '.join(found)}",
        )
    require(
        bool(spec.layer_norms) or not spec.norm_biases,
        "norm_biases needs layer_norms, for other norms have none",
    )
    require(
        bool(spec.parallel_layers) or not spec.parallel_norms,
        "parallel_norms needs parallel_layers, for others have both norms anyway",
    )
    require(
        not spec.apart_qk_norm or (spec.qk_norm and not spec.whole_qk_norm),
        f"apart_qk_norm is of norms of each head: qk_norm is {spec.qk_norm}, whole_qk_norm is "
        f"{spec.whole_qk_norm}",
    )


def _check_ungated(spec: ArchSpec) -> None:
    """Check what goes with feed-forward layers without a gate, and with a bias of logits."""
    require(
        bool(spec.ungated) or spec.hidden_act in GATES or spec.hidden_act not in HIDDEN_ACTS,
        f"hidden_act {spec.hidden_act!r} needs layers without a gate, ungated; with one it is "
        f"one of {GATES}",
    )
    require(not (spec.ungated and spec.draft), "ungated does not go with draft")
    experts = spec.experts
    require(
        not spec.ungated
        or experts is None
        or (spec.hidden_act == "relu2" and not experts.biased and not experts.apart),
        f"experts without a gate have the activation relu2, no biases, and one norm with a "
        f"layer beside them: hidden_act is {spec.hidden_act!r}, experts are {experts}",
    )
    require(
        not (spec.head_bias and (spec.tie_word_embeddings or spec.draft)),
        "head_bias needs a head of a model's own; embeddings have no bias",
    )
