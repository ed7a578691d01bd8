"""Batch files as OpenAI's Batch API has them: a request a line, and a line for each answer."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from starlette.types import ASGIApp, Message, Scope

from onnxport.errors import RequestError
from onnxport.serving.http.encodings import BYTES
from onnxport.serving.http.errors import shortened

URLS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v2/embed", "/classify", "/pooling", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/tokenize"),
)
FIELDS: Final = ("custom_id", "method", "url", "body")
MOST_TOLD: Final = 10  # lines that cannot be read are named up to here
AHEAD: Final = 16  # times what runs: answers that wait until one before them is written
TOO_MANY: Final = 429
AGAIN_AFTER_S: Final = 0.05  # what was refused because too many wait is asked again


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch file.

    Attributes:
        custom_id: the client's own name of it; it is in the answer's line, too.
        url: of the endpoint.
        body: JSON.
    """

    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint said to a line: a status, and its body read as JSON."""

    custom_id: str
    status: int
    request_id: str
    body: Any

    @property
    def failed(self) -> bool:
        """Whether it is an error."""
        return self.status >= 400

    def written(self) -> bytes:
        """Return the line of an output file, JSON in UTF-8; half a surrogate pair is escaped."""
        text = json.dumps(self.told(), ensure_ascii=False) + "\n"
        return text.encode("utf-8", "backslashreplace")

    def told(self) -> dict[str, Any]:
        """Return what that line says."""
        error = self.body.get("error") if self.failed and isinstance(self.body, dict) else None
        return {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": self.custom_id,
            "response": {
                "status_code": self.status,
                "request_id": self.request_id,
                "body": self.body,
            },
            "error": error,
        }


def read_lines(texts: Iterable[bytes]) -> list[Line]:
    """Return the requests of a file in UTF-8; empty lines are left out.

    Raises:
        RequestError: lines are no requests; names the first ones and what each lacks.
    """
    lines: list[Line] = []
    wrong: list[str] = []
    known: set[str] = set()
    for number, raw in enumerate(texts, 1):
        text = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if not text.strip():
            continue
        try:
            line = _line(text)
            if line.custom_id in known:
                raise RequestError(f"custom_id {shortened(line.custom_id)!r} is there before")
        except RequestError as error:
            wrong.append(f"line {number}: {error}")
            continue
        known.add(line.custom_id)
        lines.append(line)
    if wrong:
        more = f"\nand {len(wrong) - MOST_TOLD} more" if len(wrong) > MOST_TOLD else ""
        told = "\n".join(wrong[:MOST_TOLD])
        raise RequestError(f"the batch has lines that are no requests:\n{told}{more}")
    if not lines:
        raise RequestError("the batch has no requests; write one a line, as JSON")
    return lines


def _line(raw: bytes) -> Line:
    """Return a request.

    Raises:
        RequestError: it is none.
    """
    try:
        text = raw.decode()
        found = json.loads(text)
    except UnicodeDecodeError as error:
        raise RequestError(f"it is no text in UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"it is {shortened(text.strip())}; write an object")
    if unknown := [name for name in found if name not in FIELDS]:
        raise RequestError(f"it has {shortened(unknown[0])!r}; the fields are {', '.join(FIELDS)}")
    name, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(name, str) or not name:
        raise RequestError("custom_id is missing or no text; give each request its own")
    if found.get("method", "POST") != "POST":
        raise RequestError(f"method is {shortened(repr(found['method']))}; requests are POST")
    if url not in URLS:
        raise RequestError(f"url is {shortened(repr(url))}; give one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise RequestError("body is missing or no object")
    if body.get("stream"):
        raise RequestError("body has stream true; a batch has whole answers, so leave it out")
    if (form := body.get("encoding_format")) in BYTES:
        raise RequestError(
            f"body has encoding_format {form}; a batch has answers in JSON, so send base64 or float"
        )
    return Line(name, url, json.dumps(body).encode())


async def answers(app: ASGIApp, lines: Sequence[Line], max_inflight: int) -> AsyncIterator[Answer]:
    """Yield an answer for each line, in their order.

    Args:
        app: the application, which is asked as by HTTP.
        lines: the requests.
        max_inflight: so many are asked at once.
    """
    turns = _Turns(app, max_inflight)
    asked: deque[asyncio.Task[Answer]] = deque()
    try:
        for line in lines:
            asked.append(asyncio.create_task(turns.answer(line)))
            while len(asked) >= AHEAD * max_inflight or (asked and asked[0].done()):
                yield await asked.popleft()
        while asked:
            yield await asked.popleft()
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


class _Turns:
    """Who is asked when: so many at once, and what too many waited for again, behind others."""

    def __init__(self, app: ASGIApp, max_inflight: int) -> None:
        self._app = app
        self._turns = asyncio.Semaphore(max_inflight)
        self._again = asyncio.Lock()  # of those that were refused one is asked at a time
        self._running = 0  # that were not refused so far
        self._begun = 0

    async def answer(self, line: Line) -> Answer:
        """Return the answer to a line; 429 only where nobody else was there to wait for."""
        async with self._turns:
            self._running += 1
            self._begun += 1
            try:
                answer = await ask(self._app, line)
            finally:
                self._running -= 1
            if answer.status != TOO_MANY:
                return answer
            async with self._again:
                return await self._ask_again(line)

    async def _ask_again(self, line: Line) -> Answer:
        while True:
            alone, begun = self._running == 0, self._begun
            answer = await ask(self._app, line)
            if answer.status != TOO_MANY or (alone and begun == self._begun):
                return answer
            await asyncio.sleep(AGAIN_AFTER_S)


async def ask(app: ASGIApp, line: Line) -> Answer:
    """Return what an endpoint answers, as a client in this process that does not go away."""
    messages: Iterator[Message] = iter(({"type": "http.request", "body": line.body},))
    parts: list[bytes] = []
    status, is_whole, headers = 0, False, dict[bytes, bytes]()

    async def receive() -> Message:
        if (message := next(messages, None)) is None:
            await asyncio.Event().wait()  # for ever: the client stays
            raise AssertionError("it does not")
        return message

    async def send(message: Message) -> None:
        nonlocal status, is_whole
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            is_whole = not message.get("more_body", False)

    async def run() -> None:
        await app(_scope(line), receive, send)

    try:
        await asyncio.create_task(run())  # as in a server: a request ends with its task
    except Exception:  # a bug is answered with a 500 and logged, and then raised to servers
        if not is_whole:
            raise
    request_id = headers.get(b"x-request-id", b"").decode("latin-1")
    return Answer(line.custom_id, status, request_id, json.loads(b"".join(parts)))


def _scope(line: Line) -> Scope:
    length = str(len(line.body)).encode()
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
        "client": None,
        "server": None,
        "state": {},
    }
