"""Sampling as its definition reads: a row at a time, a token at a time. The tests' reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.params import SamplingParams

SLACK = 1e-5  # how far rounding may move a border between two tokens


def changed(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Collection[int],
    encode: Callable[[str], list[int]],
) -> list[float]:
    """The logits of the next token after all that changes them, in float32 steps."""
    values = [np.float32(value) for value in logits]
    for token_id, bias in dict(params.logit_bias).items():
        values[token_id] += np.float32(bias)
    for token_id in range(len(values)):
        is_end = token_id in end_ids or token_id in params.stop_token_ids
        if is_end and len(output) < params.min_tokens:
            values[token_id] = np.float32(-np.inf)
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            values[token_id] = np.float32(-np.inf)
        for text in params.bad_words:
            for word in (encode(text), encode(" " + text)):
                longer = [*output, token_id]
                if longer[-len(word) :] == word:
                    values[token_id] = np.float32(-np.inf)
    for token_id in {*prompt, *output}:
        penalty = np.float32(params.repetition_penalty)
        value = values[token_id]
        values[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in {*output}:
        count = np.float32(list(output).count(token_id))
        values[token_id] -= np.float32(params.frequency_penalty) * count
        values[token_id] -= np.float32(params.presence_penalty)
    return [float(value) for value in values]


def probabilities(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """The probability of each token that can be drawn, in the order of drawing."""
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    ranked = [token_id for token_id in ranked if logits[token_id] > -math.inf]
    if params.greedy:
        return {ranked[0]: 1.0}
    best = logits[ranked[0]]
    weights = {t: math.exp((logits[t] - best) / params.temperature) for t in ranked}
    kept = [t for t in ranked if weights[t] >= params.min_p - 1e-9][: params.top_k]
    total = sum(weights[t] for t in kept)
    nucleus, before = [], 0.0
    for token_id in kept:
        if before >= params.top_p * total and params.top_p < 1.0:
            break
        nucleus.append(token_id)
        before += weights[token_id]
    if params.top_k is None and params.top_p == 1.0 and params.min_p == 0.0:
        nucleus.sort()  # the whole vocabulary is drawn from in its own order
    total = sum(weights[t] for t in nucleus)
    return {t: weights[t] / total for t in nucleus}


def possible(logits: Sequence[float], params: SamplingParams, number: float) -> set[int]:
    """The tokens that `number`, in [0, 1), may draw: one, or two where it is near a border."""
    found, end = set(), 0.0
    for token_id, probability in probabilities(logits, params).items():
        start, end = end, end + probability
        if start - SLACK <= number < end + SLACK:
            found.add(token_id)
    return found
