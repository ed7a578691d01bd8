"""Streams close what they read from, whenever their client goes away, and tell that they live."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
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
from tests.waiting import timeless

from .conftest import RunningServer, StartServer
from .scripted import MODEL, say

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
            await asyncio.sleep(100)


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
@timeless
async def test_a_client_that_goes(messages: int, ping_interval_s: float) -> None:
    client, chunks = Client(messages), Chunks()
    await respond(client, chunks, ping_interval_s)
    assert chunks.closed
    assert b"[DONE]" not in client.got


@pytest.mark.parametrize("messages", [0, 1, 2, 4])
@timeless
async def test_a_client_that_goes_while_there_are_pings_alone(messages: int) -> None:
    client, chunks = Client(messages), Chunks(waits={0: 100})
    chunks.ending_s = 0.05  # and nothing interrupts it
    before = asyncio.all_tasks()
    await respond(client, chunks, PING_S)
    assert chunks.closed
    assert client.got.count(sse.PING) == len(client.got) / len(sse.PING) <= max(1, messages - 1)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before  # nothing goes on


@timeless
async def test_the_first_ping_comes_with_the_headers() -> None:
    client, chunks = Client(stays_for=2), Chunks(waits={0: 100})
    start_s = asyncio.get_running_loop().time()
    await respond(client, chunks, 1.0)
    assert client.got == sse.PING
    assert asyncio.get_running_loop().time() - start_s == pytest.approx(1.0)


@pytest.mark.parametrize("ping_interval_s", [0, 50])
@timeless
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


@timeless
async def test_an_error_is_the_last_event(caplog: pytest.LogCaptureFixture) -> None:
    client, chunks = Client(stays_for=100), Chunks(error_at=2)
    await respond(client, chunks)
    *_, error, done, end = client.got.split(b"\n\n")
    assert b'"type":"server_error"' in error
    assert b"broken" not in error  # a bug of ours is for the log
    assert "ValueError: broken" in caplog.text
    assert (done, end) == (b"data: [DONE]", b"")
    assert chunks.closed


@pytest.mark.parametrize("ping_interval_s", [0, 50])
@timeless
async def test_an_error_before_the_first_chunk_is_raised(ping_interval_s: float) -> None:
    with pytest.raises(ValueError, match="broken"):
        await respond(Client(stays_for=100), Chunks(error_at=0), ping_interval_s)


@timeless
async def test_silence_is_told_before_between_and_no_longer() -> None:
    client = Client(stays_for=100)
    waits = {0: 3.5 * PING_S, 2: 2.5 * PING_S}
    await respond(client, Chunks(count=3, waits=waits), PING_S)
    *blocks, done, end = client.got.split(b"\n\n")
    told = ["ping" if block == b": ping" else json.loads(block[6:])["number"] for block in blocks]
    # The first comes with the headers, when an interval has passed.
    assert told == ["ping", "ping", "ping", 0, 1, "ping", "ping", 2]
    assert (done, end, client.kinds[0]) == (b"data: [DONE]", b"", "start")


@timeless
async def test_what_comes_in_time_has_no_pings() -> None:
    client = Client(stays_for=200)
    waits = dict.fromkeys(range(20), 0.01)  # longer than the interval together
    await respond(client, Chunks(count=20, waits=waits), 0.1)
    assert b"ping" not in client.got


@pytest.mark.parametrize("error_at", [0, 1])
@timeless
async def test_an_error_behind_a_ping_is_an_event(error_at: int) -> None:
    for named in (False, True):
        failed = (lambda error: {"type": "error", "status": error.status}) if named else None
        client = Client(stays_for=100)
        chunks = Chunks(error_at=error_at, waits={error_at: 2.5 * PING_S})
        await respond(client, chunks, PING_S, failed)
        told = client.got.replace(sse.PING, b"").split(b"\n\n")[error_at:]
        assert sse.PING in client.got
        if named:
            assert told == [b'event: error\ndata: {"type":"error","status":500}', b""]
        else:
            assert b'"type":"server_error"' in told[0]
            assert told[1:] == [b"data: [DONE]", b""]


@timeless
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
    await respond(client, Chunks(count=2, waits={0: 0.2}), PING_S)
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


# A real server, whose steps wait for as long as there is a file.

USER = {"role": "user", "content": say("ab")}
ASKS = {
    "completions": {"prompt": say("ab")},
    "chat/completions": {"messages": [USER]},
    "responses": {"input": say("ab")},
}


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slow") / "hold"


@pytest.fixture(scope="module")
def slow(_start: StartServer, hold: Path) -> RunningServer:
    return _start(latency_s=0.02, hold=str(hold), held_from=0, sse_ping_interval_s=PING_S)


@pytest.fixture
def held(hold: Path) -> Iterator[Path]:
    hold.touch()
    yield hold
    hold.unlink(missing_ok=True)


@pytest.fixture
def client(slow: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{slow.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def read_with_pings(response: httpx.Response, hold: Path) -> str:
    """Return all of a stream; its steps may go on once it has had three pings."""
    text = ""
    for piece in response.iter_text():
        text += piece
        if text.count(": ping\n\n") >= 3:
            hold.unlink(missing_ok=True)
    return text


@pytest.mark.parametrize("path", ASKS)
def test_pings_of_every_endpoint(slow: RunningServer, held: Path, path: str) -> None:
    ask = {"model": MODEL, "stream": True, **ASKS[path]}
    with httpx.stream("POST", f"{slow.url}/v1/{path}", json=ask) as response:
        body = read_with_pings(response, held)
    assert body.startswith(": ping\n\n" * 3)
    assert "data: " in body
    held.touch()
    with ThreadPoolExecutor(1) as pool:
        url = f"{slow.url}/v1/{path}"
        waiting = pool.submit(httpx.post, url, json=ask | {"stream": False})
        wait([waiting], 4 * PING_S)
        held.unlink()
        assert "ping" not in waiting.result().text


def test_the_openai_client_passes_over_pings(client: OpenAI, held: Path) -> None:
    def stream(create: Any, **fields: Any) -> list[Any]:
        held.touch()
        told = create(model=MODEL, stream=True, **fields)  # returns at the first ping
        held.unlink()
        return list(told)

    chunks = stream(client.completions.create, prompt=say("ab"))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"
    chat = stream(client.chat.completions.create, messages=[USER])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == "ab"
    events = stream(client.responses.create, input=say("ab"))
    assert events[-1].response.output_text == "ab"


def test_a_client_that_goes_before_the_first_token(slow: RunningServer, held: Path) -> None:
    before = slow.health()["engine"]["finished"]["abort"]
    ask = {"prompt": say("x" * 1000), "max_tokens": 1000, "stream": True}
    with slow.asking("completions", ask) as connection:
        got = b""
        while b": ping" not in got:
            more = connection.recv(1000)
            assert more, got
            got += more
    held.unlink()
    assert got.startswith(b"HTTP/1.1 200")
    assert b"data:" not in got
    stats = slow.wait_for(num_requests_running=0, abort=before + 1)
    assert stats["num_free_blocks"] == stats["num_blocks"]


@pytest.fixture(scope="module")
def silent(_start: StartServer) -> RunningServer:
    """A server that fails, and sends no pings."""
    return _start(fail_after=0, sse_ping_interval_s=0)


@pytest.fixture(scope="module")
def failing(_start: StartServer, hold: Path) -> RunningServer:
    """A server that fails once it is held no more."""
    return _start(fail_after=0, hold=str(hold), held_from=0, sse_ping_interval_s=PING_S)


@pytest.mark.parametrize("path", ASKS)
def test_errors_have_a_status_before_the_first_ping_and_are_events_after(
    silent: RunningServer, failing: RunningServer, held: Path, path: str
) -> None:
    ask = {"model": MODEL, "stream": True, **ASKS[path]}
    got = httpx.post(f"{silent.url}/v1/{path}", json=ask)
    assert got.status_code == 500
    assert "told to fail" in got.text
    with httpx.stream("POST", f"{failing.url}/v1/{path}", json=ask) as response:
        assert response.status_code == 200
        body = read_with_pings(response, held)
    assert "told to fail" in body
    blocks = [block for block in body.split("\n\n") if block not in (": ping", "")]
    assert blocks[0].startswith(
        'event: error\ndata: {"type":"error","sequence_number":0,"code":'
        if path == "responses"
        else 'data: {"error":'
    )
    assert blocks[1:] == ([] if path == "responses" else ["data: [DONE]"])


def test_the_openai_client_raises_an_error_behind_a_ping(
    failing: RunningServer, held: Path
) -> None:
    with OpenAI(base_url=f"{failing.url}/v1", api_key="unused", max_retries=0) as client:
        told = client.chat.completions.create(model=MODEL, messages=[USER], stream=True)
        held.unlink()
        with pytest.raises(openai.APIError, match="told to fail"):
            list(told)


def test_requests_that_cannot_run_have_a_status_all_the_same(slow: RunningServer) -> None:
    ask = {"model": MODEL, "prompt": "a", "max_tokens": 10**6, "stream": True}
    assert httpx.post(f"{slow.url}/v1/completions", json=ask).status_code == 400
