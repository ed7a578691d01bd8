"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import OnnxportError, OverloadedError, RequestError
from onnxport.kv.pool import BlockPool
from onnxport.providers.base import Capabilities, Model
from onnxport.serving import sampling
from onnxport.serving.batch import BatchPacker
from onnxport.serving.config import EngineConfig
from onnxport.serving.draft import StepPlan
from onnxport.serving.events import EventKind, FinishedRecord, Listener, RequestEvent, StepRecord
from onnxport.serving.intake import Intake
from onnxport.serving.offload import open_offloader
from onnxport.serving.outputs import (
    FINISH_REASONS,
    CompletionDelta,
    FinishReason,
    Logprob,
    TokenLogprobs,
)
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.sampler import RowLogprobs, Sampled
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.stats import EngineStats
from onnxport.serving.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MOST_RETRY_S = 60.0
FORGOTTEN_DEADLINES = 64  # of requests that have ended, before they are swept out


class Engine:
    """Runs requests on a model with continuous batching. Not thread-safe, but for `prepare`."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        eos_token_ids: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over `model`; `close` closes it.

        Args:
            model: the loaded model.
            tokenizer: None serves token ids only: no text comes out and no stop strings go in.
            config: the limits; None for the defaults.
            eos_token_ids: tokens that end a generation; None takes the tokenizer's.
            clock: the time in seconds, of which deadlines and events are told.

        Raises:
            OnnxportError: the folder for K/V blocks cannot be used.
        """
        config = config or EngineConfig()
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer else frozenset()
        limits = model.capabilities
        rows = min(config.max_num_seqs, limits.max_batch_rows or config.max_num_seqs)
        self.config = config
        self.tokenizer = tokenizer
        self._clock = clock
        self._model = model
        self._eos_token_ids = eos_token_ids
        self._intake = Intake(limits, config, rows, tokenizer, eos_token_ids)
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        self._scheduler = Scheduler(
            self._pool, rows, config.max_num_batched_tokens, config.scheduling_policy
        )
        self._packer = BatchPacker(rows, config.max_num_batched_tokens)
        self._offloader = open_offloader(model, self._pool, config, clock)
        self._listeners: list[Listener] = []
        self._requests: dict[str, list[Request]] = {}  # unfinished sequences by request
        self._deadlines: list[
            tuple[float, tuple[int, int, int], tuple[Request, ...]]
        ] = []  # a heap
        self._suspects: list[frozenset[Request]] = []  # of a step that failed, in groups
        self._gap_s: float | None = None  # mean time between two requests that end
        self._last_end_s: float | None = None
        self._closed = False
        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_refused = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: dict[FinishReason, int] = dict.fromkeys(FINISH_REASONS, 0)

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        return self._model.capabilities

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    @property
    def num_queued(self) -> int:
        """Requests that have not begun."""
        return self._scheduler.num_queued

    def queue_room(self, options: RequestOptions | None = None) -> int:
        """How many more such requests may be queued now; not positive: none. From any thread."""
        tenant = self._scheduler.tenant_of(options or RequestOptions())
        return self._scheduler.queue_room(tenant, self.config.max_queued_requests)

    def add_listener(self, listener: Listener) -> None:
        """Tell `listener` from now on what happens; not while the engine runs elsewhere."""
        self._listeners.append(listener)

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
    ) -> Request:
        """Tokenize and check a request; schedules nothing. Safe to call from any thread.

        Args:
            request_id: names the request; unique among the unfinished ones.
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            params: how to decode.
            options: how to treat it; None for the defaults.

        Raises:
            RequestError: the prompt is empty or holds a token that the model does not know, the
                request needs text and there is no tokenizer, it asks for more completions than
                run at once, or for a priority where there are none.
            CapacityError: prompt and max_tokens do not fit the context or the KV cache.
        """
        options = options or RequestOptions()
        return self._intake.request(request_id, prompt, params, options, self._clock)

    def submit(self, request: Request) -> None:
        """Queue a prepared request.

        Raises:
            RequestError: an unfinished request has this id.
            OverloadedError: `max_queued_requests` requests wait already, or, under the policy
                "fair", as many of this tenant as its share of them.
            OnnxportError: the engine is closed.
        """
        if self._closed:
            raise OnnxportError("the engine is closed and takes no more requests")
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        if self.queue_room(request.options) < 1:
            raise self.overload()
        self._scheduler.submit(request)
        self._requests[request.request_id] = [request, *request.siblings]
        self._prompt_tokens += request.num_prompt_tokens
        if request.deadline_s < math.inf:
            group = (request, *request.siblings)
            heapq.heappush(self._deadlines, (request.deadline_s, request.rank, group))
            if len(self._deadlines) > 2 * len(self._requests) + FORGOTTEN_DEADLINES:
                self._deadlines = [one for one in self._deadlines if _is_unfinished(one[2])]
                heapq.heapify(self._deadlines)
        self._tell("queued", request, request.times.arrival_s)

    def overload(self) -> OverloadedError:
        """Count a request that finds the queue full, and return the error for it."""
        self._num_refused += 1
        retry_after_s = min(MOST_RETRY_S, max(1.0, self._gap_s or 1.0))
        shared = ", shared by its tenants" if self.config.scheduling_policy == "fair" else ""
        return OverloadedError(
            f"{self.num_queued} requests are waiting already; max_queued_requests is "
            f"{self.config.max_queued_requests}{shared}. Send the request again in "
            f"{math.ceil(retry_after_s)} s",
            retry_after_s,
        )

    def abort(self, request_id: str) -> list[CompletionDelta]:
        """End a request now; returns the last deltas of its sequences, none if it is unknown."""
        return self._end_all(self._requests.get(request_id, ()), "abort")

    def step(self) -> list[CompletionDelta]:
        """Compute one batch; returns what it added to each sequence.

        A sequence is in the result when it got a token or ended. When the model or the sampler
        fails, the step leaves no trace. Its requests are then tried in halves, until the one that
        makes it fail is alone: that one ends with "error", and all others go on.
        """
        deltas = self._expire()
        loading = self._offloader.load(self._scheduler) if self._offloader else set()
        plan = self._next_plan(loading)
        return deltas + self._execute(plan) if plan.requests else deltas

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        offloader = self._offloader
        store = offloader.store if offloader else None
        return EngineStats(
            num_requests_running=self._scheduler.num_running,
            num_requests_waiting=self._scheduler.num_waiting,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self._scheduler.num_looked_up,
            prefix_cache_hits=self._scheduler.num_found,
            num_cached_blocks=self._pool.num_cached,
            host_tier_bytes=store.host_bytes if store else 0,
            disk_tier_bytes=store.disk_bytes if store else 0,
            num_blocks_saved=offloader.num_saved if offloader else 0,
            num_blocks_loaded=offloader.num_loaded if offloader else 0,
            num_refused=self._num_refused,
            num_tier_errors=offloader.num_errors if offloader else 0,
            finished=dict(self._finished),
        )

    def reset_prefix_cache(self) -> None:
        """Forget what the pool has cached; host memory and disk keep theirs."""
        self._pool.reset_cache()

    def check(self) -> None:
        """Assert the invariants of requests and blocks (for tests)."""
        self._scheduler.check()
        running = {request for request in self._scheduler.requests() if request.running}
        known = {one for group in self._requests.values() for one in group}
        waiting = {one for request in self._scheduler.requests() for one in request.siblings}
        assert known == running | waiting | {*self._scheduler.requests()}

    def close(self) -> list[CompletionDelta]:
        """Abort every unfinished request, save what is cached, free the model. Idempotent."""
        groups = list(self._requests.values())
        deltas = [delta for group in groups for delta in self._end_all(group, "abort")]
        if self._offloader and not self._closed:
            self._offloader.close()
        self._closed = True
        self._model.close()
        return deltas

    # A step.

    def _expire(self) -> list[CompletionDelta]:
        """End the requests whose time is up."""
        deltas: list[CompletionDelta] = []
        if self._deadlines:
            now = self._clock()
            while self._deadlines and self._deadlines[0][0] <= now:
                for request in heapq.heappop(self._deadlines)[2]:
                    if request.finish_reason is None:
                        deltas += self._end(request, "timeout")
        return deltas

    def _next_plan(self, loading: Collection[Request]) -> StepPlan:
        """Plan the next step: with suspects of a failed one alone, as long as there are any."""
        while self._suspects:
            plan = self._scheduler.plan(self._suspects.pop(), loading)
            if plan.requests:
                return plan
        return self._scheduler.plan(None, loading)

    def _execute(self, plan: StepPlan) -> list[CompletionDelta]:
        start_s = self._clock()
        reservation = self._scheduler.reserve(plan)
        for request in plan.preempted:
            self._tell("preempted", request, start_s)
        try:
            if self._offloader and reservation.evictions:
                self._offloader.save(reservation.evictions, self._scheduler)
            if reservation.copies:
                sources, targets = zip(*reservation.copies, strict=True)
                self._model.copy_blocks(sources, targets)
            logits = self._model.run(self._packer.pack(plan))
            sequences = [one for row in plan.sampled for one in _with_siblings(plan.requests[row])]
            sampled, failures = self._sample(plan, sequences, logits)
        except BaseException as error:
            self._scheduler.rollback(reservation)
            if not isinstance(error, Exception):
                raise
            return self._fail(plan, error)
        self._note_starts(plan, start_s)
        self._scheduler.commit(plan, reservation)
        self._num_steps += 1
        now = self._clock()
        deltas, gaps = self._deliver(sequences, sampled, failures, now)
        if self._offloader:
            self._offloader.costs.note_step(now - start_s, plan.num_tokens)
        num_sampled = len(sequences) - len(failures)
        record = StepRecord(
            start_s, now, len(plan.requests), plan.num_tokens, num_sampled, tuple(gaps)
        )
        for listener in self._listeners:
            listener.on_step(record)
        return deltas

    def _sample(
        self, plan: StepPlan, sequences: list[Request], logits: NDArray[np.float32]
    ) -> tuple[Sampled, dict[int, str]]:
        """Sample the rows that reached their last token.

        Returns:
            One token for each of `sequences`, and by number why some have none.
        """
        if not sequences:
            return Sampled([], None, ()), {}
        if len(sequences) > len(plan.sampled):
            numbers = [plan.requests[row].num_rows for row in plan.sampled]
            logits = np.repeat(logits, numbers, axis=0)
        try:
            sampled = sampling.sample_sequences(sequences, logits)
        except Exception as error:
            logger.error("sampling failed; its rows are tried one by one", exc_info=error)
            return sampling.sample_one_by_one(sequences, logits)
        return sampled, dict.fromkeys(sampled.invalid, sampling.NOT_FINITE)

    def _fail(self, plan: StepPlan, error: Exception) -> list[CompletionDelta]:
        """Nothing was computed: look for the request that made the step fail."""
        self._num_failed_steps += 1
        requests = plan.requests
        if len(requests) > 1:
            logger.warning("a step of %d requests failed: %s", len(requests), error)
            half = len(requests) // 2
            self._suspects += [frozenset(requests[half:]), frozenset(requests[:half])]
            return []
        logger.error("request %s failed", requests[0].request_id, exc_info=error)
        return self._end(requests[0], "error", error=f"{type(error).__name__}: {error}")

    def _note_starts(self, plan: StepPlan, start_s: float) -> None:
        """Note which requests this step starts, or lets go on after a preemption."""
        for row, request in enumerate(plan.requests):
            if not request.running:
                if request.times.scheduled_s is None:
                    request.times.scheduled_s = start_s
                self._tell("scheduled", request, start_s)
            if request.siblings and row in plan.sampled:
                for one in request.siblings:
                    one.times.scheduled_s = start_s
                    self._tell("scheduled", one, start_s)

    def _deliver(
        self,
        sequences: list[Request],
        sampled: Sampled,
        failures: Mapping[int, str],
        now_s: float,
    ) -> tuple[list[CompletionDelta], list[float]]:
        """Append the sampled tokens and end the sequences that are done.

        Returns:
            The deltas, and the times since the previous token of each that was not a first one.
        """
        self._generation_tokens += len(sequences) - len(failures)
        deltas: list[CompletionDelta] = []
        gaps: list[float] = []
        for index, request in enumerate(sequences):
            if failures and index in failures:
                self._scheduler.distrust(request)
                deltas += self._end(request, "error", error=failures[index])
                continue
            if request.times.last_token_s is not None:
                gaps.append(now_s - request.times.last_token_s)
            logprobs = sampled.logprobs[index] if sampled.logprobs else None
            try:
                deltas += self._append(request, sampled.token_ids[index], logprobs, now_s)
            except Exception as error:
                logger.error("request %s failed", request.request_id, exc_info=error)
                deltas += self._end(request, "error", error=f"{type(error).__name__}: {error}")
        return deltas, gaps

    def _append(
        self, request: Request, token_id: int, logprobs: RowLogprobs | None, now_s: float
    ) -> list[CompletionDelta]:
        """Give a sequence its next token; ends it if this was the last."""
        request.tokens.append(token_id)
        request.times.last_token_s = now_s
        if request.times.first_token_s is None:
            request.times.first_token_s = now_s
            self._tell("first_token", request, now_s)
        entry = None if logprobs is None else (self._token_logprobs(logprobs),)
        if token_id in request.stop_token_ids:
            reason = None if token_id in self._eos_token_ids else token_id
            return self._end(request, "stop", (token_id,), entry, stop_reason=reason)
        text, stop = request.text.add(token_id) if request.text else ("", None)
        if stop is not None:
            return self._end(request, "stop", (token_id,), entry, text=text, stop_reason=stop)
        if len(request.tokens) >= request.max_total_tokens:
            return self._end(request, "length", (token_id,), entry, text=text)
        return [
            CompletionDelta(
                request.request_id,
                request.index,
                text,
                (token_id,),
                entry,
                None,
                num_cached_tokens=request.num_cached_tokens,
            )
        ]

    # Ends.

    def _end_all(self, group: Sequence[Request], reason: FinishReason) -> list[CompletionDelta]:
        """End all sequences of a request."""
        deltas: list[CompletionDelta] = []
        for request in list(group):
            if request.finish_reason is None:
                deltas += self._end(request, reason)
        return deltas

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        *,
        text: str = "",
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> list[CompletionDelta]:
        """End a sequence, and siblings that still wait for it; the one place where they end."""
        cut = isinstance(stop_reason, str) or reason == "error"
        if request.text is not None and not cut:
            rest, stop = request.text.finish()
            text += rest
            if stop is not None:
                reason, stop_reason = "stop", stop
        self._scheduler.finish(request, reason)
        now = self._clock()
        deltas = []
        for one in _with_siblings(request):
            first = one is request
            deltas.append(
                CompletionDelta(
                    request_id=one.request_id,
                    index=one.index,
                    text=text if first else "",
                    token_ids=token_ids if first else (),
                    logprobs=logprobs if first else None,
                    finish_reason=reason,
                    stop_reason=stop_reason if first else None,
                    num_cached_tokens=one.num_cached_tokens,
                    error=error,
                )
            )
            self._forget(one, reason, now)
        return deltas

    def _forget(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """Let go of a sequence that has ended."""
        request.times.finished_s = now_s
        request.text = None
        self._finished[reason] += 1
        group = self._requests[request.request_id]
        group.remove(request)
        if not group:
            del self._requests[request.request_id]
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
            )
            self._tell("finished", request, now_s, record)

    def _tell(
        self,
        kind: EventKind,
        request: Request,
        time_s: float,
        finished: FinishedRecord | None = None,
    ) -> None:
        """Tell the listeners."""
        if self._listeners:
            event = RequestEvent(kind, request.request_id, request.index, time_s, finished)
            for listener in self._listeners:
                listener.on_request(event)

    def _token_logprobs(self, row: RowLogprobs) -> TokenLogprobs:
        """Return the logprobs of one position, the likeliest tokens first."""
        name = self.tokenizer.token_text if self.tokenizer else lambda token_id: ""
        pairs = zip(row.top_ids, row.top_logprobs, strict=True)
        result = {
            token_id: Logprob(value, rank, name(token_id))
            for rank, (token_id, value) in enumerate(pairs, 1)
        }
        sampled = Logprob(row.logprob, row.rank, name(row.token_id))
        return result | {row.token_id: sampled}


def _with_siblings(request: Request) -> tuple[Request, ...]:
    """Return a sequence and those that wait to fork from it."""
    return (request, *request.siblings)


def _is_unfinished(group: Sequence[Request]) -> bool:
    return any(request.finish_reason is None for request in group)
