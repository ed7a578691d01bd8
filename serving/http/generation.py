"""From prompts to deltas: what both completion endpoints share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import Request

from onnxport.errors import RequestError
from onnxport.serving.collect import mean_logprob, rank
from onnxport.serving.http.errors import FINAL, SERVER_ERROR, STOPPED, ApiError
from onnxport.serving.http.line_limits import Deltas, LineLimits, limited
from onnxport.serving.http.service import Engine
from onnxport.serving.http.timings import Span
from onnxport.serving.outputs import CompletionDelta, TokenLogprobs
from onnxport.serving.params import RequestOptions, SamplingParams

T = TypeVar("T")


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


def check_number(engine: Engine, num_prompts: int, field: str = "prompt") -> None:
    """Refuse more prompts in one request than may wait.

    Args:
        engine: where they would.
        num_prompts: of the request.
        field: that they are in.

    Raises:
        RequestError: there are more.
    """
    if num_prompts > engine.most_prompts:
        raise RequestError(
            f"one request has {num_prompts} prompts, and this server lets "
            f"{engine.most_prompts} wait; send them in several requests",
            field,
        )


async def generate(engine: Engine, job: Job) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Yield (choice, delta) as the prompts, run at once, give them.

    Closing the generator, or an error of one prompt, aborts all of them.

    Raises:
        ApiError: a request was ended by its deadline or by a failure of the engine.
        RequestError, CapacityError, OverloadedError: a prompt cannot be run; none of them is
            scheduled then.
    """
    check_number(engine, len(job.prompts))
    grammar = None
    if job.params.structured_outputs is not None:
        grammar = await engine.compile(job.params.structured_outputs)
    starts = [
        partial(engine.stream, prompt, job.params, f"{job.id}-{number}", job.options, grammar)
        for number, prompt in enumerate(job.prompts)
    ]
    within = None
    if job.line_limits is not None:
        within = partial(limited, num_choices=job.params.num_sequences, limits=job.line_limits)
    async with aclosing(together(starts, job.options, within)) as deltas:
        async for number, delta in deltas:
            yield number * job.params.num_sequences + delta.index, delta


async def together(
    starts: Sequence[Callable[[], Deltas]],
    options: RequestOptions,
    within: Callable[[Deltas], Deltas] | None = None,
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Yield (number of the prompt, delta) of prompts that run at once.

    Closing the generator, or an error of one prompt, aborts all of them.

    Args:
        starts: what checks each prompt and returns its stream.
        options: of all of them.
        within: returns as much of the stream of a prompt as is wanted, and closes it behind that;
            None: all is.

    Raises:
        ApiError: a request was ended by its deadline or by a failure of the engine.
        RequestError, CapacityError, OverloadedError: a prompt cannot be run; none of them is
            scheduled then.
    """
    async with AsyncExitStack() as stack:
        streams: list[Deltas] = []
        for start in starts:
            stream = await stack.enter_async_context(aclosing(start()))
            if within is not None:
                stream = await stack.enter_async_context(aclosing(within(stream)))
            streams.append(stream)
            await asyncio.sleep(0)  # there may be a thousand, and others have their turn
        deltas = await stack.enter_async_context(aclosing(_merged(streams)))
        async for number, delta in deltas:
            _check(delta, options)
            yield number, delta


async def _merged(
    streams: Sequence[Deltas],
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Yield (number of the stream, delta) of streams that run at once."""
    if len(streams) == 1:  # no task, no queue
        async for first in streams[0]:
            yield 0, first
        return
    queue: asyncio.Queue[tuple[int, CompletionDelta | None, BaseException | None]]
    queue = asyncio.Queue()

    async def pump(number: int, stream: Deltas) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((number, delta, None))
        except Exception as error:
            queue.put_nowait((number, None, error))
        else:
            queue.put_nowait((number, None, None))

    tasks = [asyncio.create_task(pump(*one)) for one in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            number, delta, error = await queue.get()
            if error is not None:
                raise error
            if delta is None:
                running -= 1
            else:
                yield number, delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # their streams can be closed then


def _check(delta: CompletionDelta, options: RequestOptions) -> None:
    """Raise what ended a request otherwise than by its own parameters."""
    if delta.failure is not None and delta.failure.refused:
        raise ApiError(400, delta.failure.message)
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "the engine failed on this request", kind=SERVER_ERROR)
    if delta.finish_reason == "abort":
        raise replace(STOPPED)
    if delta.finish_reason == "timeout":
        raise ApiError(
            504,
            f"the request was not finished {options.timeout_s} seconds after it arrived; allow it "
            "more with timeout_s, ask for fewer tokens, or send it when the server has less to do",
            "timeout_s",
            "request_timeout",
            SERVER_ERROR,
            FINAL,
        )


class DisconnectedError(Exception):
    """The client went away before there was anything to send."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it as soon as the client is gone.

    Raises:
        DisconnectedError: the client is gone.
    """
    working = asyncio.ensure_future(work)
    await is_done(request, working)
    return working.result()


async def is_done(
    request: Request, working: asyncio.Future[Any], timeout_s: float | None = None
) -> bool:
    """Wait for work, but cancel it as soon as the client is gone.

    Args:
        request: of the client.
        working: what is waited for.
        timeout_s: how long; None: until it is done.

    Returns:
        Whether it is done. If not, it goes on.

    Raises:
        DisconnectedError: the client is gone.
    """
    watching = asyncio.ensure_future(_disconnect(request))
    goes_on = False
    try:
        both = {working, watching}
        done, _ = await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        goes_on = not done
        if done == {watching}:
            raise DisconnectedError
        return not goes_on
    finally:
        watching.cancel()
        if not goes_on:
            await drop(working)


async def drop(working: asyncio.Future[Any]) -> None:
    """Cancel what is not done yet; nobody is left to be told of it."""
    working.cancel()
    if not working.done():
        await asyncio.wait({working})
    if not working.cancelled():
        working.exception()


async def _disconnect(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def collect(
    deltas: AsyncIterator[tuple[int, CompletionDelta]], usage: Usage
) -> list[Collected]:
    """Return every choice of a job as a whole: of each prompt's completions the best `n`."""
    results = [Collected() for _ in range(usage.job.num_choices)]
    async for choice, delta in deltas:
        usage.add(choice, delta)
        results[choice].add(delta)
    params = usage.job.params
    chosen: list[Collected] = []
    for start in range(0, len(results), params.num_sequences):
        group = results[start : start + params.num_sequences]
        for one in group:  # the first one is told
            one.prompt_logprobs = group[0].prompt_logprobs
        if params.num_sequences > params.n and not params.use_beam_search:
            group = sorted(group, key=Collected.score, reverse=True)
        chosen += group[: params.n]
    return chosen
