"""A thread that gives what steps return to those who wait for it, while the next ones go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue

from onnxport.serving.growth import Growth

MOST_STEPS = 2  # on their way, before the engine waits for them


class Publisher:
    """Publishes one step after the other. Belongs to the engine's thread."""

    def __init__(self, publish: Callable[[list[Growth]], None]) -> None:
        """Start the thread, which calls `publish`; `close` ends it."""
        self._publish = publish
        self._queue: Queue[list[Growth] | None] = Queue(MOST_STEPS)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="onnxport-publisher", daemon=True)
        self._thread.start()

    def put(self, growths: list[Growth]) -> None:
        """Publish what a step has added, soon.

        Raises:
            BaseException: what publishing raised before. Nothing is published any more.
        """
        self._check()
        if growths:
            self._queue.put(growths)

    def flush(self) -> None:
        """Wait until everything is published.

        Raises:
            BaseException: as `put`.
        """
        self._queue.join()
        self._check()

    def close(self) -> None:
        """Publish what is left and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (growths := self._queue.get()) is not None:
            try:
                if self._failure is None:
                    self._publish(growths)
            except BaseException as error:
                self._failure = error
            del growths  # what has ended is not kept until the next step
            self._queue.task_done()
