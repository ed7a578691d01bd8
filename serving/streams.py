"""Deltas on their way from the engine's threads to the event loops that listen."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from onnxport.errors import OnnxportError
from onnxport.serving.outputs import CompletionDelta, Failure
from onnxport.serving.request import Request

logger = logging.getLogger(__name__)


class Stream:
    """The deltas of one request, for one event loop."""

    __slots__ = ("loop", "queue", "request_id", "unfinished")

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        """Begin without deltas.

        Args:
            request: whose.
            loop: where they are waited for.
        """
        self.request_id = request.request_id
        self.unfinished = set(range(request.params.num_sequences))  # its completions
        self.loop = loop
        self.queue: asyncio.Queue[CompletionDelta | OnnxportError] = asyncio.Queue()

    def put(self, entry: CompletionDelta | OnnxportError) -> bool:
        """Hand something on, from any thread; False where the loop is closed: nobody listens."""
        return _call(self.loop, self.queue.put_nowait, entry)


class Streams:
    """The streams of unfinished requests, guarded by a lock of the engine."""

    def __init__(self, lock: threading.Condition) -> None:
        """Begin without streams.

        Args:
            lock: held by whoever adds one, and asks whether there is one or how many.
        """
        self._lock = lock
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def add(self, stream: Stream) -> None:
        """Take the deltas of a request from now on; the lock is held."""
        self._streams[stream.request_id] = stream

    def drop(self, stream: Stream) -> None:
        """Forget a request that the engine has refused."""
        with self._lock:
            del self._streams[stream.request_id]

    def holds(self, stream: Stream) -> bool:
        """Whether a request has not ended; another one may have its name since."""
        return self._streams.get(stream.request_id) is stream

    def unfinished(self) -> list[Stream]:
        """Every stream whose request has not ended."""
        return list(self._streams.values())

    def send(self, deltas: Sequence[CompletionDelta]) -> set[Stream]:
        """Hand the deltas to their loops, one call a loop.

        Returns:
            The unfinished streams whose loops are closed, so that nobody listens any more.
        """
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, CompletionDelta]]] = {}
        with self._lock:
            for delta in deltas:
                stream = self._streams[delta.request_id]
                by_loop.setdefault(stream.loop, []).append((stream, delta))
                if delta.finish_reason is not None:
                    stream.unfinished.remove(delta.index)
                    if not stream.unfinished:
                        del self._streams[delta.request_id]
        return {
            stream
            for loop, entries in by_loop.items()
            if not _call(loop, _put, entries)
            for stream, _ in entries
            if stream.unfinished
        }

    def clear(self) -> list[Stream]:
        """Forget all streams, and return them; the lock is held."""
        streams, self._streams = self.unfinished(), {}
        return streams


def fail(streams: Sequence[Stream], message: str) -> None:
    """End streams with an error that is the engine's."""
    failure = Failure(message)
    for stream in streams:
        name = stream.request_id
        last = [
            (stream, CompletionDelta(name, index, "", (), None, "error", failure=failure))
            for index in sorted(stream.unfinished)
        ]
        if not _call(stream.loop, _put, last):
            logger.info("nobody listens to %s any more", name)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], given: object) -> bool:
    """Have a loop call something; False where it is closed."""
    try:
        loop.call_soon_threadsafe(function, given)
    except RuntimeError:
        return False
    return True


def _put(entries: Sequence[tuple[Stream, CompletionDelta]]) -> None:
    for stream, delta in entries:
        stream.queue.put_nowait(delta)
