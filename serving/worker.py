"""The asynchronous engine: one thread that steps, any number of event loops that listen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from onnxport.errors import DeviceLostError, OnnxportError, RequestError
from onnxport.providers.base import Capabilities
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.calls import Call, in_a_thread
from onnxport.serving.engine import Engine
from onnxport.serving.events import Listener
from onnxport.serving.fallback import Loss
from onnxport.serving.growth import Growth
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.publisher import Publisher
from onnxport.serving.request import Request
from onnxport.serving.stats import EngineStats, ended
from onnxport.serving.streams import Stream, Streams, fail
from onnxport.serving.structured.compiler import CompiledGrammar
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.tokenizer import Tokenizer
from onnxport.serving.worker_pooling import AsyncPoolingMethods

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncEngine(AsyncPoolingMethods):
    """Runs an engine in a thread of its own and streams its deltas.

    The thread is the only one to touch the engine. It sleeps on a condition while there is
    nothing to do. While it goes on with the next step, another thread makes the text of the last
    one, and gives each event loop the deltas in one call.
    """

    def __init__(self, engine: Engine) -> None:
        """Take over `engine` and start the thread; `close` ends both."""
        self._engine = engine
        self._wakeup = threading.Condition()
        # All below is guarded by _wakeup.
        self._commands: list[Callable[[], None]] = []
        self._calls: set[Call[Any]] = set()  # what `_between_steps` waits for
        self._streams = Streams(self._wakeup)
        self._accepting = True
        self._stopping = False
        self._failure: BaseException | None = None
        self._coming: Counter[str] = Counter()  # requests for the engine, by tenant
        self._stats = engine.stats()
        self._publisher = Publisher(self._publish)
        self._thread = threading.Thread(target=self._run, name="onnxport-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer."""
        return self._engine.tokenizer

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        return self._engine.capabilities

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted."""
        return self._accepting and self.failure is None

    @property
    def failure(self) -> str | None:
        """Why the engine can do nothing more; None while it can."""
        if self._failure is not None:
            return f"{type(self._failure).__name__}: {self._failure}"
        return self._engine.failure

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The providers that were lost, or never loaded, the latest last."""
        return self._engine.losses

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that requests may pick by `RequestOptions.adapter`."""
        return self._engine.adapters.loaded

    @property
    def has_all_adapters(self) -> bool:
        """Whether as many are loaded as may be, so that another has to make room for one more."""
        return self._engine.adapters.is_full

    @property
    def prefix_caching(self) -> bool:
        """Whether K/V that another request has computed are used again."""
        return self._engine.config.enable_prefix_caching

    @property
    def most_prompts(self) -> int:
        """Most requests that one client can have waiting, when nobody else has any."""
        config = self._engine.config
        if config.scheduling_policy == "fair":  # there is always room for one more tenant
            return max(1, config.max_queued_requests // 2)
        return config.max_queued_requests

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once."""
        return self._engine.config.max_num_seqs

    @property
    def max_logprobs(self) -> int | None:
        """Most likeliest tokens that a position may tell; None: there is no limit."""
        return self._engine.config.max_logprobs

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended, those among them that came while a step runs."""
        with self._wakeup:
            return len(self._streams)

    def stats(self) -> EngineStats:
        """Return the engine's counters as they were after the last step."""
        return self._stats

    async def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> Adapter:
        """Read an adapter off the event loop, and load it between two steps.

        A folder that never answers, of a network's file system, holds up its own request alone.

        Args:
            name: what requests call it.
            path: the folder, as PEFT writes it, or a file that the engine's reader reads.
            in_place: replace the one of that name, which its requests go on with.

        Raises:
            AdapterError: it cannot be read, does not fit the model, or its name is taken.
            CapacityError: no slot is free, its rank is too large, or memory is short.
            ProviderError: the device fails.
            OnnxportError: the engine is closed or has failed.
        """
        adapters = self._engine.adapters
        content = await in_a_thread(lambda: adapters.read(path))
        return await self._between_steps(lambda: adapters.load(name, content, in_place=in_place))

    async def unload_adapter(self, name: str) -> None:
        """Let no more requests find an adapter; those that use it go on.

        Raises:
            UnknownAdapterError: none of that name is loaded.
            OnnxportError: the engine is closed or has failed.
        """
        await self._between_steps(lambda: self._engine.adapters.unload(name))

    async def end_thoughts(self, request_id: str) -> bool:
        """Close what a request thinks, between two steps; see `Engine.end_thoughts`.

        Raises:
            OnnxportError: the engine is closed or has failed.
        """
        return await self._between_steps(lambda: self._engine.end_thoughts(request_id))

    @property
    def adapter_scales(self) -> Mapping[str, float]:
        """What adapters are times in requests that pick none, by name; others 0."""
        return self._engine.adapters.scales

    async def set_adapter_scales(self, scales: Mapping[str, float]) -> None:
        """Say what adapters are times in new requests that pick none, by name; others 0.

        Raises:
            UnknownAdapterError: one is not loaded.
            RequestError: the rank of their sum is too large.
            OnnxportError: the engine is closed or has failed.
        """
        await self._between_steps(lambda: self._engine.adapters.set_scales(scales))

    def add_listener(self, listener: Listener) -> None:
        """Tell `listener`, in the engine's thread, what happens from now on."""
        with self._wakeup:
            self._commands.append(lambda: self._engine.add_listener(listener))
            self._wakeup.notify()

    async def compile(self, form: StructuredOutputs) -> CompiledGrammar:
        """Return the grammar of requests for `stream`, compiled off the event loop.

        Raises:
            RequestError: it cannot be compiled, or not in time, or there is no tokenizer.
            OverloadedError: other grammars are being compiled.
            DeviceLostError: the device was lost, and nothing has taken over.
            OnnxportError: the engine is closed or has failed.
        """
        with self._wakeup:
            self._check_running()
        if self._engine.grammars is None:
            raise RequestError(
                "structured_outputs need a tokenizer and this engine has none", "structured_outputs"
            )
        return await self._engine.grammars.prepare(form)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Check a request now; return a generator that runs it and yields what each step adds.

        The request is queued when the generator is first asked for a delta. The last delta of
        each of `params.num_sequences` completions has a `finish_reason`. A generator that is
        closed before, or whose task is cancelled, aborts its request.

        Args:
            prompt: text or token ids.
            params: how to decode.
            request_id: names the request; None makes a unique name.
            options: how to treat it; None for the defaults.
            grammar: of its `structured_outputs`; None: it is waited for, here.

        Raises:
            RequestError: the request is not valid, or its id is in use.
            CapacityError: it can never fit the context or the KV cache.
            OverloadedError: the queue is full; also raised by the generator, when it fills up
                between the two.
            DeviceLostError: the device was lost, and nothing has taken over.
            OnnxportError: the engine is closed or has failed.
        """
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        self._check_open(request_id, options)
        return self._stream(self._engine.prepare(request_id, prompt, params, options, grammar))

    async def close(self, *, drain: bool = False) -> None:
        """Refuse new requests, end the others, and free the model. Idempotent.

        Args:
            drain: let unfinished requests finish first; otherwise they end with "abort".
        """
        with self._wakeup:
            self._accepting = False
            self._stopping = True
            if not drain:
                self._commands.append(self._abort_all)
            self._wakeup.notify()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self, request_id: str, options: RequestOptions | None) -> None:
        with self._wakeup:
            self._check_running()
            if request_id in self._streams:
                raise RequestError(f"request id {request_id!r} is in use", "request_id")
            if self._engine.queue_room(options, self._coming) < 1:
                raise self._engine.overload(self._coming.total())

    def _check_running(self) -> None:
        if self._failure is not None:
            raise OnnxportError(f"the engine has failed: {self._failure!r}; start it again")
        if self._engine.failure is not None:
            raise DeviceLostError(self._engine.failure)
        if not self._accepting:
            raise OnnxportError("the engine is closed and takes no more requests")

    async def _between_steps(self, work: Callable[[], T]) -> T:
        """Return what `work` returns in the engine's thread."""
        call = Call(work)
        with self._wakeup:
            self._check_running()
            self._calls.add(call)
            self._commands.append(call.run)
            self._wakeup.notify()
        try:
            return await asyncio.wrap_future(call)
        finally:
            with self._wakeup:
                self._calls.discard(call)

    async def _stream(self, request: Request) -> AsyncGenerator[CompletionDelta, None]:
        stream = Stream(request, asyncio.get_running_loop())
        with self._wakeup:
            self._check_open(request.request_id, request.options)
            self._streams.add(stream)
            self._commands.append(lambda: self._submit(request, stream))
            self._coming[self._engine.tenant_of(request.options)] += 1
            self._wakeup.notify()
        unfinished = request.params.num_sequences
        try:
            while unfinished:
                delta = await stream.queue.get()
                if isinstance(delta, OnnxportError):
                    raise delta
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            if unfinished:
                with self._wakeup:
                    self._commands.append(lambda: self._abort(stream))
                    self._wakeup.notify()

    # Everything below runs in the engine's thread, but for `_publish`.

    def _run(self) -> None:
        try:
            while self._take_commands():
                growths = self._engine.advance()
                self._stats = self._engine.stats()
                self._publisher.put(growths)
            self._publisher.flush()
            self._send(self._engine.close())
            self._stats = self._engine.stats()
            self._publisher.close()
        except BaseException as error:
            logger.critical("the engine's thread failed", exc_info=error)
            self._publisher.close()
            self._fail(error)

    def _take_commands(self) -> bool:
        """Wait for something to do and carry out what was asked; False when it is time to end."""
        with self._wakeup:
            while not (self._commands or self._engine.has_work or self._stopping):
                self._wakeup.wait()
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        return self._engine.has_work or not self._stopping or bool(self._commands)

    def _submit(self, request: Request, stream: Stream) -> None:
        """Give the engine a request; it may have come to refuse it since that was looked at."""
        tenant = self._engine.tenant_of(request.options)
        with self._wakeup:
            self._coming[tenant] -= 1
            if not self._coming[tenant]:
                del self._coming[tenant]
        try:
            self._engine.submit(request)
        except OnnxportError as error:
            self._streams.drop(stream)
            stream.put(error)

    def _abort(self, stream: Stream) -> None:
        self._publisher.flush()
        if self._streams.holds(stream):  # else it has ended already
            self._send(self._engine.abort(stream.request_id))
            self._stats = self._engine.stats()

    def _abort_all(self) -> None:
        for stream in self._streams.unfinished():
            self._abort(stream)

    def _publish(self, growths: list[Growth]) -> None:
        """Make the deltas of a step, and hand them on; in the publisher's thread."""
        self._send(self._engine.deltas(growths))

    def _send(self, deltas: list[CompletionDelta]) -> None:
        """Hand the deltas to their loops; a request whose loop is closed is ended."""
        for stream in self._streams.send(deltas):
            self._abandon(stream)

    def _abandon(self, stream: Stream) -> None:
        """Have a request ended whose event loop is gone."""
        with self._wakeup:
            self._commands.append(lambda: self._abort(stream))
            self._wakeup.notify()

    def _fail(self, error: BaseException) -> None:
        """End every stream with an error; the engine is not to be used again."""
        with self._wakeup:
            self._failure = error
            streams = self._streams.clear()
            calls = list(self._calls)
        self._stats = ended(self._stats, sum(len(stream.unfinished) for stream in streams))
        message = f"the engine failed: {type(error).__name__}: {error}"
        for call in calls:
            with contextlib.suppress(InvalidStateError):  # it is done, or nobody waits any more
                call.set_exception(OnnxportError(message))
        fail(streams, message)
