"""Servers as real processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import PATIENCE_S, let_httpx_wait, wait_until

SCRIPT = Path(__file__).with_name("scripted.py")


@dataclass
class RunningServer:
    """A server process."""

    url: str
    process: subprocess.Popen[str]

    def health(self) -> dict[str, Any]:
        body: dict[str, Any] = httpx.get(f"{self.url}/health").json()
        return body

    def wait_for(self, **wanted: int) -> dict[str, Any]:
        """Return the engine's counters once they are as `wanted`."""
        stats: dict[str, Any] = {}

        def is_so() -> bool:
            stats.update(self.health()["engine"])
            found = {**stats, **stats["finished"]}
            return all(found[name] == value for name, value in wanted.items())

        try:
            wait_until(is_so)
        except AssertionError as error:
            raise AssertionError(f"wanted {wanted}, found {stats}") from error
        return stats

    def wait_for_refusal(self) -> None:
        """Return once the server accepts no connections."""

        def refuses() -> bool:
            try:
                socket.create_connection(self._address).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_until(refuses)

    @contextmanager
    def asking(self, path: str, body: Mapping[str, Any]) -> Iterator[socket.socket]:
        """Send a request; give its connection, which may be closed at any time."""
        content = json.dumps(body).encode()
        host = self.url.removeprefix("http://")
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection(self._address) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            yield connection

    @property
    def _address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; return the exit code and what was printed."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session", autouse=True)
def _patient_clients() -> None:
    let_httpx_wait()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer and a chat template."""
    from .scripted import write_tokenizer

    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@contextmanager
def _servers(model_folder: Path) -> Iterator[StartServer]:
    """Give what starts servers, and end them all, also one that a test did not wait for."""
    processes: list[subprocess.Popen[str]] = []

    def start(**settings: Any) -> RunningServer:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(model_folder), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            _, err = process.communicate(timeout=PATIENCE_S)
            pytest.fail(f"the server did not start: {err}")
        return RunningServer(address, process)

    try:
        yield start
    finally:
        for process in processes:
            with process:  # closes its pipes
                process.kill()


@pytest.fixture(scope="session")
def _start(model_folder: Path) -> Iterator[StartServer]:
    with _servers(model_folder) as start:
        yield start


@pytest.fixture
def start_server(model_folder: Path) -> Iterator[StartServer]:
    """Return a function that starts a server of its own for a test, which ends with the test."""
    with _servers(model_folder) as start:
        yield start


@pytest.fixture(scope="session")
def server(_start: StartServer) -> RunningServer:
    """Return the server that the tests share; fast, and never stopped by a test."""
    return _start()
