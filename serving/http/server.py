"""Run the application on a socket, and end it in order."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from onnxport.errors import OnnxportError

BACKLOG = 2048
# For how long a connection may idle: longer than clients and proxies keep theirs, so that none is
# closed as the next request comes in.
KEEP_ALIVE_S = 75
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CANCEL_AFTER_S = 5  # what requests have, once they were aborted, to send their last words


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server runs.

    Attributes:
        grace_s: how long running requests may go on after a signal to stop.
        access_log: whether every request is logged.
    """

    grace_s: float = 10.0
    access_log: bool = False


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; port 0 takes a free one.

    Raises:
        OnnxportError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise OnnxportError(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose another --port, or "
            "--port 0 for a free one."
        ) from error
    return sock


def url(host: str, sock: socket.socket) -> str:
    """Return the address of a bound socket, as a client writes it."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"


def serve(
    app: ASGIApp,
    sock: socket.socket,
    abort_requests: Callable[[], Awaitable[None]],
    ready: Callable[[], None],
    options: ServerOptions,
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish and return.

    Args:
        app: the application.
        sock: a bound socket; it is closed.
        abort_requests: ends whatever still runs `options.grace_s` seconds after the signal.
        ready: called once connections are accepted.
        options: see `ServerOptions`.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="info" if options.access_log else "warning",
        access_log=options.access_log,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(options.grace_s) + CANCEL_AFTER_S,
        server_header=False,
    )
    server = _Server(config, abort_requests, ready, options.grace_s)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn raises the signals it caught again when it is done; they must not end the process
    # before the engine is closed.
    previous = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        server.run(sockets=[sock])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        sock.close()


class _Server(uvicorn.Server):
    """Tells when it is ready, and aborts what runs too long after a signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        abort_requests: Callable[[], Awaitable[None]],
        ready: Callable[[], None],
        grace_s: float,
    ) -> None:
        super().__init__(config)
        self._abort_requests = abort_requests
        self._ready = ready
        self._grace_s = grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then say so."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait for what runs; abort it when its time is over."""
        aborting = asyncio.ensure_future(self._abort_late())
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()

    async def _abort_late(self) -> None:
        await asyncio.sleep(self._grace_s)
        await self._abort_requests()
