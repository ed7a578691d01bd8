"""The unfinished sequences of an engine: what a step gives each of them, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.deadlines import Deadlines
from onnxport.serving.draft import StepPlan
from onnxport.serving.growth import Growth, grow, prompt_logprobs
from onnxport.serving.guesses import Guessing
from onnxport.serving.outputs import CompletionDelta, FinishReason
from onnxport.serving.request import Request
from onnxport.serving.sampling import Drawn, with_siblings
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.tally import Tally
from onnxport.serving.tokenizer import Tokenizer

NOTHING = Growth()


class Sequences:
    """Knows every accepted sequence until it ends. Belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        adapters: AdapterRegistry,
        guessing: Guessing,
        tally: Tally,
        clock: Callable[[], float],
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Begin without any.

        Args:
            scheduler: holds their blocks and rows.
            adapters: which of them they use.
            guessing: told of those that have ended.
            tally: counts and tells what becomes of them.
            clock: the time in seconds.
            tokenizer: names tokens; None: they have no names.
            eos_token_ids: tokens that end a generation.
        """
        self._scheduler = scheduler
        self._adapters = adapters
        self._guessing = guessing
        self._tally = tally
        self._clock = clock
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._groups: dict[str, list[Request]] = {}  # unfinished sequences by request
        self._deadlines = Deadlines()

    def __contains__(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._groups

    def __iter__(self) -> Iterator[Request]:
        """Yield every unfinished sequence."""
        for group in self._groups.values():
            yield from group

    def add(self, group: tuple[Request, ...]) -> None:
        """Take the sequences of a request that the scheduler has accepted."""
        first = group[0]
        self._groups[first.request_id] = list(group)
        self._tally.prompt_tokens += first.num_prompt_tokens
        self._deadlines.add(group, len(self._groups))
        self._tally.tell("queued", first, first.times.arrival_s)

    # What a step gives.

    def start(self, plan: StepPlan, start_s: float) -> None:
        """Note which sequences a step starts, or lets go on after a preemption."""
        for row, request in enumerate(plan.requests):
            if not request.running:
                if request.times.scheduled_s is None:
                    request.times.scheduled_s = start_s
                self._tally.tell("scheduled", request, start_s)
            if request.siblings and row in plan.sampled:
                for one in request.siblings:
                    one.times.scheduled_s = start_s
                    self._tally.tell("scheduled", one, start_s)

    def deliver(
        self, drawn: Sequence[Drawn], now_s: float
    ) -> tuple[list[CompletionDelta], list[float]]:
        """Append the tokens that were drawn and end the sequences that are done.

        Returns:
            The deltas, and the times since the previous token of each that was not a first one.
        """
        deltas: list[CompletionDelta] = []
        gaps: list[float] = []
        for one in drawn:
            request = one.request
            if one.token_ids:
                gaps += self._note_token(request, now_s)
            if one.failure is not None:
                self._scheduler.distrust(request)
            growth = grow(one, self._eos_token_ids, self._name)
            self._tally.generation_tokens += len(growth.token_ids)
            if growth.reason is not None:
                deltas += self.end(request, growth.reason, growth)
                continue
            deltas.append(
                CompletionDelta(
                    request.request_id,
                    request.index,
                    growth.text,
                    growth.token_ids,
                    growth.logprobs,
                    None,
                    num_cached_tokens=request.num_cached_tokens,
                    prompt_logprobs=prompt_logprobs(request, self._name),
                )
            )
        return deltas, gaps

    def _note_token(self, request: Request, now_s: float) -> list[float]:
        """Note when a sequence got tokens; returns how long after the last ones, if there were."""
        times = request.times
        gaps = [] if times.last_token_s is None else [now_s - times.last_token_s]
        times.last_token_s = now_s
        if times.first_token_s is None:
            times.first_token_s = now_s
            self._tally.tell("first_token", request, now_s)
        return gaps

    def _name(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if self._tokenizer else ""

    # Ends.

    def expire(self) -> list[CompletionDelta]:
        """End those whose time is up."""
        deltas: list[CompletionDelta] = []
        if self._deadlines:
            for request in self._deadlines.passed(self._clock()):
                deltas += self.end(request, "timeout")
        return deltas

    def abort(self, request_id: str) -> list[CompletionDelta]:
        """End all sequences of a request, if there is such a request."""
        deltas: list[CompletionDelta] = []
        for request in list(self._groups.get(request_id, ())):
            if request.finish_reason is None:
                deltas += self.end(request, "abort")
        return deltas

    def abort_all(self) -> list[CompletionDelta]:
        """End every sequence."""
        return [delta for request_id in list(self._groups) for delta in self.abort(request_id)]

    def end(
        self, request: Request, reason: FinishReason, last: Growth = NOTHING
    ) -> list[CompletionDelta]:
        """End a sequence, and siblings that still wait for it; the one place where they end."""
        entries = prompt_logprobs(request, self._name)
        text, stop_reason = last.text, last.stop_reason
        cut = isinstance(stop_reason, str) or reason == "error"
        if request.text is not None and not cut:
            rest, stop = request.text.finish()
            text += rest
            if stop is not None:
                reason, stop_reason = "stop", stop
        self._scheduler.finish(request, reason)
        now = self._clock()
        deltas = []
        for one in with_siblings(request):
            first = one is request
            deltas.append(
                CompletionDelta(
                    request_id=one.request_id,
                    index=one.index,
                    text=text if first else "",
                    token_ids=last.token_ids if first else (),
                    logprobs=last.logprobs if first else None,
                    finish_reason=reason,
                    stop_reason=stop_reason if first else None,
                    num_cached_tokens=one.num_cached_tokens,
                    failure=last.failure,
                    prompt_logprobs=entries if first else None,
                )
            )
            self._forget(one, reason, now)
        return deltas

    def _forget(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """Let go of a sequence that has ended."""
        request.text = None
        request.grammar = None
        self._guessing.forget(request)
        group = self._groups[request.request_id]
        group.remove(request)
        if not group:
            del self._groups[request.request_id]
            if request.adapter is not None:
                self._adapters.release(request.adapter)
        self._tally.note_end(request, reason, now_s)
