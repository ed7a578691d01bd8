"""What the engine has done: counted, and told to listeners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from onnxport.serving.events import EventKind, FinishedRecord, Listener, RequestEvent, StepRecord
from onnxport.serving.outputs import FINISH_REASONS, FinishReason
from onnxport.serving.request import Request
from onnxport.serving.runtime import Runtime
from onnxport.serving.stats import EngineStats, SpeculationCounters

MOST_RETRY_S = 60.0


class Tally:
    """Counters, and who hears of what is counted. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._gap_s: float | None = None  # mean time between two requests that end
        self._last_end_s: float | None = None  # since there was work
        self._finished: dict[FinishReason, int] = dict.fromkeys(FINISH_REASONS, 0)
        self._adapters = _AdapterNames()
        self._num_steps = 0
        self.num_failed_steps = 0
        self.num_refused = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def add_listener(self, listener: Listener) -> None:
        """Tell `listener` from now on what happens."""
        self._listeners.append(listener)

    @property
    def retry_after_s(self) -> float:
        """When a request that found the queue full may come again, in seconds."""
        return min(MOST_RETRY_S, max(1.0, self._gap_s or 1.0))

    def tell(
        self,
        kind: EventKind,
        request: Request,
        time_s: float,
        finished: FinishedRecord | None = None,
    ) -> None:
        """Tell the listeners that something happened to a sequence."""
        if self._listeners:
            event = RequestEvent(kind, request.request_id, request.index, time_s, finished)
            for listener in self._listeners:
                listener.on_request(event)

    def note_step(self, record: StepRecord) -> None:
        """A step was committed."""
        self._num_steps += 1
        for listener in self._listeners:
            listener.on_step(record)

    def note_end(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """A sequence has ended."""
        request.times.finished_s = now_s
        self._finished[reason] += 1
        if self._last_end_s is not None:
            gap = now_s - self._last_end_s
            self._gap_s = gap if self._gap_s is None else 0.9 * self._gap_s + 0.1 * gap
        self._last_end_s = now_s
        if self._listeners:
            record = FinishedRecord(
                reason=reason,
                metrics=request.metrics,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                max_tokens=request.params.max_tokens,
                n=request.params.n,
                num_sequences=request.params.num_sequences,
            )
            self.tell("finished", request, now_s, record)

    def note_idle(self) -> None:
        """There is nothing to do any more: what passes until the next end tells nothing."""
        self._last_end_s = None

    def stats(
        self, runtime: Runtime, speculation: SpeculationCounters | None = None
    ) -> EngineStats:
        """Return a snapshot of the counters, with those of the model's parts."""
        scheduler, pool, offloader = runtime.scheduler, runtime.pool, runtime.offloader
        store = offloader.store if offloader else None
        running, waiting = self._adapters.of(runtime)
        return EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_steps=self._num_steps,
            num_failed_steps=self.num_failed_steps,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            prefix_cache_queries=scheduler.hit_counts.looked_up,
            prefix_cache_hits=scheduler.hit_counts.found,
            num_cached_blocks=pool.num_cached,
            host_tier_bytes=store.host_bytes if store else 0,
            disk_tier_bytes=store.disk_bytes if store else 0,
            num_blocks_saved=offloader.num_saved if offloader else 0,
            num_blocks_loaded=offloader.num_loaded if offloader else 0,
            num_refused=self.num_refused,
            num_tier_errors=offloader.num_errors if offloader else 0,
            num_losses=len(runtime.losses),
            num_fallbacks=sum(one.replaced_by is not None for one in runtime.losses),
            speculation=speculation,
            adapter_requests=runtime.adapters.num_requests,
            max_adapters=runtime.limits.max_adapters,
            running_adapters=running,
            waiting_adapters=waiting,
            num_adapters=runtime.adapters.num_held,
            num_adapter_swaps=runtime.adapters.num_swaps,
            finished=dict(self._finished),
        )


class _AdapterNames:
    """The adapters of requests that run and wait: thousands perhaps, so they are found once."""

    def __init__(self) -> None:
        self._unfinished: Mapping[str, int] = {}
        self._running: set[tuple[int, str, str]] = set()
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def of(self, runtime: Runtime) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the adapters of requests that run, and of those that wait, by name."""
        unfinished = runtime.adapters.num_requests
        # A name may be of two adapters: one that was replaced still runs.
        running = {
            (member.number, member.name, one.request_id)
            for one in runtime.scheduler.running
            if one.adapter
            for member in one.adapter.members
        }
        if unfinished is not self._unfinished or running != self._running:
            self._unfinished, self._running = unfinished, running
            counts = Counter(number for number, _, _ in running)
            waiting = sorted(  # what is left of all
                one.name
                for one in runtime.adapters.loaded
                if unfinished[one.name] > counts[one.number]
            )
            self._names = tuple(sorted({name for _, name, _ in running})), tuple(waiting)
        return self._names
