"""What an ArchSpec is held to that is as GPT-2 and OPT are: see `spec_checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxport.graphs.fields import require

if TYPE_CHECKING:
    from onnxport.graphs.spec import ArchSpec


def check_learned(spec: ArchSpec) -> None:
    """Check what goes with learned positions and norms of the stream. Raises ValueError."""
    rows = spec.learned_positions
    require(
        rows is None or spec.context_length <= rows,
        f"context_length is {spec.context_length}, and learned_positions are {rows}; a token "
        "behind them has none",
    )
    require(
        rows is None or not spec.ropes,
        f"learned_positions do not go with RoPE; rotated_layers are {spec.rotated_layers}",
    )
    require(
        not spec.stream_norms or bool(spec.layer_norms),
        "stream_norms are LayerNorms, and layer_norms says there are none",
    )
    others = {
        "draft": spec.draft,
        "altup": spec.altup,
        "layer_input_size": spec.layer_input_size,
        "stream_scale": spec.stream_scale,
        "residual_scale": spec.residual_scale,
    }
    behind = {
        "raw_inputs": spec.raw_inputs,
        "output_norms": spec.output_norms,
        "parallel_layers": spec.parallel_layers,
        "linear": spec.linear,
        "mlp_layers": spec.mlp_layers,
        "layer_scales": spec.layer_scales,
    }
    for name in ("learned_positions", "embedding_size", "stream_norms", "no_final_norm"):
        wrong = others | behind if name == "stream_norms" else others
        found = [other for other, one in wrong.items() if one]
        require(
            not (getattr(spec, name) and found),
            f"{name} does not go with {' and '.join(found)}",
        )
    require(
        not (spec.no_final_norm and spec.logits_scale),
        "logits_scale is of the final norm, and no_final_norm says there is none",
    )
