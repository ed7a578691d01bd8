"""RoPE parameters from a GGUF file, as `config.json` would have them."""

from __future__ import annotations

import math
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.layouts import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

ORIGINAL: Final = "rope.scaling.original_context_length"

_KINDS: Final = ("none", "linear", "yarn", "longrope")
_MAGNITUDE: Final = "rope.scaling.attn_factor"
_TOLD: Final = "rope.scaling.yarn_attn_factor"
_SPEEDS: Final = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def rope_parameters(facts: Facts, head_size: int, *, partial: bool = False) -> dict[str, Any]:
    """The keys of `rope_parameters`.

    Args:
        facts: The file.
        head_size: Channels of a head.
        partial: A part of each head may rotate.

    Raises:
        CheckpointError: A value is missing, or of a wrong type.
        UnsupportedModelError: Scaling that is not known, or of two kinds at once.
    """
    meta = facts.metadata
    found: dict[str, Any] = {"rope_theta": meta.get("rope.freq_base", float, 10_000.0)}
    rotated = meta.get("rope.dimension_count", int, head_size)
    if rotated != head_size and not partial:
        raise UnsupportedModelError(
            f"{meta.path}: {meta.name('rope.dimension_count')} makes {rotated} of {head_size} "
            f"channels rotate, which {meta.architecture} models do not."
        )
    if partial:
        found["partial_rotary_factor"] = rotated / head_size
    kind, factor = _kind(facts)
    magnitude = meta.get(_MAGNITUDE, float, None)
    original = meta.get(ORIGINAL, int, None)
    factors = _factors(facts, kind)
    if factors:
        found["attention_factor"] = 1.0 if magnitude is None else magnitude
        trained = meta.require("context_length", int)
        found["original_max_position_embeddings"] = trained if original is None else original
        return found | factors
    if kind == "yarn":
        found |= {"rope_type": kind, "factor": factor}
        found["original_max_position_embeddings"] = meta.require(ORIGINAL, int)
        given = {name: meta.get(key, float, None) for name, key in _SPEEDS.items()}
        given["attn_factor"] = magnitude
        _check_magnitude(facts, factor)
        return found | {name: value for name, value in given.items() if value is not None}
    if magnitude not in (None, 1.0):
        raise UnsupportedModelError(
            f"{meta.path}: {meta.name(_MAGNITUDE)} is {magnitude}, of a RoPE of the type {kind!r}; "
            "supported is that of yarn and longrope. Export the original checkpoint."
        )
    return found if factor == 1 else found | {"rope_type": kind, "factor": factor}


def _check_magnitude(facts: Facts, factor: float) -> None:
    """Refuse what is called yarn's magnitude, where it is not the one that yarn has anyway.

    The converter writes two keys of `config.json` as this one, of which one is the whole magnitude
    and the other a factor of it, and llama.cpp reads neither.
    """
    own = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    told = facts.metadata.get(_TOLD, float, 1.0)
    if told != 1.0 and not math.isclose(told, own, rel_tol=1e-4):
        raise UnsupportedModelError(
            f"{facts.metadata.path}: {facts.metadata.name(_TOLD)} is {told}, which may be all of "
            f"yarn's magnitude or a factor of it; supported is {own:.6g}, which it is by itself. "
            "Export the original checkpoint."
        )


def _kind(facts: Facts) -> tuple[str, float]:
    """The type of scaling, and its factor; llama.cpp takes a factor alone for a linear one."""
    meta = facts.metadata
    given = {
        value
        for key in ("rope.scaling.factor", "rope.scale_linear")
        if (value := meta.get(key, float, 0.0))
    }
    kind = meta.get("rope.scaling.type", str, "linear" if given else "none")
    if kind not in _KINDS or len(given) > 1 or (kind == "yarn" and not given):
        raise UnsupportedModelError(
            f"{meta.path}: {meta.name('rope.scaling.type')} is {kind!r}, with the factors "
            f"{sorted(given)}; supported are {', '.join(_KINDS)}, with one factor. Export the "
            "original checkpoint."
        )
    return kind, 1.0 if kind == "none" else next(iter(given), 1.0)


def _factors(facts: Facts, kind: str) -> dict[str, Any]:
    """LongRoPE of what tensors say that frequencies are divided by.

    One tensor for contexts of any length (`rope_freqs`, which Llama 3.1's scaling becomes in GGUF)
    is both.
    """
    path = facts.metadata.path
    names = [name for name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS) if facts.has(name)]
    if not names:
        if kind == "longrope":
            raise CheckpointError(f"{path} lacks {LONG_FACTORS}, which longrope needs.")
        return {}
    if kind in ("yarn", "linear") or names not in ([ROPE_FACTORS], [SHORT_FACTORS, LONG_FACTORS]):
        raise UnsupportedModelError(
            f"{path} holds {', '.join(names)}, with RoPE scaling of the type {kind!r}; supported "
            f"are {ROPE_FACTORS} alone, or {SHORT_FACTORS} and {LONG_FACTORS}, with the types none "
            "and longrope. Export the original checkpoint."
        )
    return {
        "rope_type": "longrope",
        "short_factor": facts.numbers(names[0]),
        "long_factor": facts.numbers(names[-1]),
    }
