"""Compiled grammars: each is compiled once, in threads of its own, and kept.

llguidance, and what is built on it, is imported with the first grammar: most processes see none.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from onnxport.errors import OnnxportError, OverloadedError, RequestError
from onnxport.serving.structured.compiler import (
    CompiledGrammar,
    CompileLimits,
    TooLateError,
    compile_grammar,
    too_long,
)
from onnxport.serving.structured.kept import KeptMasks
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from concurrent.futures import Future

    from onnxport.serving.structured.threads import CompileThreads

logger = logging.getLogger(__name__)

CLOSED = "the engine is closed and takes no more requests"


@dataclass(slots=True, eq=False)
class _Compiling:
    """What is compiled, or will be, and how many wait for it."""

    future: Future[CompiledGrammar]
    num_waiting: int = 0

    @property
    def may_be_tried_again(self) -> bool:
        """Whether it was not compiled in time, and that is long enough ago."""
        if not self.future.done() or self.future.cancelled():
            return False
        error = self.future.exception()
        return isinstance(error, TooLateError) and time.monotonic() >= error.until_s


class GrammarCompiler:
    """Compiles grammars, and keeps those that were used last. Safe to use from any thread.

    Why one cannot be compiled is kept like them, so that a client which asks again and again keeps
    no thread busy. That it took too long holds for `CompileLimits.refused_s`.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], limits: CompileLimits | None = None
    ) -> None:
        """Compile nothing yet.

        Args:
            vocabulary: reads the model's tokens; called once, when they are first needed.
            limits: None for the defaults.
        """
        self._limits = limits or CompileLimits()
        self._read_vocabulary = vocabulary
        self._threads: CompileThreads | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._masks = KeptMasks()
        # All below and _threads are guarded by _lock, but for _vocabulary, which is by _reading.
        self._cache: OrderedDict[StructuredOutputs, _Compiling] = OrderedDict()
        self._num_chars = 0
        self._closed = False
        self._vocabulary: Vocabulary | None = None

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Return a compiled grammar; waits for it.

        Raises:
            RequestError: it cannot be compiled, or not in time.
            OverloadedError: others were compiled all the time.
            OnnxportError: the engine is closed.
        """
        from concurrent.futures import CancelledError

        with self._awaited(spec) as future:
            with contextlib.suppress(TimeoutError, CancelledError):
                future.exception(self._limits.timeout_s)
            return self._result(spec, future)

    async def prepare(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Return a compiled grammar; waits for it, and blocks no event loop.

        Raises:
            RequestError, OverloadedError: as `compile`.
        """
        import asyncio

        loop, compiled = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Future[CompiledGrammar]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(compiled.set)

        with self._awaited(spec) as future:
            future.add_done_callback(tell)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(compiled.wait(), self._limits.timeout_s)
            return self._result(spec, future)

    def close(self) -> None:
        """Compile nothing more."""
        with self._lock:
            self._closed = True
        if self._threads is not None:
            self._threads.close()

    @contextlib.contextmanager
    def _awaited(self, spec: StructuredOutputs) -> Iterator[Future[CompiledGrammar]]:
        """Give what is compiled, or will be, to one who waits for it.

        Whoever is told that it takes too long may come back for it. But who waits no more, as its
        client is gone, does not: what nobody else waits for is not begun then.
        """
        own = self._submit(spec)
        try:
            yield own.future
        except OnnxportError:
            raise
        except BaseException:
            self._forget(spec, own)
            raise
        finally:
            with self._lock:
                own.num_waiting -= 1

    def _forget(self, spec: StructuredOutputs, own: _Compiling) -> None:
        """Do not compile what the last one waited for, unless that has begun."""
        with self._lock:
            if own.num_waiting == 1 and own.future.cancel() and self._cache.get(spec) is own:
                self._drop(spec)

    def _result(self, spec: StructuredOutputs, future: Future[CompiledGrammar]) -> CompiledGrammar:
        """Return what was compiled, or raise why it was not."""
        if future.cancelled():
            raise OnnxportError(CLOSED)
        if not future.done():
            raise self._late(spec, future)
        error = future.exception()
        if isinstance(error, RequestError):  # kept for others, so what they ask is not kept with it
            raise RequestError(str(error), spec.where) from error.with_traceback(None)
        return future.result()

    def _submit(self, spec: StructuredOutputs) -> _Compiling:
        """Return what is compiled, or will be, for one more who waits for it."""
        with self._lock:
            own = self._cache.get(spec)
            if own is not None and own.may_be_tried_again:
                self._drop(spec)
                own = None
            if own is None:
                if self._closed:
                    raise OnnxportError(CLOSED)
                if self._threads is None:
                    from onnxport.serving.structured.threads import CompileThreads

                    limits = self._limits
                    self._threads = CompileThreads(
                        limits.num_threads, limits.max_left, "onnxport-grammar"
                    )
                own = _Compiling(self._threads.submit(partial(self._build, spec)))
                self._cache[spec] = own
                self._num_chars += spec.num_chars
                self._evict()
            self._cache.move_to_end(spec)
            own.num_waiting += 1
            return own

    def _drop(self, spec: StructuredOutputs) -> None:
        del self._cache[spec]
        self._num_chars -= spec.num_chars

    def _evict(self) -> None:
        """Forget what was not used for longest; who still waits for it will get it all the same."""
        limits = self._limits
        while len(self._cache) > 1 and (
            len(self._cache) > limits.max_entries or self._num_chars > limits.max_cached_chars
        ):
            self._drop(next(iter(self._cache)))

    def _late(
        self, spec: StructuredOutputs, future: Future[CompiledGrammar]
    ) -> RequestError | OverloadedError:
        """Return the error of a grammar that was not compiled in time."""
        timeout_s = self._limits.timeout_s
        if not (future.running() or future.done()):
            return OverloadedError(
                f"{self._limits.num_threads} other grammars were being compiled for {timeout_s} s; "
                "send the request again later",
                timeout_s,
            )
        if self._threads is not None:
            self._threads.leave(future)
        return RequestError(too_long(spec, self._limits), spec.where)

    def _build(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Compile a grammar, in one of the threads."""
        start_s = time.monotonic()
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        vocabulary = self._vocabulary
        compiled = compile_grammar(spec, vocabulary, self._limits, self._masks)
        logger.debug("compiled a %s in %.3f s", spec.kind, time.monotonic() - start_s)
        return compiled
