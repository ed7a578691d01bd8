"""How well a model foretells a text, and how far its guesses are from another model's.

The text's tokens are cut into windows that do not overlap. Of each window the second half counts,
so that every token that counts has at least half a window ahead of it; llama.cpp's
`llama-perplexity` does the same, so the figures can be compared. With p the probability that a
model gives a token,

    perplexity = exp(mean(-ln p)),

and the divergence of Kullback and Leibler between a base model's probabilities p and a model's q,
for all tokens of the vocabulary that may come at a place, is sum(p * (ln p - ln q)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError, RequestError
from onnxport.providers.base import Model
from onnxport.serving.verify.comparison import log_softmax
from onnxport.serving.verify.sequence import LoneSequence

LEAST_WINDOW: Final = 5  # tokens, of which two count
_ROWS: Final = 32  # whose probabilities are looked at at once: 64 bits for each of a vocabulary

Floats = NDArray[np.float64]
Note = Callable[[int], None]  # is told how many windows are done


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and its standard error as of independent tokens."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Perplexity:
    """What a model makes of a text.

    Attributes:
        perplexity: with its error.
        mean_logprob: ln p of a token, the mean.
        num_tokens: that counted.
    """

    perplexity: Estimate
    mean_logprob: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model's probabilities are from a base model's.

    Attributes:
        kl: of base and model, in nats, the mean over the tokens that counted.
        kl_median: likewise.
        kl_99: what 99 of 100 tokens stay below.
        kl_most: the largest.
        same_top: share of tokens at which both find the same token likeliest.
    """

    kl: Estimate
    kl_median: float
    kl_99: float
    kl_most: float
    same_top: float


def windows_of(
    token_ids: Sequence[int], size: int, beginning: int | None, vocab_size: int
) -> list[list[int]]:
    """Cut a text's tokens into windows; what is left at its end is left out.

    Args:
        token_ids: of the text.
        size: tokens of a window.
        beginning: the token that stands ahead of texts, which takes the place of each window's
            first one; None: there is none.
        vocab_size: how many tokens the model has.

    Raises:
        RequestError: a window is too short to count two tokens, or the text is shorter than one, or
            has a token that the model does not.
    """
    if size < LEAST_WINDOW:
        raise RequestError(
            f"a window of {size} tokens counts fewer than two; {LEAST_WINDOW} are the least"
        )
    if len(token_ids) < size:
        raise RequestError(
            f"the text has {len(token_ids)} tokens, fewer than a window of {size}; take a longer "
            "text, or shorter windows"
        )
    if (largest := max(token_ids)) >= vocab_size:
        raise RequestError(
            f"the text has token {largest}, and the model has {vocab_size} tokens; its tokenizer "
            "is another model's"
        )
    found = [list(token_ids[at : at + size]) for at in range(0, len(token_ids) - size + 1, size)]
    if beginning is not None:
        for window in found:
            window[0] = beginning
    return found


def measure(model: Model, windows: Sequence[Sequence[int]], note: Note | None = None) -> Perplexity:
    """Let a model foretell the second half of each window.

    Raises:
        CapacityError: the model's cache or context is smaller than a window.
        ProviderError: the model cannot be run, or gives no perplexity that is a number.
    """
    found: list[Floats] = []
    for number, window in enumerate(windows, 1):
        told = _logprobs(model, window, _step_tokens(model))
        found.extend(_told(logprobs, tokens) for logprobs, tokens in told)
        if note is not None:
            note(number)
    return _perplexity(np.concatenate(found))


def compare(
    model: Model, base: Model, windows: Sequence[Sequence[int]], note: Note | None = None
) -> tuple[Perplexity, Perplexity, Divergence]:
    """Likewise with two models, whose tokens mean the same; and their divergence.

    Vocabularies may be padded to different sizes; what both have is compared.

    Returns:
        The model's perplexity, the base model's, and the divergence of the two.
    """
    own, theirs, divergences, same = [], [], [], []
    most = min(_step_tokens(model), _step_tokens(base))
    for number, window in enumerate(windows, 1):
        pair = (_logprobs(one, window, most) for one in (model, base))
        for (found, tokens), (wanted, _) in zip(*pair, strict=True):
            own.append(_told(found, tokens))
            theirs.append(_told(wanted, tokens))
            common = min(found.shape[1], wanted.shape[1])
            p, q = wanted[:, :common], found[:, :common]
            terms = np.exp(p) * np.where(np.isneginf(p), 0.0, p - q)
            divergences.append(np.maximum(terms.sum(axis=1), 0.0))
            same.append(p.argmax(axis=1) == q.argmax(axis=1))
        if note is not None:
            note(number)
    kl = np.concatenate(divergences)
    divergence = Divergence(
        kl=_estimate(kl),
        kl_median=float(np.median(kl)),
        kl_99=float(np.quantile(kl, 0.99)),
        kl_most=float(kl.max()),
        same_top=float(np.concatenate(same).mean()),
    )
    return _perplexity(np.concatenate(own)), _perplexity(np.concatenate(theirs)), divergence


def _step_tokens(model: Model) -> int:
    """How many tokens a step of the model may have."""
    limits = model.capabilities
    return limits.max_batch_tokens or limits.max_model_len


def _logprobs(
    model: Model, window: Sequence[int], most: int
) -> Iterator[tuple[Floats, NDArray[np.int64]]]:
    """What a model says of the tokens that count: [rows, vocab], and which tokens came, [rows].

    `most` tokens are computed in a step.
    """
    sequence, first = LoneSequence(model, len(window)), len(window) // 2
    for begin in range(0, len(window), most):
        end = min(begin + most, len(window))
        counted = range(max(first, begin), min(end, len(window) - 1))
        # No step goes without a row.
        rows = [place - begin for place in counted] or [end - begin - 1]
        logits = sequence.step(window[begin:end], rows)
        for at in range(0, len(counted), _ROWS):
            came = [window[place + 1] for place in counted[at : at + _ROWS]]
            with np.errstate(invalid="ignore"):  # of logits that are not finite
                logprobs = log_softmax(logits[at : at + _ROWS].astype(np.float64))
            yield logprobs, np.array(came, np.int64)


def _told(logprobs: Floats, tokens: NDArray[np.int64]) -> Floats:
    """The log probabilities of the tokens that came, [rows]."""
    told: Floats = np.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return told


def _perplexity(logprobs: Floats) -> Perplexity:
    with np.errstate(over="ignore", invalid="ignore"):  # seen as what is not finite
        surprise = _estimate(-logprobs)
        perplexity = float(np.exp(surprise.mean))
    if not math.isfinite(perplexity):
        raise ProviderError(
            f"a token's mean log probability is {-surprise.mean}, of which there is no perplexity; "
            "the model's logits are not finite, or its tokens another model's"
        )
    estimate = Estimate(perplexity, perplexity * surprise.error)
    return Perplexity(estimate, -surprise.mean, len(logprobs))


def _estimate(values: Floats) -> Estimate:
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(float(values.mean()), error)
