"""What one HTTP request asks of the engine, and what is counted and collected of its answers."""

from __future__ import annotations

import time
from collections.abc import (
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from onnxport.serving.collect import mean_logprob, rank
from onnxport.serving.http.line_limits import LineLimits
from onnxport.serving.http.timings import Span
from onnxport.serving.outputs import CompletionDelta, TokenLogprobs
from onnxport.serving.params import RequestOptions, SamplingParams


@dataclass(frozen=True, slots=True)
class Header:
    """What every response and every chunk of one request begins with."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str | None = None  # of what computes it; None: it is not told

    @classmethod
    def new(cls, name: str, kind: str, model: str, fingerprint: str | None = None) -> Header:
        """Return the header of a new request."""
        return cls(name, kind, int(time.time()), model, fingerprint)

    def fields(self, **more: Any) -> dict[str, Any]:
        """Return a response body without choices."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            **({} if self.fingerprint is None else {"system_fingerprint": self.fingerprint}),
            **more,
        }

    def body(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a whole response body or chunk."""
        return self.fields(choices=choices, **more)


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine: `params.num_sequences` completions of each prompt.

    They are counted over all prompts: `prompt number * num_sequences + completion index`.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    options: RequestOptions
    id: str
    stream_interval: int = 1  # tokens of a chunk, at least; see `intervals.spaced`
    line_limits: LineLimits | None = None  # of each completion; None: any lines may come

    @property
    def num_choices(self) -> int:
        """How many completions there will be, before the best are chosen."""
        return len(self.prompts) * self.params.num_sequences


class Run(NamedTuple):
    """Tokens in a row that are reasoning, or in a row that are not."""

    is_thought: bool
    num_tokens: int


class TokenCounter(Protocol):
    """Counts the tokens of one text that are reasoning."""

    @property
    def num_tokens(self) -> int:
        """How many there were."""
        ...

    def add(self, token_ids: Sequence[int]) -> Sequence[Run]:
        """Take the next tokens; returns which of them are reasoning."""
        ...


@dataclass(slots=True)
class Usage:
    """Token counts of a job; a prompt counts once, whatever number of choices it has."""

    job: Job
    thoughts: Sequence[TokenCounter] | None = None  # of each choice; None: nothing is told of them
    prompt_tokens: int = field(init=False)
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # prompt number -> cached prompt tokens
    span: Span = field(default_factory=Span)
    begun: set[int] = field(default_factory=set)  # choices that have a token
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)  # see `CompletionDelta`

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(map(len, self.job.prompts))

    def add(self, choice: int, delta: CompletionDelta) -> Sequence[Run]:
        """Count one delta of a choice; returns which of its tokens are reasoning."""
        self.completion_tokens += len(delta.token_ids)
        if delta.token_ids:
            self.begun.add(choice)
        if delta.drafts is not None:
            self.drafts[choice] = delta.drafts
        self.span.add(delta)
        prompt = choice // self.job.params.num_sequences
        self.cached[prompt] = max(self.cached.get(prompt, 0), delta.num_cached_tokens)
        if self.thoughts is None:
            return (Run(False, len(delta.token_ids)),)
        return self.thoughts[choice].add(delta.token_ids)

    def so_far(self) -> dict[str, int]:
        """Return the counts that a chunk tells in mid-stream."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def timings(self) -> dict[str, Any]:
        """Return llama.cpp's `timings` so far."""
        cached = sum(self.cached.values())
        begun = min(len(self.begun), self.completion_tokens)  # a token may not be told
        told = self.span.body(self.prompt_tokens, cached, self.completion_tokens, begun)
        if self.drafts:
            checked, right = map(sum, zip(*self.drafts.values(), strict=True))
            told |= {"draft_n": checked, "draft_n_accepted": right}
        return told

    def body(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        told: dict[str, Any] = {}
        if self.thoughts is not None:
            num_tokens = sum(each.num_tokens for each in self.thoughts)
            told["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return {
            **self.so_far(),
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            **told,
        }


@dataclass(slots=True)
class Collected:
    """A completion put together from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # as in `CompletionDelta`
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # of its prompt
    is_missing: bool = False  # see `CompletionDelta`

    def add(self, delta: CompletionDelta) -> None:
        """Append one delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += token_logprobs(delta)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason
        self.is_missing = delta.is_missing
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    def score(self) -> tuple[int, float]:
        """Return by what completions of one prompt are compared."""
        sampled = [one for one, _ in self.logprobs]
        mean = mean_logprob(sampled, [one for _, one in self.logprobs])
        return rank(self.finish_reason), mean


def token_logprobs(delta: CompletionDelta) -> list[tuple[int, TokenLogprobs]]:
    """Return (sampled token, its candidates) for each new token; empty unless asked for."""
    return list(zip(delta.token_ids, delta.logprobs or (), strict=False))
