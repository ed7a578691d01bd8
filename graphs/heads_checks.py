"""What heads of attention are held to: their sizes, norms, positions and windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from onnxport.graphs.fields import require

if TYPE_CHECKING:
    from onnxport.graphs.spec import ArchSpec

# What layers of one model may differ in, or have besides.
_OF_LAYERS: Final = (
    "global_heads",
    "value_norm",
    "shared_kv_layers",
    "layer_scales",
    "layer_input_size",
    "altup",
)


def check_heads(spec: ArchSpec) -> None:
    """Check what is said of heads. Raises ValueError for what does not go together."""
    _check_kinds(spec)
    _check_query_heads(spec)
    _check_values(spec)
    _check_order(spec)
    _check_positions(spec)


def _check_kinds(spec: ArchSpec) -> None:
    """Check what goes with layers that differ, and with what they add besides."""
    found = [name for name in _OF_LAYERS if getattr(spec, name)]
    bare = found == ["global_heads"] and not (
        spec.global_heads is not None and spec.global_heads.keys_are_values
    )
    others = {
        "qkv_bias": spec.qkv_bias,
        "whole_qk_norm": spec.whole_qk_norm,
        "attention_gate": spec.attention_gate,
        "raw_inputs": spec.raw_inputs,
        "parallel_layers": spec.parallel_layers,
        "qk_norm_last": spec.qk_norm_last,
        "draft": spec.draft,
        "latent": spec.latent,
        "linear": spec.linear,
        "ungated": spec.ungated,
        "mlp_layers": spec.mlp_layers,
        "norm_biases": spec.norm_biases,
        "apart_qk_norm": spec.apart_qk_norm,
        "qk_norm = false": not spec.qk_norm and not bare,
        "output_norms = false": not spec.output_norms and not bare,
    }
    wrong = [name for name, one in others.items() if one]
    require(not (found and wrong), f"{' and '.join(found)} does not go with {' and '.join(wrong)}")
    if spec.global_heads is not None:
        heads = spec.global_heads
        require(
            spec.num_heads % heads.num_kv_heads == 0,
            f"num_heads {spec.num_heads} is not a multiple of the {heads.num_kv_heads} KV "
            "heads of layers without a window",
        )
        require(
            len(set(map(bool, spec.sliding_window))) == 2,
            "global_heads needs layers with and without a window",
        )
        require(
            heads.head_size == spec.head_size or spec.local_rope is not None,
            "global_heads of another size needs a local_rope",
        )
        require(
            spec.attention_scale is not None,
            "global_heads needs an attention_scale, for heads are of two sizes",
        )
    shared = spec.shared_kv_layers
    if shared is None:
        require(
            spec.shared_kv_intermediate_size is None,
            "shared_kv_intermediate_size needs shared_kv_layers",
        )
        return
    own = spec.sliding_window[: max(0, spec.num_layers - shared)]
    require(
        0 < shared < spec.num_layers and set(own) == set(spec.sliding_window),
        f"shared_kv_layers is {shared} of {spec.num_layers} layers; ahead of these there must "
        f"be one of each window: {spec.sliding_window}",
    )


def _check_query_heads(spec: ArchSpec) -> None:
    """Check what goes with layers that have other query heads than others."""
    heads = spec.layer_heads
    if heads is None:
        return
    require(
        len(heads) == spec.num_layers
        and max(heads) == spec.num_heads
        and all(one > 0 and one % spec.num_kv_heads == 0 for one in heads),
        f"layer_heads are {heads}; of {spec.num_layers} layers each has a multiple of "
        f"num_kv_heads, {spec.num_kv_heads}, and none more than num_heads, {spec.num_heads}",
    )
    others = {
        "whole_qk_norm": spec.whole_qk_norm,
        "qk_norm_last": spec.qk_norm_last,
        "apart_qk_norm": spec.apart_qk_norm,
        "attention_sinks": spec.attention_sinks,
        "global_heads": spec.global_heads,
        "draft": spec.draft,
        "latent": spec.latent,
        "linear": spec.linear,
    }
    found = [name for name, one in others.items() if one]
    require(not found, f"layer_heads does not go with {' and '.join(found)}")


def _check_values(spec: ArchSpec) -> None:
    """Check what goes with values of another size than keys, or times a number."""
    require(
        bool(spec.attention_sinks) or not spec.window_sinks,
        "window_sinks needs attention_sinks, whose layers it is about",
    )
    size = spec.value_size
    require(
        size is None or size < spec.head_size,
        f"value_size is {size}; it must be below head_size, {spec.head_size}",
    )
    others = {
        "qk_norm_last": spec.qk_norm_last,
        "attention_gate": spec.attention_gate,
        "value_norm": spec.value_norm,
        "keys_are_values": (spec.global_heads is not None and spec.global_heads.keys_are_values),
        "shared_kv_layers": spec.shared_kv_layers,
        "draft": spec.draft,
        "latent": spec.latent,
        "linear": spec.linear,
    }
    wrong = [name for name, one in others.items() if one]
    for name in ("value_size", "value_scale"):
        found = getattr(spec, name) is not None
        require(not (found and wrong), f"{name} does not go with {' and '.join(wrong)}")


def _check_order(spec: ArchSpec) -> None:
    """Check what goes with norms of queries and keys behind RoPE."""
    if not spec.qk_norm_last:
        return
    require(
        spec.qk_norm and not spec.whole_qk_norm and not spec.apart_qk_norm,
        f"qk_norm_last is of norms that heads share: qk_norm is {spec.qk_norm}, whole_qk_norm "
        f"is {spec.whole_qk_norm}, apart_qk_norm is {spec.apart_qk_norm}",
    )
    require(
        spec.ropes == (spec.rope,) and spec.rotated_layers is None,
        f"ahead of norms one RoPE rotates all layers; local_rope is {spec.local_rope}, "
        f"rotated_layers are {spec.rotated_layers}",
    )
    require(
        spec.rope.rotary_dim == spec.head_size and not spec.rope.interleaved,
        f"ahead of norms all of {spec.head_size} channels rotate, and no neighbours do: "
        f"rotary_dim is {spec.rope.rotary_dim}, interleaved is {spec.rope.interleaved}",
    )


def _check_positions(spec: ArchSpec) -> None:
    """Check what goes with queries that grow, and with norms of heads without weights."""
    others = {"draft": spec.draft, "altup": spec.altup}
    found = [name for name, one in others.items() if one]
    require(
        spec.query_growth is None or not found,
        f"query_growth does not go with {' and '.join(found)}",
    )
    require(
        not spec.chunked_windows or any(spec.sliding_window),
        f"chunked_windows is of windows, and sliding_window is {spec.sliding_window}",
    )
    if not spec.unweighted_qk_norm:
        return
    kinds = {
        "qk_norm = false": not spec.qk_norm,
        "whole_qk_norm": spec.whole_qk_norm,
        "apart_qk_norm": spec.apart_qk_norm,
        "qk_norm_last": spec.qk_norm_last,
        "shared_kv_layers": spec.shared_kv_layers,
    }
    found = [name for name, one in kinds.items() if one]
    require(not found, f"unweighted_qk_norm does not go with {' and '.join(found)}")
