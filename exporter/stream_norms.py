"""Layers whose norms are of the stream, behind what attention and MLP add to it: OPT 350M."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxport.exporter.decoder import Decoder


def normed_stream(d: Decoder, hidden: str, select: Callable[[str], str] | None) -> tuple[str, str]:
    """All layers of the stream; see `Decoder.body`."""
    for layer in range(d.spec.num_layers):
        role = f"layers.{layer}"
        with d.g.scope(role):
            mixed = d.mixed(layer, hidden)
            if layer == d.spec.num_layers - 1 and select is not None:
                mixed = {name: select(one) for name, one in mixed.items()}
                hidden = select(hidden)
            hidden, _ = d.norm(hidden, d.projected(mixed), f"{role}.input_norm")
            hidden, _ = d.norm(hidden, d.mlp(layer, hidden), f"{role}.post_norm")
    return d.final_norm(hidden, "")
