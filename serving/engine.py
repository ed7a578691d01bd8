"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from onnxport.errors import DeviceLostError, OnnxportError, OverloadedError, RequestError
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import Capabilities, Model, StepInputs
from onnxport.serving import sampling
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.beam_candidates import Arrival, arrivals
from onnxport.serving.beam_search import BeamSearches
from onnxport.serving.beside import Beside
from onnxport.serving.classifying import Classifier
from onnxport.serving.config import EngineConfig
from onnxport.serving.draft import StepPlan, most_drafted
from onnxport.serving.events import Listener, StepRecord
from onnxport.serving.fallback import Loss, Standby
from onnxport.serving.growth import Growth
from onnxport.serving.guesses import Drafts, Guesses, Guessing
from onnxport.serving.intake import Intake
from onnxport.serving.linear_attention import check_options
from onnxport.serving.mixed_layers import refuse_tiers
from onnxport.serving.narrowing import narrowed
from onnxport.serving.outputs import CompletionDelta, Failure
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import Embedder, PoolingParams, pool
from onnxport.serving.recovery import Recovery
from onnxport.serving.request import Request
from onnxport.serving.retries import Retries
from onnxport.serving.runtime import Runtime
from onnxport.serving.sampler import RowLogprobs
from onnxport.serving.sampling import Drawn, with_siblings
from onnxport.serving.sequences import Sequences
from onnxport.serving.stats import EngineStats
from onnxport.serving.structured.cache import GrammarCompiler
from onnxport.serving.structured.compiler import CompiledGrammar
from onnxport.serving.tally import Tally
from onnxport.serving.tokenizer import Tokenizer

NOBODY: Mapping[str, int] = MappingProxyType({})


