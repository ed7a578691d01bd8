"""Work that an event loop has done by a thread, and waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Call(Future[T]):
    """Work to be done by another thread; its result, or what it raised."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Do nothing yet.

        Args:
            work: is called by `run`.
        """
        super().__init__()
        self._work = work

    def run(self) -> None:
        """Do the work, unless nobody waits for it any more; what is no `Exception` is raised."""
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._work())
            except Exception as error:
                self.set_exception(error)


async def in_a_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns in a thread of its own, for which the process does not wait."""
    call = Call(work)

    def run() -> None:
        try:
            call.run()
        except BaseException as error:  # such as a panic of a library in Rust
            call.set_exception(error)

    threading.Thread(target=run, name="onnxport-reading", daemon=True).start()
    return await asyncio.wrap_future(call)
