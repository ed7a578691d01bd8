"""The unfinished sequences of an engine: what a step gives each of them, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.beams import BeamGroup
from onnxport.serving.deadlines import Deadlines
from onnxport.serving.growth import Growth, ending, grow, progress
from onnxport.serving.guesses import Guessing
from onnxport.serving.outputs import Failure, FinishReason
from onnxport.serving.request import Request
from onnxport.serving.sampling import NOT_FINITE_STATES, Drawn, with_siblings
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.step_plan import StepPlan
from onnxport.serving.tally import Tally


class Sequences:
    """Knows every accepted sequence until it ends. Belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        adapters: AdapterRegistry,
        guessing: Guessing,
        tally: Tally,
        clock: Callable[[], float],
        eos_token_ids: frozenset[int],
    ) -> None:
        """Begin without any.

        Args:
            scheduler: holds their blocks and rows.
            adapters: which of them they use.
            guessing: told of those that have ended.
            tally: counts and tells what becomes of them.
            clock: the time in seconds.
            eos_token_ids: tokens that end a generation.
        """
        self._scheduler = scheduler
        self._adapters = adapters
        self._guessing = guessing
        self._tally = tally
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._groups: dict[str, list[Request]] = {}  # unfinished sequences by request
        self._telling: set[str] = set()  # requests that tell how much of their prompt is computed
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
        if first.options.tells_progress:
            self._telling.add(first.request_id)
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
                    if one.times.scheduled_s is None:  # else a slot of a beam search
                        one.times.scheduled_s = start_s
                        self._tally.tell("scheduled", one, start_s)

    def note_preempted(self, requests: Sequence[Request], now_s: float) -> None:
        """Tell that sequences have yielded; of the beams of a search, which do so together, one."""
        for request in requests:
            if request.beams is None or request.index == 0:
                self._tally.tell("preempted", request, now_s)

    def progress(self, plan: StepPlan, now_s: float) -> list[Growth]:
        """Return how much a step has computed of the prompts that tell it, before its tokens."""
        if not self._telling:
            return []
        return [
            progress(request, now_s)
            for request in plan.requests
            if request.request_id in self._telling and not request.num_output_tokens
        ]

    def note_tokens(self, slots: Iterable[Request], now_s: float) -> list[float]:
        """Note when slots of a beam search got tokens; returns what `_note_token` does of each."""
        return [gap for slot in slots for gap in self._note_token(slot, now_s)]

    def deliver(self, drawn: Sequence[Drawn], now_s: float) -> tuple[list[Growth], list[float]]:
        """Append the tokens that were drawn and end the sequences that are done.

        Returns:
            What was added, and the times since the previous token of each that was not a first one.
        """
        growths: list[Growth] = []
        gaps: list[float] = []
        for one in drawn:
            request = one.request
            if one.token_ids:
                gaps += self._note_token(request, now_s)
            if one.failure is not None:
                self._scheduler.distrust(request)
            growth = grow(one, self._eos_token_ids)
            self._tally.generation_tokens += len(growth.token_ids)
            if growth.reason is None:
                growths.append(growth)
            else:
                growths += self._finish(request, growth)
        return growths, gaps

    def deliver_vectors(self, requests: Iterable[Request]) -> list[Growth]:
        """End the prompts that have been read to their end, each with its vector."""
        growths: list[Growth] = []
        for request in requests:
            assert request.pooler is not None
            self._tally.prompt_tokens += request.num_prompt_tokens
            vector = request.pooler.vector()
            if vector is None:
                self._scheduler.distrust(request)
                growths += self._finish(request, ending(request, "error", NOT_FINITE_STATES))
                continue
            last = ending(request, "stop")
            last.embedding = vector
            growths += self._finish(request, last)
        return growths

    def _note_token(self, request: Request, now_s: float) -> list[float]:
        """Note when a sequence got tokens; returns how long after the last ones, if there were."""
        times = request.times
        gaps = [] if times.last_token_s is None else [now_s - times.last_token_s]
        times.last_token_s = now_s
        if times.first_token_s is None:
            times.first_token_s = now_s
            if request.index == 0:
                self._tally.prompt_tokens += request.num_prompt_tokens
            self._tally.tell("first_token", request, now_s)
        return gaps

    # Ends.

    def expire(self) -> list[Growth]:
        """End those whose time is up."""
        growths: list[Growth] = []
        if self._deadlines:
            for request in self._deadlines.passed(self._clock()):
                growths += self.end(request, "timeout")
        return growths

    def abort(self, request_id: str) -> list[Growth]:
        """End all sequences of a request, if there is such a request."""
        growths: list[Growth] = []
        for request in list(self._groups.get(request_id, ())):
            if request.finish_reason is None:
                growths += self.end(request, "abort")
        return growths

    def end_thoughts(self, request_id: str) -> bool:
        """Let no more of a request's thoughts come; see `Engine.end_thoughts`."""
        rules = [each.rules for each in self._groups.get(request_id, ())]
        ended = [one.end_thought() for one in rules if one is not None]  # all of them
        return any(ended)

    def abort_all(self) -> list[Growth]:
        """End every sequence."""
        return [growth for request_id in list(self._groups) for growth in self.abort(request_id)]

    def end(
        self, request: Request, reason: FinishReason, failure: Failure | None = None
    ) -> list[Growth]:
        """End a sequence that gets no more tokens, and siblings that still wait for it.

        Of a beam search all sequences end.

        Args:
            request: the sequence.
            reason: why it ends.
            failure: why `reason` is "error".
        """
        if request.beams is None:
            return self._finish(request, ending(request, reason, failure))
        request.beams.drop()
        lasts = [ending(slot, reason, failure) for slot in request.beams.slots]
        return self.end_beams(request.beams, lasts, self._clock())

    def end_beams(self, beams: BeamGroup, lasts: Sequence[Growth], now_s: float) -> list[Growth]:
        """End all sequences of a beam search.

        Args:
            beams: of the search.
            lasts: the last growth of each slot; all are told the times of the first one, for the
                others have but begun where beams parted.
            now_s: the time.
        """
        reasons = [last.reason for last in lasts]
        self._scheduler.finish_beams(beams, [reason for reason in reasons if reason is not None])
        for slot, last in zip(beams.slots, lasts, strict=True):
            assert last.reason is not None
            last.times = lasts[0].times
            if last.token_ids:
                self._tally.generation_tokens += len(last.token_ids)
                if slot.index:
                    self._note_token(slot, now_s)
            self._forget(slot, last.reason, now_s)
        return list(lasts)

    def _finish(self, request: Request, last: Growth) -> list[Growth]:
        """End a sequence with its last growth; the one place where they end."""
        reason = last.reason
        assert reason is not None
        self._scheduler.finish(request, reason)
        now = self._clock()
        growths = [last, *(ending(one, reason, last.failure) for one in request.siblings)]
        for one in with_siblings(request):
            self._forget(one, reason, now)
        return growths

    def _forget(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """Let go of a sequence that has ended."""
        request.text = None
        request.grammar = None
        self._guessing.forget(request)
        group = self._groups[request.request_id]
        group.remove(request)
        if not group:
            del self._groups[request.request_id]
            self._telling.discard(request.request_id)
            if request.adapter is not None:
                self._adapters.release(request.adapter)
        self._tally.note_end(request, reason, now_s)
        if not self._groups:
            self._tally.note_idle()
