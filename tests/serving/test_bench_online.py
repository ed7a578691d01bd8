"""A load on a server that does what a test says, byte by byte."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from onnxport.errors import ProviderError, RequestError
from onnxport.serving.bench import online
from onnxport.serving.bench.load import Ask
from onnxport.serving.bench.online import CHAT, COMPLETIONS, Target, first_model, run_online
from onnxport.serving.bench.records import RequestRecord, summarize
from tests.waiting import PATIENCE_S

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
ASK = Ask((1, 2, 30), 5)
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Scripted:
    """What the server was asked."""

    target: Target
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


def event(*choices: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"


def text(text: str, finish: str | None = None) -> bytes:
    return event({"index": 0, "text": text, "finish_reason": finish})


WHOLE = [text("ab"), text("", "length"), event(usage=USAGE), b"data: [DONE]\n\n"]


def answer(*parts: bytes, status: int = 200) -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % status)
        for part in parts:
            await asyncio.sleep(0.01)
            writer.write(part)

    return write


@asynccontextmanager
async def scripted(*answers: Answer) -> AsyncIterator[Scripted]:
    """Serve one answer a request, the last again and again."""

    tasks: list[asyncio.Task[Any] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError), closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            server.heads.append(head)
            number = len(server.heads) - 1
            if "content-length: " in head:
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                server.bodies.append(json.loads(await reader.readexactly(length)))
            await answers[min(number, len(answers) - 1)](writer)

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    address = listening.sockets[0].getsockname()
    target = Target(
        f"http://{address[0]}:{address[1]}", COMPLETIONS, "m", "key", PATIENCE_S, {"seed": 3}
    )
    server = Scripted(target)
    async with listening:
        yield server
        await asyncio.gather(*(task for task in tasks if task))


async def ask_once(
    *parts: bytes, status: int = 200, timeout_s: float = PATIENCE_S
) -> RequestRecord:
    async with scripted(answer(*parts, status=status)) as server:
        [record] = await run_online(replace(server.target, timeout_s=timeout_s), [ASK], [0.0])
    return record


async def test_tokens_are_those_of_the_usage_and_times_those_of_the_chunks() -> None:
    async with scripted(answer(text("ab"), text("c"), *WHOLE[1:])) as server:
        [record] = await run_online(server.target, [ASK], [0.0])
    assert record.error is None
    assert (record.num_prompt_tokens, record.num_output_tokens) == (7, 5)
    assert record.num_cached_tokens == 2
    assert len(record.output_s) == 2
    first, second = record.output_s
    assert record.sent_s < first < second < record.finished_s
    [body], [head] = server.bodies, server.heads
    assert head.startswith("post /v1/completions ")
    assert "authorization: bearer key" in head
    assert body == {
        "model": "m",
        "prompt": [1, 2, 30],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
    }


async def test_chats() -> None:
    role = event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    said = event({"delta": {"content": "ab"}, "finish_reason": None})
    end = event({"delta": {}, "finish_reason": "stop"})
    async with scripted(answer(role, said, end, event(usage=USAGE))) as server:
        target = replace(server.target, endpoint=CHAT, api_key=None)
        [record] = await run_online(target, [ASK], [0.0])
    assert record.error is None
    assert len(record.output_s) == 1
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "b c e"}]
    assert "authorization" not in server.heads[0]


@pytest.mark.parametrize(
    "delta",
    [{"reasoning": "a"}, {"reasoning_content": "a"}, {"tool_calls": [{"index": 0}]}],
)
async def test_chats_that_begin_with_something_else(delta: dict[str, Any]) -> None:
    """What is thought or called is output like all other: servers have three names for it."""
    said = [event({"delta": one, "finish_reason": None}) for one in (delta, {"content": "b"})]
    end = event({"delta": {}, "finish_reason": "stop"})
    async with scripted(answer(*said, end, event(usage=USAGE))) as server:
        [record] = await run_online(replace(server.target, endpoint=CHAT), [ASK], [0.0])
    assert record.error is None
    assert len(record.output_s) == 2


async def test_errors_before_and_within_the_stream() -> None:
    full = json.dumps({"error": {"message": "the queue is full"}}).encode()
    assert (await ask_once(full, status=429)).error == "HTTP 429: the queue is full"
    assert (await ask_once(b"oh no", status=502)).error == "HTTP 502: oh no"
    inside = await ask_once(text("a"), b'data: {"error": {"message": "lost"}}\n\n', *WHOLE[1:])
    assert inside.error == "the stream ended with: lost"
    assert len(inside.output_s) == 1


async def test_streams_that_are_not_whole() -> None:
    assert (await ask_once(text("a"))).error == "the stream ended before the text did"
    assert "no usage" in ((await ask_once(*WHOLE[:2])).error or "")
    assert "not JSON" in ((await ask_once(b"data: {\n\n")).error or "")
    assert (await ask_once(*WHOLE, timeout_s=0.001)).error


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
async def test_json_may_hold_what_ends_a_line_elsewhere(character: str) -> None:
    raw = json.dumps({"choices": [{"text": f"a{character}b"}]}, ensure_ascii=False)
    record = await ask_once(f"data: {raw}\n\n".encode(), *WHOLE[1:])
    assert record.error is None
    assert len(record.output_s) == 1


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_ends_of_lines(end: bytes) -> None:
    record = await ask_once(*(part.replace(b"\n", end) for part in WHOLE))
    assert record.error is None
    assert (len(record.output_s), record.num_output_tokens) == (1, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"1",
        b"[]",
        b'{"choices": 5}',
        b'{"choices": ["a"]}',
        b'{"choices": [{"delta": "a"}]}',
        b'{"usage": [1], "choices": []}',
        b"[" * 100_000,
    ],
)
async def test_events_of_another_form(data: bytes) -> None:
    strange = answer(b"data: " + data + b"\n\n", *WHOLE)
    async with scripted(strange, answer(*WHOLE)) as server:
        records = await run_online(server.target, [ASK] * 2, [0.0] * 2, max_concurrency=1)
    assert "an event" in (records[0].error or "")
    assert records[1].error is None


async def test_members_that_are_null_or_of_another_form() -> None:
    null = {"error": None, "usage": None, "choices": None}
    usage = USAGE | {"prompt_tokens_details": 7}
    parts = (b"data: " + json.dumps(null).encode() + b"\n\n", *WHOLE[:2], event(usage=usage))
    record = await ask_once(*parts)
    assert record.error is None
    assert (record.num_output_tokens, record.num_cached_tokens) == (5, 0)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
async def test_a_key_that_no_header_can_hold(key: str) -> None:
    target = Target("http://127.0.0.1:9", COMPLETIONS, "m", key)
    with pytest.raises(RequestError, match="the API key has characters") as caught:
        await run_online(target, [ASK], [0.0])
    assert key not in str(caught.value)


async def test_a_server_that_hangs_up() -> None:
    async def hang_up(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with scripted(hang_up) as server:
        [record] = await run_online(server.target, [ASK], [0.0])
    assert record.error is not None
    assert record.num_output_tokens == 0


async def test_one_that_fails_leaves_the_others_alone() -> None:
    async with scripted(answer(b"no", status=500), answer(*WHOLE)) as server:
        records = await run_online(server.target, [ASK] * 5, [0.0] * 5)
    assert sorted(record.error or "" for record in records) == ["", "", "", "", "HTTP 500: no"]


def together(count: int) -> Answer:
    """Answer when there are so many requests at once, or so many more."""
    all_here, whole = asyncio.Barrier(count), answer(*WHOLE)

    async def write(writer: asyncio.StreamWriter) -> None:
        await all_here.wait()
        await whole(writer)

    return write


async def test_most_at_once() -> None:
    async with scripted(together(2)) as server:
        records = await run_online(server.target, [ASK] * 6, [0.0] * 6, max_concurrency=2)
    async with scripted(together(6)) as server:
        free = await run_online(server.target, [ASK] * 6, [0.0] * 6)
    assert summarize(records).most_at_once == 2
    assert max(record.delay_s for record in records) > 0.05  # two rounds came before
    assert summarize(free).most_at_once == 6


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


KEPT = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def keeping(
    *parts: bytes, delay_s: float = 0.0, is_endless: bool = False
) -> AsyncIterator[tuple[Target, list[int]]]:
    """Answer any number of requests on a connection; yields how many each one had.

    What is endless never ends the first of them.
    """
    counts: list[int] = []
    over = asyncio.Event()
    tasks: list[asyncio.Task[Any] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        number = len(counts)
        counts.append(0)
        with suppress(asyncio.IncompleteReadError, ConnectionError), closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                counts[number] += 1
                writer.write(KEPT + b"".join(map(chunk, WHOLE)))
                for part in parts:
                    await asyncio.sleep(delay_s)
                    writer.write(part)
                if is_endless:
                    await over.wait()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port, *_ = listening.sockets[0].getsockname()
    async with listening:
        yield Target(f"http://{host}:{port}", COMPLETIONS, "m", None, 2 * PATIENCE_S), counts
        over.set()
        await asyncio.gather(*(task for task in tasks if task))


async def test_a_connection_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "LINGER_S", PATIENCE_S)
    monkeypatch.setattr(online, "KEEPALIVE_S", PATIENCE_S)
    # The end comes in a packet of its own.
    async with keeping(chunk(b""), delay_s=0.02) as (target, counts):
        records = await run_online(target, [ASK] * 5, [0.0] * 5, max_concurrency=1)
    assert [record.error for record in records] == [None] * 5
    assert counts == [5]


async def test_what_is_wrong_behind_the_last_event_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with keeping(b"no chunk\r\n", delay_s=0.02) as (target, counts):
        records = await run_online(target, [ASK] * 2, [0.0] * 2, max_concurrency=1)
    assert [record.error for record in records] == [None] * 2
    assert counts == [1, 1]
    monkeypatch.setattr(online, "LINGER_S", 0.2)
    more = chunk(WHOLE[-1] + b"data: what is this\n\n")
    async with keeping(more, is_endless=True) as (target, counts), asyncio.timeout(PATIENCE_S):
        start_s = time.perf_counter()
        [record] = await run_online(target, [ASK], [0.0])
        took_s = time.perf_counter() - start_s
    assert record.error is None
    assert record.num_output_tokens == 5
    assert record.finished_s <= took_s - 0.1  # when the last event came


async def test_requests_are_sent_at_their_times() -> None:
    arrivals_s = [0.0, 0.05, 0.1]
    async with scripted(answer(*WHOLE)) as server:
        records = await run_online(server.target, [ASK] * 3, arrivals_s)
    assert [record.arrival_s for record in records] == arrivals_s
    assert all(record.delay_s >= 0 for record in records)


async def test_the_first_model() -> None:
    listed = b'{"data": [{"id": "first"}, {"id": "second"}]}'
    async with scripted(answer(listed)) as server:
        assert await first_model(server.target.base_url, None) == "first"
    async with scripted(answer(b'{"data": []}')) as server:
        with pytest.raises(ProviderError, match="lists no model"):
            await first_model(server.target.base_url, None)
    with pytest.raises(ProviderError, match="did not answer"):
        await first_model(server.target.base_url, None)
    with pytest.raises((ProviderError, RequestError)):
        await first_model("no address", None)
