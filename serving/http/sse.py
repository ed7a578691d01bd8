"""Server-sent events, as OpenAI's streams use them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from onnxport.serving.http.errors import ApiError, to_api_error
from onnxport.serving.http.generation import drop, is_done
from onnxport.serving.http.request_ids import request_id

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which readers of events pass over
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

# Clients that split text into lines, not bytes, take these for ends of lines, too.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}

Event = dict[str, Any]
Chunks = AsyncGenerator[Event, None]


def event(data: Event, *, is_named: bool = False) -> bytes:
    """Return one event, which is named by its type where that is asked for."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    name = f"event: {data['type']}\n".encode() if is_named else b""
    return name + b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n"


async def respond(
    request: Request,
    chunks: Chunks,
    ping_interval_s: float,
    failed: Callable[[ApiError], Event] | None = None,
    ping: bytes = PING,
    end: bytes = DONE,
) -> Response:
    """Return a stream of `chunks`.

    The first chunk is awaited before the headers are sent, so that a request that cannot be run
    gets a status of its own, but no longer than `ping_interval_s`. An error after that is an event,
    the last one, but for `[DONE]`.

    Args:
        request: that is answered.
        chunks: told as they come; closed at the end.
        ping_interval_s: after so long without an event comes a comment, lest proxies think that
            nothing will come any more; 0: never.
        failed: returns the event of an error, in a stream of named events, as those of responses
            are. It ends without `[DONE]`. None: events have no names.
        ping: what is sent in place of the comment, where clients know an event for it.
        end: of a stream of events without names.

    Raises:
        DisconnectedError: the client went away before the headers were sent.
    """
    first = asyncio.ensure_future(anext(chunks))
    if await is_done(request, first, ping_interval_s or None):
        first.result()
    events = _told(request, first, chunks, failed, end)
    return _EventStream(events, first, chunks, ping_interval_s, ping)


async def _told(
    request: Request,
    first: asyncio.Future[Event],
    chunks: Chunks,
    failed: Callable[[ApiError], Event] | None,
    end: bytes,
) -> AsyncGenerator[bytes, None]:
    """Yield events, and what ends them."""
    is_named = failed is not None
    try:
        await asyncio.wait({first})  # which is not cancelled with this
        yield event(first.result(), is_named=is_named)
        async for chunk in chunks:
            yield event(chunk, is_named=is_named)
    except Exception as error:
        known = to_api_error(error, request_id(request))
        yield event(known.body() if failed is None else failed(known), is_named=is_named)
    if end and not is_named:
        yield end


class _EventStream(StreamingResponse):
    """A stream whose chunks are closed whatever ends the response, even before it begins."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        first: asyncio.Future[Event],
        chunks: Chunks,
        ping_interval_s: float,
        ping: bytes,
    ) -> None:
        """Make a response.

        Args:
            events: what is sent.
            first: the first of `chunks`, which may still be waited for.
            chunks: what `events` are made of.
            ping_interval_s: see `respond`.
            ping: see `respond`.
        """
        self._events = events
        self._first = first
        self._chunks = chunks
        self._ping_interval_s = ping_interval_s
        self._ping_bytes = ping
        self._sent_s = 0.0  # the loop's time when something was sent; 0: nothing was for long
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await drop(self._first)
            await self._events.aclose()
            await self._chunks.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the headers, events and pings."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        if self._first.done():
            self._sent_s = asyncio.get_running_loop().time()
        # One task a stream, for one an event would take longer than the event.
        pinging = asyncio.ensure_future(self._ping(send)) if self._ping_interval_s else None
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sent_s = asyncio.get_running_loop().time()
        finally:
            if pinging is not None:
                pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Send a ping whenever nothing else was sent for the interval.

        It ends only if the client is gone, which the stream itself is told, too.
        """
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._sent_s + self._ping_interval_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            await send({"type": "http.response.body", "body": self._ping_bytes, "more_body": True})
            self._sent_s = loop.time()
