"""A load on a server with OpenAI's API: ours, or anybody's."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onnxport.errors import ProviderError, RequestError
from onnxport.serving.bench.load import Ask, words
from onnxport.serving.bench.records import RequestRecord

if TYPE_CHECKING:
    import httpx

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)
MESSAGE_CHARS = 200  # of an error that are kept
DONE = "[DONE]"  # the last event of a stream
LINGER_S = 1.0  # that the end of a response may come after it
KEEPALIVE_S = 2.0  # that a connection waits for its next request; servers close theirs after 5 s
Clock = Callable[[], float]

_LINE_END = re.compile(rb"[\r\n]")


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how.

    Attributes:
        base_url: of the server, without /v1.
        endpoint: one of ENDPOINTS.
        model: as the server names it.
        api_key: sent as a bearer token; None: none.
        timeout_s: a request that takes longer has failed.
        fields: what every body holds besides prompt, limits and streaming, such as temperature.
    """

    base_url: str
    endpoint: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a request.

        Token ids can be sent to the completions endpoint alone; chats get as many letters.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        if self.endpoint == CHAT:
            text = ask.prompt if isinstance(ask.prompt, str) else words(ask.prompt)
            return body | {"messages": [{"role": "user", "content": text}]}
        prompt = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        return body | {"prompt": prompt}


# What a delta of a chat may have of what the model wrote; reasoning has two names.
OUTPUT = ("content", "reasoning", "reasoning_content", "tool_calls")


class _StreamError(Exception):
    """A request failed; the message says how."""


