"""Servers as real processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

SCRIPT = Path(__file__).with_name("scripted.py")
STOP_TIMEOUT_S = 30
WAIT_TIMEOUT_S = 10


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
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while time.monotonic() < deadline:
            stats: dict[str, Any] = self.health()["engine"]
            found = {**stats, **stats["finished"]}
            if all(found[name] == value for name, value in wanted.items()):
                return stats
            time.sleep(0.02)
        raise AssertionError(f"wanted {wanted}, found {stats}")

    def wait_for_refusal(self) -> None:
        """Return once the server accepts no connections."""
        host, port = self.url.removeprefix("http://").split(":")
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, int(port))).close()
            except ConnectionRefusedError:
                return
            time.sleep(0.02)
        raise AssertionError("the server still accepts connections")

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; return the exit code and what was printed."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=STOP_TIMEOUT_S)
        return self.process.returncode, out, err


StartServer = Callable[..., RunningServer]


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
            _, err = process.communicate(timeout=STOP_TIMEOUT_S)
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
