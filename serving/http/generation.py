"""From prompts to deltas: what both completion endpoints share."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from onnxport.errors import RequestError
from onnxport.serving.http.errors import FINAL, SERVER_ERROR, STOPPED, ApiError
from onnxport.serving.http.job import Collected, Job, Usage
from onnxport.serving.http.line_limits import Deltas, limited
from onnxport.serving.http.service import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions

T = TypeVar("T")


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
