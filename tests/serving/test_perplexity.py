"""What a text's tokens are worth to a model, against plain loops over its logits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from onnxport.errors import CapacityError, ProviderError, RequestError
from onnxport.providers.base import Capabilities
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.evaluation.perplexity import LEAST_WINDOW, compare, measure, windows_of
from onnxport.serving.verify.sequence import LoneSequence

OPTIONS = NullOptions(vocab_size=50, num_blocks=30, block_size=4, max_model_len=100)
TOKENS = [(7 * i * i + 3 * i) % 50 for i in range(230)]


class Small(NullModel):
    """One whose steps have few tokens."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_batch_tokens=7)


class Colder(NullModel):
    """One whose guesses are less sure; the likeliest token is the same."""

    def run(self, inputs):  # type: ignore[no-untyped-def]
        return super().run(inputs) * np.float32(0.5)


def probabilities(window: list[int], temperature: float = 1.0) -> list[list[float]]:
    """Those of each token that counts, computed token by token."""
    sequence = LoneSequence(NullModel(OPTIONS), len(window))
    found = []
    for place, token in enumerate(window[:-1]):
        (logits,) = sequence.step([token], [0])
        if place >= len(window) // 2:
            weights = [math.exp(float(one) / temperature) for one in logits]
            found.append([one / sum(weights) for one in weights])
    return found


def test_windows_do_not_overlap_and_begin_as_texts_do() -> None:
    assert windows_of(TOKENS, 100, None, 50) == [TOKENS[:100], TOKENS[100:200]]
    found = windows_of(TOKENS, 100, 49, 50)
    assert found == [[49, *TOKENS[1:100]], [49, *TOKENS[101:200]]]
    assert windows_of(TOKENS[:5], LEAST_WINDOW, None, 50) == [TOKENS[:5]]


@pytest.mark.parametrize(
    ("tokens", "size", "words"),
    [
        (TOKENS, 4, "a window of 4 tokens counts fewer than two; 5 are the least"),
        (TOKENS[:99], 100, "the text has 99 tokens, fewer than a window of 100"),
        ([1, 2, 50, 3, 4], 5, "the text has token 50, and the model has 50 tokens"),
    ],
)
def test_what_cannot_be_measured(tokens: list[int], size: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        windows_of(tokens, size, None, 50)


@pytest.mark.parametrize("model", [NullModel, Small])
def test_perplexity(model: type[NullModel]) -> None:
    windows = windows_of(TOKENS, 100, None, 50)
    done: list[int] = []
    found = measure(model(OPTIONS), windows, done.append)
    told = [
        math.log(row[token])
        for window in windows
        for row, token in zip(probabilities(window), window[51:], strict=True)
    ]
    assert done == [1, 2]
    assert found.num_tokens == len(told) == 2 * 49
    assert found.mean_logprob == pytest.approx(np.mean(told))
    assert found.perplexity.mean == pytest.approx(math.exp(-np.mean(told)))
    error = np.std(told, ddof=1) / math.sqrt(len(told))
    assert found.perplexity.error == pytest.approx(found.perplexity.mean * error)


def test_divergence() -> None:
    windows = windows_of(TOKENS, 100, None, 50)
    own, base, divergence = compare(Colder(OPTIONS), Small(OPTIONS), windows)
    assert base == measure(NullModel(OPTIONS), windows)
    assert own == measure(Colder(OPTIONS), windows)
    kls = [
        sum(p * math.log(p / q) for p, q in zip(*rows, strict=True))
        for window in windows
        for rows in zip(probabilities(window), probabilities(window, 2.0), strict=True)
    ]
    assert divergence.kl.mean == pytest.approx(np.mean(kls))
    assert divergence.kl.error == pytest.approx(np.std(kls, ddof=1) / math.sqrt(len(kls)))
    assert divergence.kl_median == pytest.approx(np.median(kls))
    assert divergence.kl_99 == pytest.approx(np.quantile(kls, 0.99))
    assert divergence.kl_most == pytest.approx(max(kls))
    assert divergence.same_top == 1.0


def test_a_model_is_as_far_from_itself_as_nothing() -> None:
    windows = windows_of(TOKENS, 100, None, 50)
    own, base, divergence = compare(Small(OPTIONS), NullModel(OPTIONS), windows)
    assert own == base
    assert (divergence.kl_most, divergence.same_top) == (0.0, 1.0)


def test_the_shortest_window_counts_two_tokens() -> None:
    found = measure(NullModel(OPTIONS), windows_of(TOKENS[:5], LEAST_WINDOW, None, 50))
    assert found.num_tokens == 2
    assert math.isfinite(found.perplexity.error)


@pytest.mark.parametrize("logit", [5000.0, np.inf, np.nan])
def test_what_is_no_perplexity(logit: float) -> None:
    class Broken(NullModel):
        def run(self, inputs):  # type: ignore[no-untyped-def]
            logits = np.zeros_like(super().run(inputs))
            logits[:, 49] = logit
            return logits

    with pytest.raises(ProviderError, match="of which there is no perplexity"):
        measure(Broken(OPTIONS), windows_of([1] * 20, 20, None, 50))


def test_a_window_that_does_not_fit() -> None:
    with pytest.raises(CapacityError, match="121 tokens are to be checked"):
        measure(NullModel(OPTIONS), windows_of(TOKENS, 121, None, 50))
