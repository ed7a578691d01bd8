"""What requests are called: in headers, bodies, and the log."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.request_ids import RequestIdMiddleware
from onnxport.serving.http.server import ServerOptions, _AccessLog, _LastWords
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer, StartServer
from .fake import MODEL as FAKE
from .fake import Client, FakeEngine
from .scripted import MODEL, say

OURS = re.compile("[0-9a-f]{32}")
ENDPOINTS = {
    "/v1/completions": ("cmpl-", {"prompt": "ab"}),
    "/v1/chat/completions": ("chatcmpl-", {"messages": [{"role": "user", "content": "ab"}]}),
    "/v1/responses": ("resp_", {"input": "ab"}),
}


class Named(Client):
    """Sends a header, too."""

    async def send(
        self, path: str, header: str | None, **fields: Any
    ) -> tuple[httpx.Response, str]:
        headers = {} if header is None else {"X-Request-Id": header}
        answer = await self._http.post(path, json={"model": FAKE, **fields}, headers=headers)
        return answer, answer.headers["x-request-id"]


@pytest.fixture
def client(model_folder: Path) -> Named:
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    return Named(FakeEngine(tokenizer), model_folder)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_header_names_a_request(client: Named, path: str, stream: bool) -> None:
    prefix, body = ENDPOINTS[path]
    given = "trace/1:" + "~" * 120
    answer, name = await client.send(path, given, **body, stream=stream)
    assert (answer.status_code, name) == (200, given)
    assert f'"id":"{prefix}{given}"' in answer.text
    [asked] = client.engine.asked
    assert asked.request_id.startswith(f"{prefix}{given}-")


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_one_id_twice_is_two_requests_of_the_engine(client: Named, path: str) -> None:
    for _ in range(2):
        answer, _ = await client.send(path, "same", **ENDPOINTS[path][1])
        assert answer.status_code == 200
    assert len({asked.request_id for asked in client.engine.asked}) == 2


@pytest.mark.parametrize("header", [None, "", "a b", "x" * 129, "é"])
async def test_others_get_one_of_ours(client: Named, header: str | None) -> None:
    found = set()
    for path, (prefix, body) in ENDPOINTS.items():
        sent = None if header is None else header.encode()
        answer, name = await client.send(path, sent, **body)  # type: ignore[arg-type]
        assert OURS.fullmatch(name)
        assert answer.json()["id"] == prefix + name
        found.add(name)
    assert len(found) == 3


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_body_names_a_request_that_no_header_names(client: Named, path: str) -> None:
    prefix, body = ENDPOINTS[path]
    answer, name = await client.send(path, None, **body, request_id="mine")
    assert (name, answer.json()["id"]) == ("mine", f"{prefix}mine")
    _, name = await client.send(path, "proxy", **body, request_id="mine")
    assert name == "proxy"
    _, name = await client.send(path, None, **body, request_id=None)
    assert OURS.fullmatch(name)


async def test_answers_of_every_kind_have_one(client: Named, model_folder: Path) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/nowhere"):
        answer = await client.get(path, **{"X-Request-Id": "a"})
        assert answer.headers.get_list("x-request-id") == ["a"]
    answer, name = await client.send("/v1/completions", "a", prompt=5)
    assert (answer.status_code, name) == (400, "a")
    keyed = Named(client.engine, model_folder, AppOptions(api_keys=("k",), max_body_bytes=100))
    answer, name = await keyed.send("/v1/completions", "a", prompt="b")
    assert (answer.status_code, name) == (401, "a")
    answer, name = await keyed.send("/version", "a", prompt="b" * 100)
    assert (answer.status_code, name) == (413, "a")


async def test_pages_of_other_origins_may_read_it(client: Named, model_folder: Path) -> None:
    page = "https://chat.example"
    opened = Named(client.engine, model_folder, AppOptions(allowed_origins=(page,)))
    answer = await opened.get("/health", Origin=page)
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_the_openai_client_shows_it(server: RunningServer) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": say("a")}
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        done = client.completions.create(**ask)
        assert done._request_id is not None
        assert done.id == f"cmpl-{done._request_id}"
        named = client.completions.create(**ask, extra_headers={"X-Request-Id": "mine"})
        assert named._request_id == "mine"
        named = client.completions.create(**ask, extra_body={"request_id": "body"})
        assert named._request_id == "body"


def test_it_is_in_the_log_of_a_failure(start_server: StartServer) -> None:
    server = start_server(fail_after=0)
    ask = {"model": MODEL, "prompt": say("a")}
    for stream in (False, True):
        headers = {"X-Request-Id": f"mine-{stream}"}
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=ask | {"stream": stream}, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, f"mine-{stream}")
    _, _, err = server.stop()
    assert re.search(r"request cmpl-mine-False-[0-9a-f]{8}-0 failed", err)
    assert re.search(r"request cmpl-mine-True-[0-9a-f]{8}-0 failed", err)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_logged_with_it(
    client: Named, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    client.engine.refusals = [ZeroDivisionError()]
    transport = httpx.ASGITransport(client._http._transport.app, raise_app_exceptions=False)  # type: ignore[attr-defined]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post(
            "/v1/completions",
            json={"prompt": "a", "stream": stream},
            headers={"X-Request-Id": "mine"},
        )
    assert answer.status_code == 500
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert "request mine failed by a bug of the server" in caplog.text


async def test_the_access_log_has_it(caplog: pytest.LogCaptureFixture, client: Named) -> None:
    caplog.set_level(logging.INFO, logger="onnxport")
    app = client._http._transport.app  # type: ignore[attr-defined]
    transport = httpx.ASGITransport(_AccessLog(_LastWords(app)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "mine"})
        await http.get("/no%0Awhere", headers={"X-Request-Id": "other"})
    lines = [record.getMessage() for record in caplog.records if " - " in record.getMessage()]
    assert lines == [
        '127.0.0.1:123 - "POST /v1/completions" 200 mine',
        '127.0.0.1:123 - "GET /no%0Awhere" 404 other',
    ]


def test_a_server_logs_requests_where_it_is_asked_to(start_server: StartServer) -> None:
    server = start_server(access_log=True)
    url = f"{server.url}/v1/completions"
    for number in range(2):
        asked = {"prompt": say("a"), "stream": bool(number)}
        httpx.post(url, json=asked, headers={"X-Request-Id": f"mine-{number}"})
    lines = [line for line in server.stop()[2].splitlines() if " - " in line]
    assert [line.partition(" - ")[2] for line in lines] == [
        f'"POST /v1/completions" 200 mine-{number}' for number in range(2)
    ]
    assert not ServerOptions().access_log
    server = start_server()
    httpx.get(f"{server.url}/version")
    assert server.stop()[1:] == ("closed\n", "")


async def test_last_words_of_a_server_have_it() -> None:
    sent: list[Any] = []

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-request-id", b"mine")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    app: Any = _LastWords(RequestIdMiddleware(hang))
    task = asyncio.ensure_future(app(scope, send, send))
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"x-request-id"]) == (503, b"mine")
