"""Requests end when their client goes, and the server ends in order."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from onnxport.errors import OnnxportError
from onnxport.serving.http.server import (
    SPARE_FILES,
    ServerOptions,
    _LastWords,
    raise_open_files,
    serve,
)
from onnxport.serving.http.sockets import bind
from tests.tiers import every
from tests.waiting import PATIENCE_S

from .conftest import RunningServer, StartServer
from .scripted import MODEL, say

SLOW = {"latency_s": 0.02}
LONG = {"model": MODEL, "prompt": say("x" * 1000), "max_tokens": 1000}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": say("x" * 1000)}]}


@pytest.fixture(scope="module")
def slow(_start: StartServer) -> RunningServer:
    return _start(**SLOW)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("completions", LONG, 1),
        ("completions", LONG | {"prompt": [LONG["prompt"]] * 3}, 3),
        ("chat/completions", CHAT, 1),
    ],
)
def test_a_client_that_goes_away_ends_its_requests(
    slow: RunningServer, path: str, body: dict[str, Any], count: int, stream: bool
) -> None:
    before = slow.wait_for(num_requests_running=0)["finished"]["abort"]
    with slow.asking(path, body | {"stream": stream}) as connection:
        slow.wait_for(num_requests_running=count)
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    stats = slow.wait_for(num_requests_running=0, abort=before + count)
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_a_stream_that_its_reader_closes_ends(slow: RunningServer) -> None:
    before = slow.wait_for(num_requests_running=0)["finished"]["abort"]
    with OpenAI(base_url=f"{slow.url}/v1", api_key="unused") as client:
        stream = client.completions.create(stream=True, **LONG)
        assert next(iter(stream)).choices[0].text == "x"
        stream.close()
    slow.wait_for(num_requests_running=0, abort=before + 1)


def test_an_error_inside_a_stream_is_an_event(start_server: StartServer) -> None:
    server = start_server(fail_after=3)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}) as got:
        assert got.status_code == 200
        *_, last, done = got.read().decode().strip().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "told to fail" in error["message"]
    assert error["type"] == "server_error"
    assert done == "data: [DONE]"
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            client.completions.create(**LONG)
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            list(client.chat.completions.create(stream=True, **CHAT))
    code, _, err = server.stop()
    assert code == 0
    assert "Traceback" in err  # the cause is in the log


@pytest.mark.parametrize("number", every(2, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_an_idle_server_waits_for_nothing(start_server: StartServer, number: int) -> None:
    """An hour for running requests is no hour for a connection that asks nothing."""
    server = start_server(grace_s=3600)
    with httpx.Client() as client:  # keeps its connection
        assert client.get(f"{server.url}/health").status_code == 200
        code, out, err = server.stop(number)
    assert (code, out, err) == (0, "closed\n", "")


def ask_long(server: RunningServer, results: list[Any], **fields: Any) -> threading.Thread:
    """Send a long request from a thread; its text or its error is appended to `results`."""

    def ask() -> None:
        text = ""
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            try:
                for chunk in client.completions.create(stream=True, **LONG | fields):
                    text += chunk.choices[0].text
            except openai.APIError as error:
                results.append(error)
            else:
                results.append(text)

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_for(num_requests_running=1)
    return thread


def test_running_requests_finish_first(start_server: StartServer, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    server = start_server(hold=str(hold))
    results: list[Any] = []
    thread = ask_long(server, results, prompt=say("x" * 40))
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_refusal()
    assert not results
    hold.unlink()
    thread.join()
    assert results == ["x" * 40]
    assert server.process.wait(PATIENCE_S) == 0


def test_what_runs_too_long_is_aborted(start_server: StartServer) -> None:
    server = start_server(grace_s=0.3, **SLOW)
    results: list[Any] = []
    thread = ask_long(server, results)
    code, out, _ = server.stop()
    thread.join()
    assert (code, out) == (0, "closed\n")
    [error] = results
    assert "shutting down" in str(error)


def test_a_second_signal_aborts_at_once(start_server: StartServer) -> None:
    server = start_server(grace_s=3600, **SLOW)
    results: list[Any] = []
    thread = ask_long(server, results)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_refusal()
    assert not results
    code, out, err = server.stop(signal.SIGINT)
    thread.join()
    assert (code, out) == (0, "closed\n")
    assert "Traceback" not in err
    assert "shutting down" in str(results[0])


def test_two_servers_on_one_port() -> None:
    """Both may bind before one of them listens; the other one says what is wrong."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        second = bind("127.0.0.1", port)
        first.listen()

        async def nothing() -> None: ...

        with pytest.raises(OnnxportError, match=f"cannot listen on 127.0.0.1 port {port}"):
            serve(nothing, [second], nothing, lambda: None, ServerOptions())  # type: ignore[arg-type]


def test_a_name_with_two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them comes first depends on the machine; that of IPv4 is what clients try."""
    ways = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")]

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "localhost"
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in ways]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with bind("localhost", 0) as found:
        assert found.getsockname()[0] == "127.0.0.1"


def test_a_name_that_no_host_has() -> None:
    with pytest.raises(OnnxportError, match="no name of a host"):
        bind("a" * 64 + ".example", 0)


async def test_a_request_that_is_cancelled_is_told_so() -> None:
    sent: list[Any] = []

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    task = asyncio.ensure_future(_LastWords(hang)(scope, send, send))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 503
    assert b"shutting down" in sent[1]["body"]


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "warned"),
    [
        (1024, 4096, 2000, False),
        (1024, 2048, 2048, True),
        (1024, -1, 2000, False),
        (4096, 4096, None, False),
        (-1, -1, None, False),
    ],
)
def test_as_many_files_as_there_may_be_requests(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    wanted: int | None,
    warned: bool,
) -> None:
    resource = pytest.importorskip("resource")
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    connections = 2000 - SPARE_FILES if not warned else 4000 - SPARE_FILES
    raise_open_files(connections)
    assert limits[-1] == ((soft, hard) if wanted is None else (wanted, hard))
    assert bool(caplog.records) == warned