@dataclass(slots=True)
class _Stream:
    """What one response brought so far."""

    output_s: list[float] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    ended: bool = False  # the server said why the text ends
    done_s: float | None = None  # when the last event came, behind which the response ends

    def add(self, data: str, now_s: float) -> bool:
        """Note one event; returns whether it was the last. What comes behind that is nothing."""
        if self.done_s is not None:
            return False
        if data == DONE:
            self.done_s = now_s
            return True
        try:
            found = json.loads(data)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _StreamError(f"an event is not JSON: {data[:60]!r}") from error
        chunk = _members(found)
        if chunk.get("error") is not None:
            raise _StreamError(f"the stream ended with: {_message(chunk)}")
        self.usage = _members(chunk.get("usage")) or self.usage
        for choice in map(_members, _items(chunk.get("choices"))):
            delta = _members(choice.get("delta"))
            if choice.get("text") or any(map(delta.get, OUTPUT)):
                self.output_s.append(now_s)
            self.ended = self.ended or choice.get("finish_reason") is not None
        return False

    @property
    def problem(self) -> str | None:
        """Why a response is not whole, or its tokens are not counted; None if all is well."""
        if not self.ended:
            return "the stream ended before the text did"
        if not isinstance(self.usage.get("completion_tokens"), int):
            return (
                "the server sent no usage, and chunks are no tokens; it has to know "
                "stream_options.include_usage"
            )
        return None

    def count(self, name: str) -> int:
        """Return a number of tokens of the usage; 0 where there is none."""
        value = self.usage.get(name)
        return value if isinstance(value, int) else 0

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were cached, where the server says so."""
        details = self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return value if isinstance(value, int) else 0


def _members(value: Any) -> Mapping[str, Any]:
    """Return an object of an event; null has no members."""
    if isinstance(value, Mapping | None):
        return value or {}
    raise _StreamError(f"an event has {str(value)[:60]!r} where an object should be")


def _items(value: Any) -> Sequence[Any]:
    """Return a list of an event; null is empty."""
    if isinstance(value, list | None):
        return value or ()
    raise _StreamError(f"an event has {str(value)[:60]!r} where a list should be")


async def run_online(
    target: Target,
    asks: Sequence[Ask],
    arrivals_s: Sequence[float],
    max_concurrency: int | None = None,
    clock: Clock = time.perf_counter,
) -> list[RequestRecord]:
    """Send each request at its time, whatever became of those before; one record each.

    With `max_concurrency` a request waits until fewer are under way; its latencies count from then
    on, and its delay is in the record.

    Raises:
        ProviderError: httpx is not installed.
    """
    gate = asyncio.Semaphore(max_concurrency or max(1, len(asks)))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(_client(target))
        start_s = clock()

        async def one(ask: Ask, arrival_s: float) -> RequestRecord:
            await asyncio.sleep(start_s + arrival_s - clock())
            async with gate:
                return await _send(client, target, ask, arrival_s, lambda: clock() - start_s)

        tasks = [one(ask, at) for ask, at in zip(asks, arrivals_s, strict=True)]
        return list(await asyncio.gather(*tasks))


async def first_model(base_url: str, api_key: str | None) -> str:
    """Return the name of the first model that the server lists.

    Raises:
        ProviderError: the server cannot be reached or lists none; or httpx is not installed.
    """
    target = Target(base_url, COMPLETIONS, "", api_key, 30.0)
    advice = "start the server, or give --base-url and --model"
    async with _client(target) as client:
        try:
            response = await client.get("/v1/models")
            response.raise_for_status()
            name: str = response.json()["data"][0]["id"]
        except (ArithmeticError, OSError, LookupError, TypeError, ValueError) as error:
            raise ProviderError(f"{base_url} lists no model: {error!r}; {advice}") from error
        except Exception as error:
            if not type(error).__module__.startswith("httpx"):
                raise
            raise ProviderError(f"{base_url} did not answer: {error!r}; {advice}") from error
    return name


def _client(target: Target) -> httpx.AsyncClient:
    try:
        import httpx
    except ImportError as error:
        raise ProviderError(
            'httpx is not installed, which sends the requests; `pip install "onnxport[bench]"`'
        ) from error
    if target.api_key and not (target.api_key.isascii() and target.api_key.isprintable()):
        raise RequestError(
            "the API key has characters that no header can hold; give printable ASCII"
        )
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    unlimited = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S
    )
    try:
        return httpx.AsyncClient(
            base_url=target.base_url,
            headers=headers,
            timeout=target.timeout_s,
            limits=unlimited,
            trust_env=False,
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise RequestError(
            f"{target.base_url!r} is no URL of a server: {error}; give one such as "
            "http://127.0.0.1:8000"
        ) from error


async def _send(
    client: httpx.AsyncClient, target: Target, ask: Ask, arrival_s: float, now: Clock
) -> RequestRecord:
    """Send one request and read its answer.

    It is read to the end of the response, so that the next request may have the connection. What
    goes wrong behind the last event is no failure of this one.
    """
    import httpx

    stream, error = _Stream(), None
    sent_s = now()
    try:
        async with (
            asyncio.timeout(target.timeout_s) as limit,
            client.stream("POST", target.endpoint, json=target.body(ask)) as response,
        ):
            if response.status_code != 200:
                body = (await response.aread()).decode("utf-8", "replace")
                raise _StreamError(f"HTTP {response.status_code}: {_message(body)}")
            async for data in _events(response):
                if stream.add(data, now()):
                    limit.reschedule(asyncio.get_running_loop().time() + LINGER_S)
    except _StreamError as failure:
        error = str(failure)
    except TimeoutError:
        error = f"no end within {target.timeout_s:g} s"
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    finished_s = now()
    if stream.done_s is not None:
        error, finished_s = None, stream.done_s
    if error is None:
        error = stream.problem
    return RequestRecord(
        arrival_s=arrival_s,
        sent_s=sent_s,
        output_s=tuple(stream.output_s),
        finished_s=finished_s,
        num_prompt_tokens=stream.count("prompt_tokens"),
        num_output_tokens=stream.count("completion_tokens"),
        num_cached_tokens=stream.num_cached_tokens,
        error=None if error is None else error[:MESSAGE_CHARS],
    )


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of server-sent events."""
    async for line in _lines(response):
        name, _, data = line.partition(b":")
        if name == b"data":
            yield data.decode("utf-8", "replace").strip()


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield lines, and empty ones between CR and LF, as server-sent events end them.

    httpx's own end at other characters, too, such as U+2028, which stand in JSON as they are.
    """
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = _LINE_END.split(rest + part)
        for line in lines:
            yield line
    yield rest


def _message(body: Any) -> str:
    """Return what an error object says, or else all of it."""
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except (json.JSONDecodeError, RecursionError):
            return str(body).strip()
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, Mapping) and error.get("message"):
        return str(error["message"])
    return json.dumps(body)
