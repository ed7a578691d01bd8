"""Sliding windows of layers, as configurations tell them."""

from __future__ import annotations

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config, short


def layer_windows(config: Config) -> tuple[int | None, ...]:
    """The sliding window of each layer, from Qwen's keys.

    `use_sliding_window` turns it on; `layer_types` says which layers have it, and where absent
    those from `max_window_layers` on do (transformers' Qwen2Config).
    """
    num_layers = config.require("num_hidden_layers", int)
    enabled = config.get("use_sliding_window", bool, False)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 4096)
    first = config.get("max_window_layers", int, 28)
    window = window if enabled else None
    slides = [window is not None and i >= first for i in range(num_layers)]
    return windows_by_type(
        config,
        window,
        ["sliding_attention" if one else "full_attention" for one in slides],
        needs="use_sliding_window = true and a sliding_window",
    )


def windows_by_type(
    config: Config, window: int | None, defaults: list[str], needs: str = "a sliding_window"
) -> tuple[int | None, ...]:
    """The sliding window of each layer, as `layer_types` says, or `defaults` where absent.

    Args:
        config: The model's configuration.
        window: Tokens; None: layers may not slide.
        defaults: A layer's type, layer by layer.
        needs: What it takes that layers may slide, for errors.

    Raises:
        UnsupportedModelError: Types that are not known, or layers that slide without a window.
    """
    types = config.get("layer_types", list, defaults)
    known = {"full_attention": None, "sliding_attention": window}
    unknown = len(types) != len(defaults) or not all(str(kind) in known for kind in types)
    if unknown or (window is None and "sliding_attention" in types):
        raise UnsupportedModelError(
            f"{config.path}: layer_types is {short(types)} and the window {window}; supported are "
            f"{len(defaults)} entries (one a layer) from {sorted(known)}, and sliding_attention "
            f"only with {needs}."
        )
    return tuple(known[kind] for kind in types)
