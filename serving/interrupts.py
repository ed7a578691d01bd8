"""Ctrl-C between two steps, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """Holds SIGINT back while it is entered, in the main thread; elsewhere it does nothing.

    What a step changes is only whole at its end. A second signal does not wait: whoever sends it
    wants out, and the engine is not to be used after it.
    """

    def __init__(self) -> None:
        self._previous: signal._HANDLER = None
        self._pending = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # Python's own, or the caller's
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        if error is None:
            self.check()

    def check(self) -> None:
        """Let a signal through that came since the last call: usually a KeyboardInterrupt."""
        if self._pending:
            self._pending = False
            self._pass_on(None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._pass_on(frame)
        self._pending = True

    def _pass_on(self, frame: FrameType | None) -> None:
        assert callable(self._previous), "else nothing is noted"
        self._previous(signal.SIGINT, frame)
