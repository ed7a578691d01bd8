"""Tables of cosines and sines for rotary position embedding.

Formulas are those of transformers' `modeling_rope_utils`, which every checkpoint here was made
with. Frequencies and angles are rounded to float32 as they are there, so that long positions agree
too.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.rope_spec import RopeSpec


def tables(
    rope: RopeSpec, context_length: int, positions: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The cos and sin of each position.

    Args:
        rope: The embedding's parameters.
        context_length: Longest sequence in tokens.
        positions: Rows that are wanted; None: all.

    Returns:
        Two arrays, float32 [positions or context_length, rotary_dim / 2].
    """
    frequencies = inverse_frequencies(rope, context_length).astype(np.float32)
    rows = context_length if positions is None else positions
    angles = np.arange(rows, dtype=np.float32)[:, None] * frequencies
    scale = np.float32(rope.attention_factor)
    cos, sin = np.cos(angles), np.sin(-angles if rope.turns_back else angles)
    if scale != 1:
        cos *= scale
        sin *= scale
    return cos, sin


def inverse_frequencies(rope: RopeSpec, context_length: int) -> NDArray[np.float64]:
    """Radians per position of each channel pair; float64 [rotary_dim / 2].

    Sources: default arXiv:2104.09864; linear arXiv:2306.15595; llama3 the Llama 3.1 release; yarn
    arXiv:2309.00071; longrope arXiv:2402.13753; proportional Gemma 4, whose last pairs do not turn,
    though frequencies are those of all pairs. Two types change as a sequence grows beyond the
    original length, which a cache of rotated keys cannot follow: dynamic (NTK-aware) its base, and
    longrope its factors. Here they are those for `context_length`, at every position, so the result
    is transformers' up to the original length if the context is no longer, and for a sequence of
    exactly `context_length` tokens beyond it.
    """
    theta = rope.theta
    if rope.type == "dynamic":
        theta = _dynamic_base(rope, context_length)
    # Rounded to float32 where transformers rounds: at long positions a last bit tells.
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
    if rope.factors is not None:
        powers *= np.array(rope.factors, np.float32)
    base = (np.float32(1) / powers).astype(np.float64)
    if rope.type == "linear":
        assert rope.factor is not None
        return base / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, base)
    if rope.type == "proportional":
        assert rope.factor is not None
        assert rope.rotated_pairs is not None
        turns = np.arange(len(base)) < rope.rotated_pairs
        return np.where(turns, base / rope.factor, 0.0)
    if rope.type == "yarn":
        return _yarn(rope, base)
    return base


def _dynamic_base(rope: RopeSpec, context_length: int) -> float:
    assert rope.factor is not None
    assert rope.original_context_length is not None
    ratio = max(context_length, rope.original_context_length) / rope.original_context_length
    growth = rope.factor * ratio - (rope.factor - 1)
    return float(rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(rope: RopeSpec, base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    assert rope.factor is not None
    assert rope.original_context_length is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    rotations = rope.original_context_length * base / (2 * math.pi)  # within the original context
    span = rope.high_freq_factor - rope.low_freq_factor
    if span == 0:  # as Llama 4 Scout has it: nothing is between
        return np.where(rotations < rope.low_freq_factor, base / rope.factor, base)
    keep = np.clip((rotations - rope.low_freq_factor) / span, 0, 1)
    return (1 - keep) * base / rope.factor + keep * base


def _yarn(rope: RopeSpec, base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Channels that rotate rarely are interpolated, those that rotate often are kept."""
    assert rope.factor is not None
    assert rope.original_context_length is not None
    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    original = rope.original_context_length

    def channel(rotations: float) -> float:
        """The pair that rotates so many times within the original context."""
        ratio = math.log(original / (rotations * 2 * math.pi)) / math.log(rope.theta)
        return rope.rotary_dim * ratio / 2

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # as transformers does: no division by zero
    ramp = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
    blended: NDArray[np.float64] = base / rope.factor * ramp + base * (1 - ramp)
    return blended


def growth_factors(growth: GrowthSpec, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """What queries at these positions are multiplied with, float32 of their shape."""
    intervals = (positions + growth.offset) // growth.interval
    return (1 + growth.strength * np.log1p(intervals)).astype(np.float32)
