"""Joining the deltas of one request into its output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionDelta,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
)
from onnxport.serving.request import Request


@dataclass(slots=True)
class _Completion:
    """What the deltas of one completion add up to."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    is_missing: bool = False

    def score(self) -> tuple[int, float]:
        """Return by what completions are compared."""
        return rank(self.finish_reason), mean_logprob(self.token_ids, self.logprobs)

    def add(self, delta: CompletionDelta) -> None:
        assert self.finish_reason is None, f"{delta.request_id}: a delta after the last one"
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.error = delta.error
        self.cumulative_logprob = delta.cumulative_logprob
        self.is_missing = delta.is_missing


def rank(reason: str | None) -> int:
    """Return what counts before log probabilities where completions are compared.

    Whole ones are better than broken ones. One that repeats itself is between them: each time that
    a pattern comes again it is likelier.
    """
    if reason in ("stop", "length"):
        return 2
    return 1 if reason == "repetition" else 0


def mean_logprob(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> float:
    """Return the mean log probability of a completion's tokens, by which the best are chosen.

    That is "the highest log probability per token" of OpenAI's `best_of`; -inf without tokens.
    """
    values = [one[token_id].logprob for token_id, one in zip(token_ids, logprobs, strict=True)]
    return sum(values) / len(values) if values else -math.inf


class Collector(Protocol):
    """Joins the deltas of one request."""

    def add(self, delta: CompletionDelta) -> None:
        """Take the next delta."""
        ...

    def fail(self, error: str) -> None:
        """The request could not be run at all."""
        ...


class PooledCollector:
    """Keeps the one delta of a prompt that is embedded or classified.

    Attributes:
        request: of the prompt.
        vector: its vector, or the number of each label; None: there is none, or not yet.
        error: why there is none.
        finished: whether the request has ended.
        num_cached_tokens: prompt tokens whose K/V were not computed for it.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.vector: NDArray[np.float32] | None = None
        self.error: str | None = None
        self.finished = False
        self.num_cached_tokens = 0

    def add(self, delta: CompletionDelta) -> None:
        """Take the delta."""
        self.finished, self.num_cached_tokens = True, delta.num_cached_tokens
        if delta.embedding is None:
            self.fail(delta.error or f"it ended before its time ({delta.finish_reason})")
        else:
            self.vector = delta.embedding

    def fail(self, error: str) -> None:
        """There is no vector."""
        self.finished, self.error = True, error

    def embedding(self) -> EmbeddingRequestOutput:
        """Return what became of a prompt that was to be embedded."""
        return EmbeddingRequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=EmbeddingOutput(self._numbers(), self.error),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.request.metrics,
        )

    def classification(self, labels: Sequence[str]) -> ClassificationRequestOutput:
        """Return what became of a prompt that was to be classified, by the model's labels."""
        label = None if self.vector is None else labels[int(self.vector.argmax())]
        return ClassificationRequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=ClassificationOutput(self._numbers(), label, self.error),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.request.metrics,
        )

    def _numbers(self) -> list[Any]:
        return [] if self.vector is None else self.vector.tolist()


class OutputCollector:
    """Joins the deltas of one request, in order, into a `RequestOutput`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._completions = [_Completion() for _ in range(request.params.num_sequences)]
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def add(self, delta: CompletionDelta) -> None:
        """Take the next delta."""
        self._completions[delta.index].add(delta)
        self._num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs

    def fail(self, error: str) -> None:
        """The request could not be run at all."""
        for completion in self._completions:
            completion.finish_reason, completion.error = "error", error

    def output(self) -> RequestOutput:
        """Return everything so far."""
        params = self._request.params
        finished = all(one.finish_reason is not None for one in self._completions)
        chosen = [one for one in self._completions[: params.n] if not one.is_missing]
        if finished and params.num_sequences > params.n and not params.use_beam_search:
            chosen = sorted(self._completions, key=_Completion.score, reverse=True)[: params.n]
        outputs = tuple(
            CompletionOutput(
                index=index,
                text="".join(one.text),
                token_ids=tuple(one.token_ids),
                logprobs=tuple(one.logprobs) if params.logprobs is not None else None,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                error=one.error,
                cumulative_logprob=one.cumulative_logprob,
            )
            for index, one in enumerate(chosen)
        )
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._request.metrics,
            prompt_logprobs=self._prompt_logprobs,
        )
