"""Threads that compile: a few, for which no process waits long, and which can be left behind."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Work = tuple[Future[Any], Callable[[], Any]]


EXIT_S = 2.0


class CompileThreads:
    """Runs what is submitted, so much at once. Safe to use from any thread.

    A library cannot be interrupted in the middle of a grammar. So of whatever takes too long
    another thread takes the place, for so many in all, and a process that ends waits EXIT_S for
    what is compiled, and no longer: a thread that comes back into Python after its end brings the
    process down.
    """

    def __init__(self, count: int, most_left: int, name: str) -> None:
        """Start no thread yet.

        Args:
            count: threads that work at once.
            most_left: of those that were left behind and still work.
            name: of the threads.
        """
        self._name = name
        self._most_left = most_left
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._room = count  # threads that may be started
        self._idle = 0
        self._waiting: deque[Work] = deque()
        self._left: set[Future[Any]] = set()
        self._closed = False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        _ALL.add(self)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Return what `work` will return."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                future.cancel()
                return future
            self._waiting.append((future, work))
            if self._idle < len(self._waiting) and self._room:
                self._room -= 1
                self._start()
            self._changed.notify()
        return future

    def leave(self, future: Future[Any]) -> None:
        """Let another thread take the place of the one that works on this."""
        with self._changed:
            left = len(self._left)
            if self._closed or not future.running() or future in self._left:
                return
            if left < self._most_left:
                self._left.add(future)
                self._start()

    def close(self) -> None:
        """Begin nothing more; wait for nothing."""
        with self._changed:
            self._closed = True
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def join(self, until: float) -> None:
        """Wait for the threads to end, up to a time of the monotonic clock."""
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            future, work = taken
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            with self._changed:
                if future in self._left:  # another one works in its place
                    self._left.remove(future)
                    return

    def _take(self) -> Work | None:
        """Wait for work; None when there will be none."""
        with self._changed:
            self._idle += 1
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


_ALL: weakref.WeakSet[CompileThreads] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ALL.clear)  # which has none of the threads


@atexit.register
def _end() -> None:
    """Let no thread come back into an interpreter that is gone."""
    until = time.monotonic() + EXIT_S
    for threads in list(_ALL):
        threads.close()
    for threads in list(_ALL):
        threads.join(until)
