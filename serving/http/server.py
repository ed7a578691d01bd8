"""Run the application on a socket, and end it in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from urllib.parse import quote

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onnxport.serving.http.errors import STOPPED
from onnxport.serving.http.request_ids import HEADER, name_headers
from onnxport.serving.http.sockets import cannot_listen

# concurrent.futures.thread is imported above, and not by the first request that needs a thread: by
# then there may be no file left to read it from.

logger = logging.getLogger(__name__)

BACKLOG = 2048
SPARE_FILES = 512  # beside those of requests: libraries, tiers, and clients that idle
# For how long a connection may idle: longer than clients and proxies keep theirs, so that none is
# closed as the next request comes in.
KEEP_ALIVE_S = 75
SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANG_UP_S = 1.0  # how often idle connections are looked for while the server stops
CANCEL_AFTER_S = 5  # what requests have, once they were aborted, to send their last words


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server runs.

    Attributes:
        grace_s: how long running requests may go on after a signal to stop.
        access_log: whether every request is logged, with its id.
        tls: what connections are made with; None: they have no TLS.
    """

    grace_s: float = 10.0
    access_log: bool = False
    tls: ssl.SSLContext | None = None


def raise_open_files(connections: int) -> None:
    """Let the process have as many connections open as it is to hold, where the system lets it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    wanted = connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        logger.warning(
            "this process may have %d files and connections open; %d requests that run and wait "
            "need %d. Raise the limit (ulimit -n), or lower --max-queued-requests",
            soft,
            connections,
            wanted,
        )


def serve(
    app: ASGIApp,
    sockets: Sequence[socket.socket],
    abort_requests: Callable[[], Awaitable[None]],
    ready: Callable[[], None],
    options: ServerOptions,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then let running requests finish and return.

    SIGHUP, of a terminal that was closed, counts unless it is ignored, as `nohup` has it.

    Args:
        app: the application.
        sockets: bound ones, at least one; they are closed.
        abort_requests: ends whatever still runs `options.grace_s` seconds after the signal.
        ready: called once connections are accepted.
        options: see `ServerOptions`.
    """
    answering = _LastWords(app)
    config = uvicorn.Config(
        _AccessLog(answering) if options.access_log else answering,
        lifespan="off",
        log_level="warning",
        access_log=False,  # whose lines have no ids
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(options.grace_s) + CANCEL_AFTER_S,
        server_header=False,
    )
    config.load()
    config.ssl = options.tls  # made before, so that what its files lack was told by then
    server = _Server(config, abort_requests, ready, options.grace_s)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn raises the signals it caught again when it is done; they must not end the process
    # before the engine is closed.
    numbers = [*SIGNALS]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        server.run(sockets=[*sockets])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for sock in sockets:
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
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then say so.

        Raises:
            OnnxportError: another process has begun to listen there since the socket was bound.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not sockets:
                raise
            taken = next(one for one in sockets if not _listens(one))
            host, port = taken.getsockname()[:2]
            raise cannot_listen(host, port, error) from error
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at the second signal without waiting for requests, at the third at once."""
        if not self.should_exit:
            return super().handle_exit(sig, frame)
        if self._hurry.is_set() or self._loop is None:
            self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._hurry.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait for what runs; abort it when its time is over."""
        beside = [asyncio.ensure_future(self._abort_late())]
        if self.config.ssl is not None:
            beside.append(asyncio.ensure_future(self._hang_up()))
        try:
            await super().shutdown(sockets)
        finally:
            for each in beside:
                each.cancel()

    async def _hang_up(self) -> None:
        """End connections that nothing is computed for, whose clients do not answer a goodbye.

        TLS waits half a minute for that answer, and a client that only keeps a connection for
        later reads nothing.
        """
        while True:
            await asyncio.sleep(HANG_UP_S)
            for connection in list(self.server_state.connections):
                cycle = getattr(connection, "cycle", None)  # uvicorn's, of the request
                if cycle is None or cycle.response_complete:
                    connection.transport.abort()

    async def _abort_late(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._grace_s)
        await self._abort_requests()


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


class _LastWords:
    """Answers requests that are cancelled before they were answered, as the server stops."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if not has_begun and scope["type"] == "http":
                response = STOPPED.response(scope["path"])
                name_headers(scope, response.headers)
                await response(scope, receive, send)


class _AccessLog:
    """Logs every request, with its id, as its answer begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def logging_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                client = scope.get("client") or ("?", 0)
                logger.info(
                    '%s:%d - "%s %s" %d %s',
                    *client,
                    scope["method"],
                    quote(scope["path"]),
                    message["status"],
                    Headers(raw=message["headers"]).get(HEADER, "-"),
                )
            await send(message)

        await self._app(scope, receive, logging_status if scope["type"] == "http" else send)
