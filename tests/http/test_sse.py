"""Streams close what they read from, whenever their client goes away, and tell that they live."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import Request
from openai import OpenAI

from onnxport.errors import RequestError
from onnxport.serving.http import sse
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.generation import DisconnectedError

from .conftest import RunningServer, StartServer
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
SCOPE = {"type": "http", "method": "POST", "headers": [], "asgi": {"spec_version": "2.3"}}
PING_S = 0.05


class Client:
    """The receiving end of a response."""

    def __init__(self, stays_for: int) -> None:
        self.stays_for = stays_for  # messages
        self.gone = asyncio.Event()
        self.got = b""
        self.kinds: list[str] = []

    async def receive(self) -> dict[str, Any]:
        if self.stays_for:
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        assert self.kinds[-1:] != ["end"], "something was sent behind the end"
        is_end = message.get("more_body") is False
        self.kinds.append("end" if is_end else message["type"].removeprefix("http.response."))
        self.got += message.get("body", b"")
        self.stays_for -= 1
        if not self.stays_for:
            self.gone.set()
            await asyncio.sleep(10)


class Chunks:
    """Numbers without end, or up to an error."""

    ending_s = 0.0  # what closing takes

    def __init__(
        self, error_at: int | None = None, count: int = 1000, waits: dict[int, float] | None = None
    ) -> None:
        self.closed = False
        self.error_at = error_at
        self.count = count
        self.waits = waits or {}  # seconds before a number

    async def generate(self) -> sse.Chunks:
        try:
            for number in range(self.count):
                await asyncio.sleep(self.waits.get(number, 0))
                if number == self.error_at:
                    raise ValueError("broken")
                yield {"number": number, "type": "number"}
        finally:
            await asyncio.sleep(self.ending_s)
            self.closed = True


async def respond(
    client: Client, chunks: Chunks, ping_interval_s: float = 0, failed: Any = None
) -> None:
    request = Request(SCOPE, client.receive)
    waiting = Client(stays_for=1)  # stays until the headers are there
    response = await sse.respond(
        Request(SCOPE, waiting.receive), chunks.generate(), ping_interval_s, failed
    )
    await response(request.scope, client.receive, client.send)


@pytest.mark.parametrize("ping_interval_s", [0, PING_S])
@pytest.mark.parametrize("messages", [0, 1, 2, 5])
async def test_a_client_that_goes(messages: int, ping_interval_s: float) -> None:
    client, chunks = Client(messages), Chunks()
    await asyncio.wait_for(respond(client, chunks, ping_interval_s), 5)
    assert chunks.closed
    assert b"[DONE]" not in client.got


@pytest.mark.parametrize("messages", [0, 1, 2, 4])
async def test_a_client_that_goes_while_there_are_pings_alone(messages: int) -> None:
    client, chunks = Client(messages), Chunks(waits={0: 100})
    chunks.ending_s = 0.05  # and nothing interrupts it
    before = asyncio.all_tasks()
    await asyncio.wait_for(respond(client, chunks, PING_S), 5)
    assert chunks.closed
    assert client.got.count(sse.PING) == len(client.got) / len(sse.PING) <= max(1, messages - 1)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before  # nothing goes on


async def test_the_first_ping_comes_with_the_headers() -> None:
    client, chunks = Client(stays_for=2), Chunks(waits={0: 100})
    await asyncio.wait_for(respond(client, chunks, 1.0), 1.9)
    assert client.got == sse.PING


@pytest.mark.parametrize("ping_interval_s", [0, 50])
async def test_a_client_that_is_gone_before_the_first_chunk(ping_interval_s: float) -> None:
    closed = asyncio.Event()

    async def never() -> sse.Chunks:
        try:
            await asyncio.sleep(100)
            yield {}
        finally:
            closed.set()

    request = Request(SCOPE, Client(stays_for=0).receive)
    with pytest.raises(DisconnectedError):
        await sse.respond(request, never(), ping_interval_s)
    assert closed.is_set()


async def test_an_error_is_the_last_event(caplog: pytest.LogCaptureFixture) -> None:
    client, chunks = Client(stays_for=100), Chunks(error_at=2)
    await asyncio.wait_for(respond(client, chunks), 5)
    *_, error, done, end = client.got.split(b"\n\n")
    assert b'"type":"server_error"' in error
    assert b"broken" not in error  # a bug of ours is for the log
    assert "ValueError: broken" in caplog.text
    assert (done, end) == (b"data: [DONE]", b"")
    assert chunks.closed


@pytest.mark.parametrize("ping_interval_s", [0, 50])
async def test_an_error_before_the_first_chunk_is_raised(ping_interval_s: float) -> None:
    with pytest.raises(ValueError, match="broken"):
        await respond(Client(stays_for=100), Chunks(error_at=0), ping_interval_s)


async def test_silence_is_told_before_between_and_no_longer() -> None:
    client = Client(stays_for=100)
    waits = {0: 3.5 * PING_S, 2: 2.5 * PING_S}
    await asyncio.wait_for(respond(client, Chunks(count=3, waits=waits), PING_S), 5)
    blocks = client.got.split(b"\n\n")
    numbers = [block[-17:] for block in blocks if b"number" in block]
    assert len(numbers) == 3
    first = next(at for at, block in enumerate(blocks) if b"number" in block)
    assert 2 <= first <= 4  # one of them at once, with the headers
    assert blocks[first + 1].startswith(b'data: {"number":1')
    assert 1 <= blocks[first + 2 :].count(b": ping") <= 3
    assert (blocks[-2], blocks[-1], client.kinds[0]) == (b"data: [DONE]", b"", "start")


async def test_what_comes_in_time_has_no_pings() -> None:
    client = Client(stays_for=200)
    waits = dict.fromkeys(range(20), 0.01)  # longer than the interval together
    await asyncio.wait_for(respond(client, Chunks(count=20, waits=waits), 0.1), 5)
    assert b"ping" not in client.got


@pytest.mark.parametrize("error_at", [0, 1])
async def test_an_error_behind_a_ping_is_an_event(error_at: int) -> None:
    for named in (False, True):
        failed = (lambda error: {"type": "error", "status": error.status}) if named else None
        client = Client(stays_for=100)
        chunks = Chunks(error_at=error_at, waits={error_at: 2.5 * PING_S})
        await asyncio.wait_for(respond(client, chunks, PING_S, failed), 5)
        told = client.got.replace(sse.PING, b"").split(b"\n\n")[error_at:]
        assert sse.PING in client.got
        if named:
            assert told == [b'event: error\ndata: {"type":"error","status":500}', b""]
        else:
            assert b'"type":"server_error"' in told[0]
            assert told[1:] == [b"data: [DONE]", b""]


async def test_a_client_that_takes_nothing_ends_the_pings_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Servers may raise where a client is gone; the stream is told of it in its own way."""

    class Gone(Client):
        async def send(self, message: Any) -> None:
            if message.get("body") == sse.PING:
                raise OSError("gone")
            await super().send(message)

    client = Gone(stays_for=100)
    await asyncio.wait_for(respond(client, Chunks(count=2, waits={0: 0.2}), PING_S), 5)
    assert client.got.count(b"number") == 4
    assert client.kinds[-1] == "end"
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_event_has_no_end_of_a_line_within() -> None:
    """Also none that only readers of text take for one."""
    text = "a\u2028b\u2029c\x85d\re\nf é"
    data = sse.event({"text": text})
    assert data.count(b"\n") == 2
    assert len(data.decode().splitlines()) == 2
    assert json.loads(data.decode().removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize("interval_s", [-1, 0.01, 3601, float("inf"), float("nan")])
def test_intervals_that_are_none(interval_s: float) -> None:
    with pytest.raises(RequestError, match="sse_ping_interval_s is"):
        AppOptions(sse_ping_interval_s=interval_s)


# A real server, whose steps take much longer than the interval.

USER = {"role": "user", "content": say("ab")}
ASKS = {
    "completions": {"prompt": say("ab")},
    "chat/completions": {"messages": [USER]},
    "responses": {"input": say("ab")},
}


@pytest.fixture(scope="module")
def slow(_start: StartServer) -> RunningServer:
    return _start(latency_s=0.3, sse_ping_interval_s=PING_S)


@pytest.fixture
def client(slow: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{slow.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("path", ASKS)
def test_pings_of_every_endpoint(slow: RunningServer, path: str) -> None:
    ask = {"model": MODEL, "stream": True, **ASKS[path]}
    body = httpx.post(f"{slow.url}/v1/{path}", json=ask).text
    pings = [block for block in body.split("\n\n") if block == ": ping"]
    assert body.startswith(": ping\n\n")
    assert 3 <= len(pings) <= 40  # three steps
    whole = httpx.post(f"{slow.url}/v1/{path}", json=ask | {"stream": False})
    assert "ping" not in whole.text


def test_the_openai_client_passes_over_pings(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "stream": True}
    chunks = client.completions.create(**ask, prompt=say("ab"))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"
    chat = client.chat.completions.create(**ask, messages=[USER])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == "ab"
    events = list(client.responses.create(**ask, input=say("ab")))
    assert events[-1].response.output_text == "ab"


def test_a_client_that_goes_before_the_first_token(slow: RunningServer) -> None:
    before = slow.wait_for(num_requests_running=0)["finished"]["abort"]
    host, port = slow.url.removeprefix("http://").split(":")
    content = json.dumps({"prompt": say("x" * 100), "max_tokens": 100, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        got = b""
        while b": ping" not in got:
            got += connection.recv(1000)
    assert got.startswith(b"HTTP/1.1 200")
    assert b"data:" not in got
    stats = slow.wait_for(num_requests_running=0, abort=before + 1)
    assert stats["num_free_blocks"] == stats["num_blocks"]


@pytest.mark.parametrize("path", ASKS)
def test_errors_have_a_status_before_the_first_ping_and_are_events_after(
    start_server: StartServer, path: str
) -> None:
    ask = {"model": MODEL, "stream": True, **ASKS[path]}
    for ping_interval_s, status in ((0, 500), (PING_S, 200)):
        server = start_server(latency_s=0.3, fail_after=0, sse_ping_interval_s=ping_interval_s)
        got = httpx.post(f"{server.url}/v1/{path}", json=ask)
        assert got.status_code == status
        assert "told to fail" in got.text
        if status == 200:
            blocks = [block for block in got.text.split("\n\n") if block not in (": ping", "")]
            assert blocks[0].startswith(
                'event: error\ndata: {"type":"error","sequence_number":0,"code":'
                if path == "responses"
                else 'data: {"error":'
            )
            assert blocks[1:] == ([] if path == "responses" else ["data: [DONE]"])
        server.stop()


def test_the_openai_client_raises_an_error_behind_a_ping(start_server: StartServer) -> None:
    server = start_server(latency_s=0.3, fail_after=0, sse_ping_interval_s=PING_S)
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.APIError, match="told to fail"),
    ):
        list(client.chat.completions.create(model=MODEL, messages=[USER], stream=True))
    server.stop()


def test_requests_that_cannot_run_have_a_status_all_the_same(slow: RunningServer) -> None:
    ask = {"model": MODEL, "prompt": "a", "max_tokens": 10**6, "stream": True}
    assert httpx.post(f"{slow.url}/v1/completions", json=ask).status_code == 400
