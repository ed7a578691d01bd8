"""Server-sent events, as OpenAI's streams use them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from onnxport.serving.http.errors import to_api_error
from onnxport.serving.http.generation import unless_disconnected

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

# Clients that split text into lines, not bytes, take these for ends of lines, too.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}

Chunks = AsyncGenerator[dict[str, Any], None]


def event(data: dict[str, Any], *, is_named: bool = False) -> bytes:
    """Return one event, which is named by its type where that is asked for."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    name = f"event: {data['type']}\n".encode() if is_named else b""
    return name + b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n"


async def respond(request: Request, chunks: Chunks, *, is_named: bool = False) -> Response:
    """Return a stream of `chunks`.

    The first chunk is awaited before the headers are sent, so that a request that cannot be run
    gets a status of its own. An error after that is an event, the last one before `[DONE]`; streams
    of named events, as those of responses are, end without that, and tell of errors themselves.

    Raises:
        DisconnectedError: the client went away before the first chunk.
    """
    first = await unless_disconnected(request, anext(chunks))
    return _EventStream(_named(first, chunks) if is_named else _events(first, chunks), chunks)


async def _events(first: dict[str, Any], chunks: Chunks) -> AsyncGenerator[bytes, None]:
    try:
        yield event(first)
        async for chunk in chunks:
            yield event(chunk)
    except Exception as error:
        yield event(to_api_error(error).body())
    finally:
        await chunks.aclose()
    yield DONE


async def _named(first: dict[str, Any], chunks: Chunks) -> AsyncGenerator[bytes, None]:
    yield event(first, is_named=True)
    async for chunk in chunks:
        yield event(chunk, is_named=True)


class _EventStream(StreamingResponse):
    """A stream whose chunks are closed whatever ends the response, even before it begins."""

    def __init__(self, events: AsyncGenerator[bytes, None], chunks: Chunks) -> None:
        self._chunks = chunks
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            assert isinstance(self.body_iterator, AsyncGenerator)
            await self.body_iterator.aclose()
            await self._chunks.aclose()
