"""How tests wait: for what is to happen, never for a time to pass."""

from __future__ import annotations

import asyncio
import functools
import inspect
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any

PATIENCE_S = 300.0  # for what happens soon, or never: only a hang takes as long on any machine
POLL_S = 0.002


def wait_until(is_so: Callable[[], object]) -> None:
    """Return once `is_so` returns something true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:g} s in vain"
        time.sleep(POLL_S)


async def until(is_so: Callable[[], object]) -> None:
    """Return once `is_so` returns something true; the event loop goes on meanwhile."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(POLL_S)


def let_httpx_wait() -> None:
    """Let httpx's clients wait for answers as long as tests do; by itself it gives up after 5 s."""
    import httpx

    default = inspect.signature(httpx.get).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = PATIENCE_S


class _Jumping(selectors.DefaultSelector):
    """Takes no time to wait for timers."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout and 0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while there is work, and then jumps to a timer."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def timeless(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in a `TimelessLoop`: what it sleeps takes no time, and is exact."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=TimelessLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
