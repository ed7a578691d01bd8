"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import OnnxportError, RequestError
from onnxport.kv.pool import BlockPool
from onnxport.providers.base import Capabilities, Model
from onnxport.serving.batch import BatchPacker
from onnxport.serving.config import EngineConfig
from onnxport.serving.limits import max_total_tokens, token_array
from onnxport.serving.outputs import (
    FINISH_REASONS,
    CompletionDelta,
    FinishReason,
    Logprob,
    TokenLogprobs,
)
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.sampler import (
    RowLogprobs,
    RowParams,
    Sampled,
    sample,
    sample_greedy,
    uniform,
)
from onnxport.serving.scheduler import Scheduler, StepPlan
from onnxport.serving.text import TextStream
from onnxport.serving.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters."""

    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int  # of the KV pool
    num_free_blocks: int
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    prompt_tokens: int  # of all requests that were accepted
    generation_tokens: int  # sampled so far
    prefix_cache_queries: int = 0  # tokens looked up in the prefix cache
    prefix_cache_hits: int = 0  # tokens found there
    num_cached_blocks: int = 0  # free blocks that hold reusable K/V
    host_tier_bytes: int = 0  # K/V in host memory
    disk_tier_bytes: int = 0  # K/V on disk
    num_blocks_saved: int = 0  # pool blocks saved in a tier
    num_blocks_loaded: int = 0  # pool blocks loaded from a tier
    num_tier_errors: int = 0  # blocks of a tier that were corrupt, foreign or could not be stored
    finished: Mapping[FinishReason, int] = field(default_factory=dict)  # ended, by reason


class Engine:
    """Runs requests on a model with continuous batching. Not thread-safe, but for `prepare`."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        eos_token_ids: frozenset[int] | None = None,
    ) -> None:
        """Take over `model`; `close` closes it.

        Args:
            model: the loaded model.
            tokenizer: None serves token ids only: no text comes out and no stop strings go in.
            config: the limits; None for the defaults.
            eos_token_ids: tokens that end a generation; None takes the tokenizer's.
        """
        config = config or EngineConfig()
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer else frozenset()
        limits = model.capabilities
        rows = min(config.max_num_seqs, limits.max_batch_rows or config.max_num_seqs)
        self.config = config
        self.tokenizer = tokenizer
        self._model = model
        self._eos_token_ids = eos_token_ids
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        self._scheduler = Scheduler(self._pool, rows, config.max_num_batched_tokens)
        self._packer = BatchPacker(rows, config.max_num_batched_tokens)
        self._seeds = random.Random(config.seed)
        self._closed = False
        self._num_steps = 0
        self._num_failed_steps = 0
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

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
    ) -> Request:
        """Tokenize and check a request; schedules nothing. Safe to call from any thread.

        Args:
            request_id: names the request; unique among the unfinished ones.
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            params: how to decode.

        Raises:
            RequestError: the prompt is empty or holds a token that the model does not know, or
                the request needs text and there is no tokenizer.
            CapacityError: prompt and max_tokens do not fit the context or the KV cache.
        """
        if self.tokenizer is None and (isinstance(prompt, str) or params.stop):
            what = "a text prompt" if isinstance(prompt, str) else "a stop string"
            param = "prompt" if isinstance(prompt, str) else "stop"
            raise RequestError(f"{what} needs a tokenizer and this engine has none", param)
        text = prompt if isinstance(prompt, str) else None
        given = self.tokenizer.encode(text) if self.tokenizer and text is not None else prompt
        assert not isinstance(given, str)
        ids = token_array(given, self.capabilities.vocab_size)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._eos_token_ids
        pieces = self.tokenizer.detokenizer(ids) if self.tokenizer else None
        return Request(
            request_id,
            text,
            ids,
            params,
            max_total_tokens=max_total_tokens(len(ids), params.max_tokens, self.capabilities),
            stop_token_ids=stop_ids,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            arrival_time_s=time.monotonic(),
            text=TextStream(pieces, params.stop) if pieces else None,
        )

    def submit(self, request: Request) -> None:
        """Queue a prepared request.

        Raises:
            RequestError: an unfinished request has this id.
            OnnxportError: the engine is closed.
        """
        if self._closed:
            raise OnnxportError("the engine is closed and takes no more requests")
        if self._scheduler.find(request.request_id) is not None:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        self._scheduler.submit(request)
        self._prompt_tokens += request.num_prompt_tokens

    def abort(self, request_id: str) -> CompletionDelta | None:
        """End a request now; returns its last delta, None if no such request is unfinished."""
        request = self._scheduler.find(request_id)
        return None if request is None else self._end(request, "abort")

    def step(self) -> list[CompletionDelta]:
        """Compute one batch; returns what it added to each request.

        A request is in the result when it got a token or ended. When the model or the sampler
        fails, the step leaves no trace, its requests end with "error" and the engine goes on.
        """
        plan = self._scheduler.plan()
        if not plan.requests:
            return []
        reservation = self._scheduler.reserve(plan)
        try:
            logits = self._model.run(self._packer.pack(plan))
            sampled = self._sample(plan, logits)
        except BaseException as error:
            self._scheduler.rollback(reservation)
            if not isinstance(error, Exception):
                raise
            return self._fail(plan, error)
        self._scheduler.commit(plan)
        self._num_steps += 1
        return self._deliver(plan, sampled)

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
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
            finished=dict(self._finished),
        )

    def check(self) -> None:
        """Assert the invariants of requests and blocks (for tests)."""
        self._scheduler.check()

    def close(self) -> list[CompletionDelta]:
        """Abort every unfinished request and close the model. Idempotent."""
        deltas = [self._end(request, "abort") for request in list(self._scheduler.requests())]
        self._closed = True
        self._model.close()
        return deltas

    def _sample(self, plan: StepPlan, logits: NDArray[np.float32]) -> Sampled:
        """Sample the rows that reached their last token; the result is in their order."""
        requests = [plan.requests[row] for row in plan.sampled]
        if not requests:
            return Sampled([], None, ())
        if all(request.plain for request in requests):
            return sample_greedy(logits)
        return sample(logits, [row_params(request) for request in requests])

    def _fail(self, plan: StepPlan, error: Exception) -> list[CompletionDelta]:
        logger.error("a step of %d requests failed", len(plan.requests), exc_info=error)
        self._num_failed_steps += 1
        message = f"{type(error).__name__}: {error}"
        return [self._end(request, "error", error=message) for request in plan.requests]

    def _deliver(self, plan: StepPlan, sampled: Sampled) -> list[CompletionDelta]:
        """Append the sampled tokens and end the requests that are done."""
        now = time.monotonic()
        self._generation_tokens += len(sampled.token_ids) - len(sampled.invalid)
        deltas = []
        for index, row in enumerate(plan.sampled):
            request = plan.requests[row]
            if sampled.invalid and index in sampled.invalid:
                message = "the model's logits are not finite numbers"
                deltas.append(self._end(request, "error", error=message))
                continue
            logprobs = sampled.logprobs[index] if sampled.logprobs else None
            try:
                deltas.append(self._append(request, sampled.token_ids[index], logprobs, now))
            except Exception as error:
                logger.error("request %s failed", request.request_id, exc_info=error)
                message = f"{type(error).__name__}: {error}"
                deltas.append(self._end(request, "error", error=message))
        return deltas

    def _append(
        self, request: Request, token_id: int, logprobs: RowLogprobs | None, now_s: float
    ) -> CompletionDelta:
        """Give a request its next token; ends it if this was the last."""
        request.tokens.append(token_id)
        if request.first_token_time_s is None:
            request.first_token_time_s = now_s
        entry = None if logprobs is None else (self._token_logprobs(logprobs),)
        if token_id in request.stop_token_ids:
            reason = None if token_id in self._eos_token_ids else token_id
            return self._end(request, "stop", (token_id,), entry, stop_reason=reason)
        text, stop = request.text.add(token_id) if request.text else ("", None)
        if stop is not None:
            return self._end(request, "stop", (token_id,), entry, text=text, stop_reason=stop)
        if len(request.tokens) >= request.max_total_tokens:
            return self._end(request, "length", (token_id,), entry, text=text)
        return CompletionDelta(request.request_id, 0, text, (token_id,), entry, None)

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
    ) -> CompletionDelta:
        """End a request and free what it holds; the one place where requests end."""
        cut = isinstance(stop_reason, str) or reason == "error"
        if request.text is not None and not cut:
            rest, stop = request.text.finish()
            text += rest
            if stop is not None:
                reason, stop_reason = "stop", stop
        self._scheduler.finish(request, reason)
        request.finished_time_s = time.monotonic()
        request.text = None
        self._finished[reason] += 1
        return CompletionDelta(
            request.request_id, 0, text, token_ids, logprobs, reason, stop_reason, error=error
        )

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


def row_params(request: Request) -> RowParams:
    """Return how to sample the next token of `request`."""
    params = request.params
    return RowParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        uniform=0.0 if params.greedy else uniform(request.seed, len(request.tokens)),
        num_logprobs=params.logprobs,
    )
