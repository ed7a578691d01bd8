"""Streams close what they read from, whenever their client goes away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request

from onnxport.serving.http import sse
from onnxport.serving.http.generation import DisconnectedError

SCOPE = {"type": "http", "method": "POST", "headers": [], "asgi": {"spec_version": "2.3"}}


class Client:
    """The receiving end of a response."""

    def __init__(self, stays_for: int) -> None:
        self.stays_for = stays_for  # messages
        self.gone = asyncio.Event()
        self.got = b""

    async def receive(self) -> dict[str, Any]:
        if self.stays_for:
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got += message.get("body", b"")
        self.stays_for -= 1
        if not self.stays_for:
            self.gone.set()
            await asyncio.sleep(10)


class Chunks:
    """Numbers without end, or up to an error."""

    def __init__(self, error_at: int | None = None) -> None:
        self.closed = False
        self.error_at = error_at

    async def generate(self) -> sse.Chunks:
        try:
            for number in range(1000):
                if number == self.error_at:
                    raise ValueError("broken")
                yield {"number": number}
                await asyncio.sleep(0)
        finally:
            self.closed = True


async def respond(client: Client, chunks: Chunks) -> None:
    request = Request(SCOPE, client.receive)
    waiting = Client(stays_for=1)  # stays until the first chunk is there
    response = await sse.respond(Request(SCOPE, waiting.receive), chunks.generate())
    await response(request.scope, client.receive, client.send)


@pytest.mark.parametrize("messages", [0, 1, 2, 5])
async def test_a_client_that_goes(messages: int) -> None:
    client, chunks = Client(messages), Chunks()
    await asyncio.wait_for(respond(client, chunks), 5)
    assert chunks.closed
    assert b"[DONE]" not in client.got


async def test_a_client_that_is_gone_before_the_first_chunk() -> None:
    closed = asyncio.Event()

    async def never() -> sse.Chunks:
        try:
            await asyncio.sleep(100)
            yield {}
        finally:
            closed.set()

    with pytest.raises(DisconnectedError):
        await sse.respond(Request(SCOPE, Client(stays_for=0).receive), never())
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


async def test_an_error_before_the_first_chunk_is_raised() -> None:
    with pytest.raises(ValueError, match="broken"):
        await respond(Client(stays_for=100), Chunks(error_at=0))


def test_an_event_has_no_end_of_a_line_within() -> None:
    """Also none that only readers of text take for one."""
    text = "a\u2028b\u2029c\x85d\re\nf é"
    data = sse.event({"text": text})
    assert data.count(b"\n") == 2
    assert len(data.decode().splitlines()) == 2
    assert json.loads(data.decode().removeprefix("data: ")) == {"text": text}
