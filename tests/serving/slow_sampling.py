"""Sampling as its definition reads: a row at a time, a token at a time. The tests' reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.params import SamplingParams

SLACK = 1e-5  # how far rounding may move a border between two tokens
ROUNDING = 2e-6  # of a weight beside the largest one, 1, in float32


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
    if params.repeat_last_n is not None:  # all penalties look at the same tokens
        before = [*prompt, *output]
        prompt = output = before[-params.repeat_last_n :] if params.repeat_last_n > 0 else before
        if params.repeat_last_n == 0:
            prompt = output = []
    for token_id in {*prompt, *output}:
        penalty = np.float32(params.repetition_penalty)
        value = values[token_id]
        values[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in {*output}:
        count = np.float32(list(output).count(token_id))
        values[token_id] -= np.float32(params.frequency_penalty) * count
        values[token_id] -= np.float32(params.presence_penalty)
    return [float(value) for value in values]


def probabilities(
    logits: Sequence[float], params: SamplingParams, off: float = -1e-9
) -> dict[int, float]:
    """The probability of each token that can be drawn, in the order of drawing.

    `off` is added to `min_p`. XTC strikes where it may.
    """
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    ranked = [token_id for token_id in ranked if logits[token_id] > -math.inf]
    if params.greedy:
        return {ranked[0]: 1.0}
    best = logits[ranked[0]]
    if params.top_n_sigma:
        mean = sum(logits[t] for t in ranked) / len(ranked)
        variance = sum((logits[t] - mean) ** 2 for t in ranked) / len(ranked)
        floor = np.float32(best - params.top_n_sigma * math.sqrt(variance))
        ranked = [t for t in ranked if logits[t] >= floor]
    weights = {t: math.exp((logits[t] - best) / params.temperature) for t in ranked}
    kept = [t for t in ranked if weights[t] >= params.min_p + off][: params.top_k]
    if params.typical_p < 1.0:
        kept = typical([weights[t] for t in kept], kept, params.typical_p)
    total = sum(weights[t] for t in kept)
    nucleus, before = [], 0.0
    for token_id in kept:
        if before >= params.top_p * total and params.top_p < 1.0:
            break
        nucleus.append(token_id)
        before += weights[token_id]
    total = sum(weights[t] for t in nucleus)
    if params.xtc_probability:
        likely = [t for t in nucleus if weights[t] >= params.xtc_threshold * total]
        nucleus = [t for t in nucleus if t not in likely[:-1]]
        total = sum(weights[t] for t in nucleus)
    return {t: weights[t] / total for t in nucleus}


def temperature_of(logits: Sequence[float], params: SamplingParams) -> float:
    """The temperature of one token, by the entropy of all that may come."""
    reach = params.dynatemp_range
    finite = [one for one in logits if one > -math.inf]
    if params.mirostat or not reach:
        return params.temperature
    weights = [math.exp(one - max(finite)) for one in finite]
    chances = [weight / sum(weights) for weight in weights]
    entropy = -sum(chance * math.log(chance) for chance in chances if chance)
    most = math.log(len(finite))
    share = min(1.0, max(0.0, entropy / most)) if most else 1.0
    low, high = max(0.0, params.temperature - reach), params.temperature + reach
    return low + (high - low) * share**params.dynatemp_exponent


def mirostat(
    logits: Sequence[float], params: SamplingParams, mu: float, vocab: int
) -> dict[int, float]:
    """The probability of each token that Mirostat leaves, the likeliest first, as in llama.cpp."""
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    ranked = [token_id for token_id in ranked if logits[token_id] > -math.inf]
    best = logits[ranked[0]]
    weights = [math.exp((logits[t] - best) / params.temperature) for t in ranked]
    chances = [weight / sum(weights) for weight in weights]
    if params.mirostat == 2:
        size = sum(chance >= 2.0**-mu for chance in chances)
    else:
        products = squares = 0.0
        for i in range(min(100, len(ranked)) - 1):
            rank = math.log((i + 2) / (i + 1))
            products += rank * (logits[ranked[i]] - logits[ranked[i + 1]]) / params.temperature
            squares += rank**2
        size = 1
        if squares:
            falls = products / squares
            beyond = falls - 1
            base = 2**mu * (beyond / (1 - vocab**-beyond) if beyond else 1 / math.log(vocab))
            log_k = math.log(base) / falls if falls else math.copysign(math.inf, base - 1)
            size = len(ranked) if log_k > math.log(len(ranked)) else int(math.exp(log_k))
    size = max(1, min(size, len(ranked)))
    total = sum(chances[:size])
    return {t: chance / total for t, chance in zip(ranked, chances[:size], strict=False)}


def typical(weights: Sequence[float], ranked: Sequence[int], share: float) -> list[int]:
    """The tokens whose surprise is nearest to the entropy, in their order."""
    total = sum(weights)
    surprise = [-math.log(one) if one else math.inf for one in weights]  # but for log(total)
    expected = sum(w * s for w, s in zip(weights, surprise, strict=True) if w) / total
    first = sum(one < expected for one in surprise)  # of those that surprise more
    nearest = sorted(
        range(len(weights)),
        key=lambda i: (abs(surprise[i] - expected), i >= first, i if i >= first else -i),
    )
    found, before = [], 0.0
    for place in nearest:
        if before >= share * total:
            break
        found.append(place)
        before += weights[place]
    return [ranked[place] for place in sorted(found)]


def possible(logits: Sequence[float], params: SamplingParams, number: float) -> set[int]:
    """The tokens that `number`, in [0, 1), may draw: one, or two where it is near a border.

    Likewise where a weight is as far from `min_p` as float32 rounds it.
    """
    if not params.greedy and params.top_k is None and params.top_p == 1.0 and params.min_p == 0.0:
        return race(logits, params.temperature, number)
    found = set()
    for off in (-ROUNDING, ROUNDING):
        end = 0.0
        for token_id, probability in probabilities(logits, params, off).items():
            start, end = end, end + probability
            if start - SLACK <= number < end + SLACK:
                found.add(token_id)
    return found


def race(logits: Sequence[float], temperature: float, number: float) -> set[int]:
    """The tokens whose clocks may ring first: each rings after E / exp(logit / temperature)."""
    whole = int(number * 2**53)
    sums = []
    for token_id, logit in enumerate(logits):
        group = bits(whole, 1, token_id // 64)
        clock = exponential(group) / 64  # the earliest of 64, and that of any of them
        if group % 64 != token_id % 64:
            clock += exponential(bits(whole, 2, token_id))
        sums.append(logit / temperature - math.log(clock))
    least = max(sums) - 1e-9
    return {token_id for token_id, one in enumerate(sums) if one >= least}


def bits(number: int, stream: int, place: int) -> int:
    """64 random bits: SplitMix64's output at a place, in a stream that begins at a mixed number."""
    start = _mix64(number + stream * 0x9E3779B97F4A7C15)
    return _mix64(start + (place + 1) * 0x9E3779B97F4A7C15)


def exponential(random_bits: int) -> float:
    """An exponential variable of the first 53 of 64 random bits."""
    return -math.log((random_bits // 2**11 + 0.5) / 2**53)


def _mix64(value: int) -> int:
    value %= 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31
