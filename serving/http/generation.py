"""From prompts to deltas: what both completion endpoints share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request

from onnxport.providers.base import Capabilities
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.engine import EngineStats
from onnxport.serving.http.defaults import SamplingDefaults
from onnxport.serving.http.errors import SERVER_ERROR, ApiError
from onnxport.serving.outputs import CompletionDelta, TokenLogprobs
from onnxport.serving.params import SamplingParams

T = TypeVar("T")


class Tokenizer(Protocol):
    """What the server asks of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...


class Engine(Protocol):
    """What the server asks of the engine."""

    @property
    def capabilities(self) -> Capabilities:
        """What was loaded."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a model without."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        ...

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Check a request now; yield its deltas. Closing the generator aborts the request."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """What every endpoint needs."""

    engine: Engine
    model_name: str
    template: ChatTemplate
    defaults: SamplingDefaults
    started_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model that serves text."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None, "a server needs a model with a tokenizer"
        return tokenizer

    def check_model(self, name: str) -> None:
        """Raise a 404 unless `name` is the model that is served."""
        if name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this server has {self.model_name!r}",
                "model",
                "model_not_found",
            )


@dataclass(frozen=True, slots=True)
class Header:
    """What every response and every chunk of one request begins with."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Header:
        """Return the header of a new request."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)

    def body(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a whole response body or chunk."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


@dataclass(slots=True)
class Usage:
    """Token counts of a request, over all its prompts."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # prompt number -> cached prompt tokens

    def add(self, index: int, delta: CompletionDelta) -> None:
        """Count one delta of prompt number `index`."""
        self.completion_tokens += len(delta.token_ids)
        self.cached[index] = max(self.cached.get(index, 0), delta.num_cached_tokens)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass(slots=True)
class Collected:
    """A completion put together from its deltas."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)

    def add(self, delta: CompletionDelta) -> None:
        """Append one delta."""
        self.text += delta.text
        self.logprobs += token_logprobs(delta)
        self.finish_reason = delta.finish_reason or self.finish_reason


def token_logprobs(delta: CompletionDelta) -> list[tuple[int, TokenLogprobs]]:
    """Return (sampled token, its candidates) for each new token; empty unless asked for."""
    return list(zip(delta.token_ids, delta.logprobs or (), strict=False))


async def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, request_id: str
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Yield (prompt number, delta) as the prompts, run at once, give them.

    Closing the generator, or an error of one prompt, aborts all of them.

    Raises:
        ApiError: a request was ended by a failure of the engine.
        RequestError, CapacityError: a prompt cannot be run; none of them is scheduled then.
    """
    streams = [
        engine.stream(prompt, params, f"{request_id}-{index}")
        for index, prompt in enumerate(prompts)
    ]
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for first in only:
                yield 0, _checked(first)
        return
    queue: asyncio.Queue[tuple[int, CompletionDelta | None, BaseException | None]]
    queue = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[CompletionDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait((index, delta, None))
        except Exception as error:
            queue.put_nowait((index, None, error))
        else:
            queue.put_nowait((index, None, None))

    tasks = [asyncio.create_task(pump(*one)) for one in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            index, delta, error = await queue.get()
            if error is not None:
                raise error
            if delta is None:
                running -= 1
            else:
                yield index, _checked(delta)
    finally:
        for task in tasks:
            task.cancel()  # each closes its own stream, which aborts the request


def _checked(delta: CompletionDelta) -> CompletionDelta:
    """Return a delta, or raise what ended its request otherwise than by its own parameters."""
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "the engine failed on this request", kind=SERVER_ERROR)
    if delta.finish_reason == "abort":
        text = "the request was aborted because the server is shutting down; send it again later"
        raise ApiError(503, text, kind=SERVER_ERROR)
    return delta


class DisconnectedError(Exception):
    """The client went away before there was anything to send."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it as soon as the client is gone.

    Raises:
        DisconnectedError: the client is gone.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectedError
        return working.result()
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _disconnect(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def collect(
    deltas: AsyncIterator[tuple[int, CompletionDelta]], count: int, usage: Usage
) -> list[Collected]:
    """Return the whole completion of each of `count` prompts."""
    results = [Collected() for _ in range(count)]
    async for index, delta in deltas:
        usage.add(index, delta)
        results[index].add(delta)
    return results
