"""What each type of KV cache costs: the memory of a token, and how far it moves the logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import OnnxportError, OptionError
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.features import Features
from onnxport.serving.verify.comparison import (
    EXACT,
    Comparison,
    Tolerance,
    choose_tolerance,
    compare,
)
from onnxport.serving.verify.prompts import stream
from onnxport.serving.verify.sequence import LoneSequence
from onnxport.serving.verify.variants import State

REFERENCE: Final = "float32"
CONTEXT_TOKENS: Final = 256  # of the sequence whose logits are compared
NUM_ROWS: Final = 32  # the last ones of it
Load = Callable[[LoadOptions], AbstractContextManager[Model]]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """One type of cache of one provider, all else computed in float32 as far as it can."""

    dtype: str
    state: State
    reason: str  # why it was skipped, or the error that kept it from being compared; "" otherwise
    bytes_per_token: int | None  # over all layers, keys and values, scales included
    share_of_float32: float | None  # of what a float32 cache takes
    error: Comparison | None  # of logits, against the same provider with a float32 cache
    tolerance: Tolerance | None


def compare_caches(
    load: Load,
    options: LoadOptions,
    features: Features | None,
    token_ids: list[int],
    *,
    has_experts: bool,
) -> tuple[CacheReport, ...]:
    """Load a provider with each type of cache that it has, the reference first.

    A type that the provider refuses beside the options is skipped; one that fails otherwise, while
    it is loaded or computes, has failed.

    Args:
        load: opens a model with options.
        options: what else is asked for; products in float32, so that caches alone differ.
        features: of the provider.
        token_ids: of the golden file; the sequence is made of them.
        has_experts: see `choose_tolerance`.

    Returns:
        A report for each type; none where there is no other than float32, or not even that
        beside the options.

    Raises:
        OnnxportError: the reference could not be loaded or computed.
    """
    kinds = () if features is None else features.kv_cache_dtypes
    if features is None or REFERENCE not in kinds or len(kinds) == 1:
        return ()
    level, attention = options.matmul_accuracy_level, options.attention
    if not features.go_together(options.dtype, REFERENCE, level, attention):
        return ()  # nothing to compare with
    with load(replace(options, kv_cache_dtype=REFERENCE)) as model:
        expected = _logits(model, token_ids)
        whole = _token_bytes(model)
    nothing = Comparison(0.0, 0.0, 1.0, 0.0)
    reports = [CacheReport(REFERENCE, "passed", "", whole, 1.0, nothing, EXACT)]
    for kind in (kind for kind in kinds if kind != REFERENCE):
        try:
            with load(replace(options, kv_cache_dtype=kind)) as model:
                found = compare(expected, _logits(model, token_ids))
                tolerance = choose_tolerance(model.capabilities, has_experts=has_experts)
                size = _token_bytes(model)
        except OnnxportError as error:
            state: State = "skipped" if isinstance(error, OptionError) else "failed"
            reports.append(CacheReport(kind, state, str(error), None, None, None, None))
            continue
        state = "passed" if tolerance.allows(found) else "failed"
        reports.append(CacheReport(kind, state, "", size, size / whole, found, tolerance))
    return tuple(reports)


def _token_bytes(model: Model) -> int:
    limits = model.capabilities
    return len(limits.windows) * limits.kv_block_bytes // limits.block_size


def _logits(model: Model, token_ids: list[int]) -> NDArray[np.float32]:
    """Logits of the last rows of a sequence, half of it in one step, the rest in another."""
    limits = model.capabilities
    length = min(CONTEXT_TOKENS, limits.max_model_len, limits.kv_tokens)
    tokens = [stream(token_ids, at, 0) for at in range(length)]
    sequence, first = LoneSequence(model, length), length // 2
    if first:
        sequence.step(tokens[:first], [0])
    rest = tokens[first:]
    rows = list(range(max(0, len(rest) - NUM_ROWS), len(rest)))
    return sequence.step(rest, rows).copy()