class Engine:
    """Runs requests on a model with continuous batching. Not thread-safe, but for `prepare`."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        eos_token_ids: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        standby: Standby | None = None,
        speculator: Guesses | None = None,
        base: ArchSpec | None = None,
        sampling_threads: int | None = None,
        embedder: Embedder | None = None,
        classifier: Classifier | None = None,
    ) -> None:
        """Take over `model`; `close` closes it.

        Args:
            model: the loaded model.
            tokenizer: None serves token ids only: no text comes out and no stop strings go in.
            config: the limits; None for the defaults.
            eos_token_ids: tokens that end a generation; None takes the tokenizer's.
            clock: the time in seconds, of which deadlines and events are told.
            standby: who takes over when the model's device is lost; None: nobody.
            speculator: guesses tokens ahead; None: nobody does. `close` closes it.
            base: what the model is, which LoRA adapters have to fit; None: none can be read.
            sampling_threads: most that sample at once; None: as many as there are physical cores.
            classifier: how prompts are classified, by a model that does so, too; None: none are.
            embedder: how prompts are embedded, by a model that tells what its final norm makes of
                them; None: none are.

        Raises:
            OnnxportError: the folder for K/V blocks cannot be used.
            OptionError: something was asked for that does not go with the states that the model
                has, see `linear_attention`, or tiers for K/V of several shapes.
            CapacityError: there is no room for the states of a sequence.
            DeviceLostError: the device is gone already.
        """
        config = config or EngineConfig()
        if (limits := model.capabilities).state_slots:
            check_options(config)
        if not limits.moves_blocks:
            refuse_tiers(config)
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer else frozenset()
        runtime = Runtime(model, config, clock, standby or Standby(), base)
        self.config = config
        self.tokenizer = tokenizer
        self._clock = clock
        self._runtime = runtime
        self._scheduler = runtime.scheduler
        self._intake = Intake(
            runtime.limits,
            config,
            runtime.rows,
            tokenizer,
            eos_token_ids,
            runtime.adapters,
            embedder,
            classifier,
        )
        self._tally = Tally()
        self._retries = Retries(runtime.tokens)
        self._guessing = Guessing(speculator)
        self._guessing.note_model(runtime.limits)
        self._sequences = Sequences(
            runtime.scheduler,
            runtime.adapters,
            self._guessing,
            self._tally,
            clock,
            eos_token_ids,
        )
        self._beams = BeamSearches(runtime.scheduler, self._sequences, eos_token_ids)
        self._recovery = Recovery(
            runtime, self._intake, self._sequences, self._retries, self._tally, clock
        )
        self._beside = Beside()
        self._sampling_threads = sampling_threads
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do; another one may have taken over at the next look."""
        return self._runtime.limits

    @property
    def adapters(self) -> AdapterRegistry:
        """The LoRA adapters that requests may pick, the same whichever model is loaded."""
        return self._runtime.adapters

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The providers that were lost, or never loaded, the latest last. From any thread."""
        return self._runtime.losses

    @property
    def failure(self) -> str | None:
        """Why there is no model any more, and so no request is taken; None while there is one."""
        return self._runtime.failure

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles what requests ask of their output; None without a tokenizer."""
        return self._intake.grammars

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    @property
    def num_queued(self) -> int:
        """Requests that have not begun."""
        return self._scheduler.num_queued

    def tenant_of(self, options: RequestOptions | None = None) -> str:
        """Whose request counts as whose; see `queue_room`."""
        return self._scheduler.tenant_of(options or RequestOptions())

    def queue_room(
        self, options: RequestOptions | None = None, coming: Mapping[str, int] = NOBODY
    ) -> int:
        """How many more such requests may be queued now; not positive: none. From any thread.

        Args:
            options: of the requests.
            coming: how many others, of each `tenant_of`, are on their way to `submit`.
        """
        limit = self.config.max_queued_requests
        return self._scheduler.queue_room(self.tenant_of(options), limit, coming)

    def add_listener(self, listener: Listener) -> None:
        """Tell `listener` from now on what happens; not while the engine runs elsewhere."""
        self._tally.add_listener(listener)

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """Tokenize and check a request; schedules nothing. Safe to call from any thread.

        Args:
            request_id: names the request; unique among the unfinished ones.
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            params: how to decode.
            options: how to treat it; None for the defaults.
            grammar: of its `structured_outputs`; None: it is compiled, and waited for.

        Raises:
            RequestError: the prompt is empty or holds a token that the model does not know, the
                request needs text and there is no tokenizer, it asks for more completions than
                run at once, for a priority where there are none, or for an adapter that is not
                loaded (UnknownAdapterError).
            CapacityError: prompt and max_tokens, of all beams of a beam search together, do not fit
                the context or the KV cache.
        """
        options = options or RequestOptions()
        return self._intake.request(request_id, prompt, params, options, self._clock, grammar)

    @property
    def embedder(self) -> Embedder | None:
        """How prompts are embedded; None: none are."""
        return self._intake.embedder

    def prepare_embedding(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: PoolingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Request:
        """Tokenize and check a prompt that is to be embedded; schedules nothing. From any thread.

        Its only delta has the vector (`CompletionDelta.embedding`), or says why there is none.

        Args:
            request_id: names the request; unique among the unfinished ones.
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            params: how to embed; None for the defaults.
            options: how to treat it; None for the defaults.

        Raises:
            RequestError: the engine embeds nothing, the vector cannot be cut as is asked, or as
                `prepare`.
            CapacityError: the prompt does not fit the context or the KV cache.
        """
        params, options = params or PoolingParams(), options or RequestOptions()
        return self._intake.embedding(request_id, prompt, params, options, self._clock)

    @property
    def classifier(self) -> Classifier | None:
        """How prompts are classified; None: none are."""
        return self._intake.classifier

    def prepare_classification(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        options: RequestOptions | None = None,
        *,
        activated: bool = True,
        per_token: bool = False,
    ) -> Request:
        """Tokenize and check a prompt that is to be classified; schedules nothing. From any thread.

        Its only delta has the number of each label (`CompletionDelta.embedding`), or says why there
        is none.

        Args:
            request_id: names the request; unique among the unfinished ones.
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            options: how to treat it; None for the defaults.
            activated: whether the numbers are probabilities, and not what the score head gives.
            per_token: whether each token has such numbers, [num_tokens, labels].

        Raises:
            RequestError: the model has no score head, or as `prepare`.
            CapacityError: the prompt does not fit the context or the KV cache.
        """
        options = options or RequestOptions()
        return self._intake.classification(
            request_id, prompt, options, self._clock, activated=activated, per_token=per_token
        )

    def submit(self, request: Request) -> None:
        """Queue a prepared request.

        Raises:
            RequestError: an unfinished request has this id, or its adapter was unloaded
                (UnknownAdapterError).
            OverloadedError: `max_queued_requests` requests wait already, or, under the policy
                "fair", as many of this tenant as its share of them.
            CapacityError: it was prepared for a model that was lost, and does not fit the one
                that has taken over.
            DeviceLostError: the device was lost, and nothing has taken over.
            OnnxportError: the engine is closed.
        """
        if self._closed:
            raise OnnxportError("the engine is closed and takes no more requests")
        if self.failure is not None:
            raise DeviceLostError(self.failure)
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        if self.queue_room(request.options) < 1:
            raise self.overload()
        if self.losses:
            self._recovery.fit(request)
            request.name_blocks(self.capabilities.block_size)
        self._intake.hold_adapter(request)
        group = with_siblings(request)  # which may not stay together in the scheduler
        self._scheduler.submit(request)
        self._sequences.add(group)

    def overload(self, num_coming: int = 0) -> OverloadedError:
        """Count a request that finds the queue full, and return the error for it.

        Args:
            num_coming: requests that are on their way to `submit`.
        """
        self._tally.num_refused += 1
        retry_after_s = self._tally.retry_after_s
        shared = ", shared by its tenants" if self.config.scheduling_policy == "fair" else ""
        return OverloadedError(
            f"{self.num_queued + num_coming} requests are waiting already; max_queued_requests is "
            f"{self.config.max_queued_requests}{shared}. Send the request again in "
            f"{math.ceil(retry_after_s)} s",
            retry_after_s,
        )

    def abort(self, request_id: str) -> list[CompletionDelta]:
        """End a request now; returns the last deltas of its sequences, none if it is unknown.

        What `advance` returned before must be deltas already.
        """
        return self.deltas(self._sequences.abort(request_id))

    def end_thoughts(self, request_id: str) -> bool:
        """Close what a request thinks, as if its `thinking_token_budget` was used up now.

        Returns:
            Whether there may be a thought to close; not where the request is unknown, has no
            budget, or answers already.
        """
        return self._sequences.end_thoughts(request_id)

    def step(self) -> list[CompletionDelta]:
        """Compute one batch; returns what it added to each sequence. See `advance`."""
        return self.deltas(self.advance())

    def deltas(self, growths: Iterable[Growth]) -> list[CompletionDelta]:
        """Make what `advance` returned readable: give it its text, and its tokens their names.

        To be called with everything that it returns, in order, and not twice at once; but in any
        thread, while the engine goes on.
        """
        return [growth.delta(self._name) for growth in growths]

    def advance(self) -> list[Growth]:
        """Compute one batch; returns what it added to each sequence, without the text.

        A sequence is in the result when it got a token or ended. When the model or the sampler
        fails, the step leaves no trace, but that requests whose states it wrote in place are
        computed again from their tokens. Its requests are then tried in halves, until the one that
        makes it fail is alone: that one ends with "error", and all others go on. When the device
        is lost, a fallback takes over and computes all requests again from their tokens; without
        one they end with "error", and the engine has failed.
        """
        growths = self._sequences.expire()
        try:
            for request, reason in self._runtime.take_slots():
                growths += self._sequences.end(request, "error", Failure.of(reason))
            loading = self._runtime.load()
            guess = None if self._guessing.rests() or self._retries.careful else self._guess
            plan = self._retries.next_plan(self._scheduler, loading, guess)
            self._guessing.note_planned(plan)
            return growths + self._execute(plan) if plan.requests else growths
        except DeviceLostError as error:
            growths += self._recovery.fall_back(error)
            if self.failure is None:
                self._guessing.note_model(self.capabilities)
            return growths

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        return self._tally.stats(self._runtime, self._guessing.counters)

    def reset_prefix_cache(self) -> None:
        """Forget what the pools have cached; host memory and disk keep theirs."""
        self._runtime.pool.reset_cache()
        if self._runtime.states is not None:
            self._runtime.states.reset_cache()

    def check(self) -> None:
        """Assert the invariants of requests and blocks (for tests)."""
        self._scheduler.check()
        self.adapters.check()
        running = {request for request in self._scheduler.requests() if request.running}
        waiting = {one for request in self._scheduler.requests() for one in request.siblings}
        assert set(self._sequences) == running | waiting | {*self._scheduler.requests()}

    def close(self) -> list[CompletionDelta]:
        """Abort every unfinished request, save what is cached, free the model. Idempotent.

        What `advance` returned before must be deltas already.
        """
        deltas = self.deltas(self._sequences.abort_all())
        if not self._closed:
            self._closed = True
            self._beside.close()
            if self.grammars is not None:
                self.grammars.close()
            try:
                self._guessing.close()
            finally:
                self._runtime.close()
        return deltas

    def _name(self, token_id: int) -> str:
        """Return the text of one token by itself."""
        return self.tokenizer.token_text(token_id) if self.tokenizer else ""

    # A step.

    def _guess(self, decoding: Sequence[Request], budget: int) -> Drafts:
        """Return up to `budget` tokens that may follow those of requests, for a step to check."""
        most = most_drafted(self.capabilities.vocab_size)
        return self._guessing.next(decoding, min(budget, most))

    def _execute(self, plan: StepPlan) -> list[Growth]:
        """Reserve what a plan needs, compute it, commit it and append what came of it."""
        start_s = self._clock()
        reservation = self._scheduler.reserve(plan)
        self._sequences.note_preempted(plan.preempted, start_s)
        try:
            reads_states = self._guessing.reads_states or self._pools(plan)
            inputs = self._runtime.prepare(plan, reservation, reads_states=reads_states)
            prepared_s = self._clock()  # blocks may have been saved
            drawn, scores, arrived = self._compute(plan, inputs)
        except BaseException as error:
            yielded = self._scheduler.rollback(plan, reservation)
            self._sequences.note_preempted(yielded, self._clock())
            if isinstance(error, DeviceLostError) or not isinstance(error, Exception):
                raise
            return self._recovery.fail(plan, error)
        self._sequences.start(plan, start_s)
        accepted = self._guessing.accept(plan, drawn)
        pooled: list[Request] = []
        if self._runtime.hidden_states is not None:
            read, final = self._runtime.split_states()
            told = final if self._guessing.reads_final else read
            if told is not None:
                self._guessing.note_states(plan, told, accepted)
            pooled = pool(plan, final) if final is not None else []
        self._scheduler.commit(plan, reservation, accepted)
        for request, found in scores:
            assert request.scores is not None
            request.scores += found
        self._retries.note_good(len(plan.requests))
        now = self._clock()
        num_before = self._tally.generation_tokens
        growths = self._sequences.progress(plan, now)
        more, gaps = self._sequences.deliver(drawn, now)
        growths += more
        growths += self._sequences.deliver_vectors(pooled)
        if arrived:
            more, further = self._beams.advance(arrived, now)
            growths, gaps = growths + more, gaps + further
        self._note_costs(plan, now - start_s, now - prepared_s)
        num_sampled = self._tally.generation_tokens - num_before
        rows = len(plan.requests)
        record = StepRecord(start_s, now, rows, plan.num_tokens, num_sampled, tuple(gaps))
        self._tally.note_step(record)
        return growths

    def _pools(self, plan: StepPlan) -> bool:
        """Whether a step computes prompts that are embedded."""
        tells = self.capabilities.final_features > 0
        return tells and any(request.pooler is not None for request in plan.requests)

    def _compute(
        self, plan: StepPlan, inputs: StepInputs
    ) -> tuple[list[Drawn], list[tuple[Request, list[RowLogprobs]]], list[Arrival]]:
        """Run and sample; changes nothing that a rollback does not undo.

        Returns:
            The tokens, the log probabilities of prompts, and what may follow beams.
        """
        with self._beside.run(plan, inputs, self._scheduler) as masks:
            logits = self._runtime.run(inputs)
        threads = self._sampling_threads
        summaries, allowed = self._runtime.summaries, narrowed(inputs)
        drawn = sampling.sample_step(plan, logits, masks(), threads, summaries, allowed)
        arrived = arrivals(plan, logits, masks(), threads)
        return drawn, sampling.score_prompts(plan, logits, threads), arrived

    def _note_costs(self, plan: StepPlan, elapsed_s: float, computed_s: float) -> None:
        """Tell those who decide by measured times how long a step took, in all and computing."""
        if self._runtime.offloader:
            costs = self._runtime.offloader.costs
            costs.note_step(computed_s, plan.num_tokens, plan.num_decodes + plan.num_drafted)
        self._guessing.note_step(plan, elapsed_s)
