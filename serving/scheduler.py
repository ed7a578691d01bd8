"""The scheduler: whose turn it is, from one step to the next.

A step is a transaction. `plan` looks and changes nothing, by the policy of `serving/planner.py`;
`reserve` takes the blocks; then comes `commit`, or `rollback`, after which no request has computed
anything and no block is held for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count

from onnxport.kv.pool import BlockPool
from onnxport.kv.states import StatePool
from onnxport.kv.table import Reservation
from onnxport.serving.beams import BeamGroup, together
from onnxport.serving.config import SchedulingPolicy
from onnxport.serving.following import Foresight
from onnxport.serving.hits import HitCounts
from onnxport.serving.holdings import Holdings
from onnxport.serving.outputs import FinishReason
from onnxport.serving.planner import Planner
from onnxport.serving.queues import Queues
from onnxport.serving.request import Request
from onnxport.serving.step_plan import Guess, StepPlan
from onnxport.serving.tenants import Tenants
from onnxport.serving.waiting import Bars, WaitingQueue, by_arrival, by_deadline

QUANTA = 4  # rounds of fair turns that the tokens of one step are good for


class Scheduler:
    """Owns the waiting and the running requests, their blocks and their states."""

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulingPolicy = "fcfs",
        states: StatePool | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            pool: the blocks.
            max_num_seqs: rows of a step at most, which each have a state to hold and one to write.
            max_num_batched_tokens: tokens of a step at most.
            policy: whose turn it is.
            states: the slots for states; None: the model has none.
        """
        self._policy = policy
        waiting = WaitingQueue(by_arrival if policy == "fcfs" else by_deadline)
        self._queues = Queues(max(1, max_num_batched_tokens // QUANTA), waiting)
        self._use(pool, max_num_seqs, max_num_batched_tokens, states)
        self._arrivals = count()
        self._tenants = Tenants(self._queues, policy)
        self.num_preemptions = 0
        self.hit_counts = HitCounts()

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet, or none any more."""
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._queues.running)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._queues.has_work

    @property
    def running(self) -> Collection[Request]:
        """The sequences that hold a row, the first in rank first."""
        return self._queues.running

    @property
    def waiting(self) -> WaitingQueue:
        """The requests that wait."""
        return self._queues.waiting

    @property
    def planner(self) -> Planner:
        """What looks at requests and blocks, and changes nothing."""
        return self._planner

    @property
    def tenants(self) -> Tenants:
        """Whose requests there are, and how many more each may queue."""
        return self._tenants

    def requests(self) -> Iterator[Request]:
        """Every unfinished request, the running ones first; siblings that wait are left out."""
        yield from self._queues.running
        yield from self._queues.waiting

    def is_swapped(self, key: bytes) -> bool:
        """Whether the block of this key was a request's that has yielded and waits to go on."""
        return self._held.is_swapped(key)

    def bar(self, bars: Bars) -> None:
        """Let some of the waiting requests not start, until the next call."""
        self._queues.bars = bars

    def submit(self, request: Request) -> None:
        """Queue a request; the caller has checked that the pool can hold it."""
        self._foresight.forget()
        priority = 0 if self._policy == "fcfs" else request.options.priority
        arrival = next(self._arrivals)
        for one in (request, *request.siblings):
            one.rank = (priority, arrival, one.index)
            self._tenants.add(one)
            self._held.open(one)
        self._queues.waiting.add(request)
        self._tenants.queue(request)
        self._fit_rows(request)

    def move_to(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        states: StatePool | None = None,
    ) -> list[Request]:
        """Go on with other pools, empty ones, and as many rows and tokens as their model takes.

        Requests keep their tokens, places and turns. Those that run yield; as ever they are
        computed again from their tokens, or from what a tier has of them.

        Returns:
            The requests that yielded.
        """
        yielded = list(self._queues.running)
        for request in yielded:
            if request.running:  # its other beams took it with them, if not
                self._preempt(request)
        self._use(pool, max_num_seqs, max_num_batched_tokens, states)
        for request in list(self._queues.waiting):
            request.name_blocks(pool.block_size)
            for one in (request, *request.siblings):
                self._held.open(one)
            self._fit_rows(request)
        return yielded

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, and siblings that wait for it, and free its blocks and its state.

        The one place where requests end.
        """
        self._foresight.forget()
        if request.running:
            self._queues.running.remove(request)
            self._queues.num_rows -= request.num_rows
        else:
            self._queues.waiting.remove(request)
            self._leave_queue(request)
        self._held.release(request)
        self._held.settle(request)
        for one in (request, *request.siblings):
            assert one.finish_reason is None, f"{one} has ended already"
            one.finish_reason = reason
            self._tenants.end(one)

    def finish_beams(self, beams: BeamGroup, reasons: Sequence[FinishReason]) -> None:
        """End a beam search and free its blocks and states.

        Args:
            beams: of the search.
            reasons: why each slot ends.
        """
        first, *others = beams.slots
        for slot, reason in zip(others, reasons[1:], strict=True):
            if slot.running:
                self.finish(slot, reason)
        idle = first.siblings
        self.finish(first, reasons[0])
        for slot in idle:
            slot.finish_reason = reasons[slot.index]

    def refork(self, beams: BeamGroup, parents: Mapping[Request, Request]) -> None:
        """Let the slots of a beam search go on from others' K/V and states; others wait.

        Args:
            beams: of the search.
            parents: slot -> the slot that it goes on from, which may be itself; the first slot is
                among them. Its tokens are the caller's matter.
        """
        self._foresight.forget()
        self._held.refork(beams.slots, parents)
        for slot in beams.slots:
            if slot in parents:
                slot.forked = True
                if not slot.running:
                    slot.running = True
                    self._queues.running.add(slot)
            elif slot.running:
                slot.running = slot.forked = False
                slot.num_computed_tokens = 0
                self._queues.running.remove(slot)
        beams.slots[0].siblings = tuple([slot for slot in beams.slots if slot not in parents])

    def distrust(self, request: Request) -> None:
        """Hide what a request has computed from others; its K/V may be wrong."""
        self._held.hide(request)

    def plan(
        self,
        only: Collection[Request] | None = None,
        loading: Collection[Request] = (),
        budget_tokens: int | None = None,
        guess: Guess | None = None,
    ) -> StepPlan:
        """See `Planner.plan`; a step that follows from the last one is not looked for again."""
        plan = self._foresight.plan() if only is None else None
        if plan is None:
            return self._planner.plan(only, loading, budget_tokens, guess)
        left = (budget_tokens or self._max_num_batched_tokens) - plan.num_tokens
        if guess is None or not left or not (found := guess(plan.requests, left)):
            return plan
        return self._planner.plan(only, loading, budget_tokens, lambda *_: found)

    def plan_ahead(self, plan: StepPlan) -> None:
        """Look what follows a plan, beside the model that runs it, so that `plan` finds it.

        In any thread, without a lock: it only reads, and what it finds is used only after that very
        plan, and if nothing has changed since.
        """
        self._foresight.look(plan)

    def reserve(self, plan: StepPlan) -> Reservation:
        """Preempt as planned and take the step's blocks, and a state to write for each row.

        A preemption stays even if the step is rolled back: others may have overwritten its blocks.
        """
        self._foresight.forget()
        claims = self._held.claim(plan)
        for request in plan.preempted:
            if request.running:  # its other beams took it with them, if not
                self._preempt(request)
        return self._held.reserve(plan, claims)

    def rollback(self, plan: StepPlan, reservation: Reservation) -> list[Request]:
        """Give the step's blocks and states back; its requests are where they were.

        But nobody knows what is in a state that the step was to write in place. Who held it yields,
        and no step that it takes part in writes another one so.

        Returns:
            The requests that yielded, of a beam search all that ran.
        """
        lost = [plan.requests[row] for row in self._held.rollback(reservation)]
        yielded: list[Request] = []
        for request in lost:
            for one in (request,) if request.beams is None else request.beams.slots:
                one.keeps_state = True
            if request.running:  # its other beams took it with them, if not
                yielded += together(request)
                self._preempt(request)
        return yielded

    def commit(
        self,
        plan: StepPlan,
        reservation: Reservation,
        accepted: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """The step's tokens are in the cache now; requests it started are running.

        Args:
            plan: of the step.
            reservation: what was taken for it.
            accepted: row -> the first tokens of its draft that proved right, which are about to be
                the request's. What was computed of the others is given up, and where there are
                states all that the row has computed, for the state behind it cannot go back.
        """
        for row, request in enumerate(plan.requests[plan.num_decodes :], plan.num_decodes):
            if row in plan.shared or not request.running:
                self.hit_counts.note(request, plan.num_past[row])
                if not request.running:
                    self._start(request)
        self._held.commit(plan, reservation, accepted or {})
        for row in plan.sampled:
            if plan.requests[row].siblings and plan.requests[row].beams is None:
                self._fork(plan.requests[row])
        self._tenants.settle(plan)
        self._foresight.note(plan)

    def check(self) -> None:
        """Assert the invariants of requests and blocks (for tests; linear in everything)."""
        self._held.check(list(self.requests()))
        assert self._queues.num_rows == sum(request.num_rows for request in self._queues.running)
        assert self._queues.num_rows <= self._max_num_seqs
        for request in self.requests():
            assert request.finish_reason is None
            waits = request.beams is not None and request in request.beams.found  # for others
            assert 0 <= request.num_computed_tokens <= len(request.tokens)
            assert (request.num_computed_tokens == len(request.tokens)) == waits, request
            num_left = len(request.tokens) - request.num_computed_tokens
            assert 0 <= request.num_owed_tokens <= max(0, num_left - 1), request
            assert request.running or not request.num_owed_tokens, request
            assert not any(one.running for one in request.siblings)
        assert all(request.running for request in self._queues.running)
        assert not any(one.running or one.num_computed_tokens for one in self._queues.waiting)
        if (plan := self._foresight.plan()) is not None:
            assert plan == self._planner.plan(), "what follows is not what would be planned"
        queued = sum(not one.num_preemptions for one in self._queues.waiting)
        counted = self._tenants.num_queued
        assert counted == queued, f"{counted} counted, {queued} queued"

    def _use(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        states: StatePool | None,
    ) -> None:
        """Plan and hold with these pools and limits; nothing is held yet."""
        assert 1 <= max_num_seqs <= max_num_batched_tokens
        assert states is None or max_num_seqs <= states.num_sequences
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._held = Holdings(pool, states)
        self._planner = Planner(pool, self._queues, max_num_seqs, max_num_batched_tokens, states)
        self._foresight = Foresight(self._queues, pool)

    def _fit_rows(self, request: Request) -> None:
        """Let the completions of a waiting request go their own ways if they do not fit one step.

        That happens when they were accepted for a model that takes more rows.
        """
        if request.num_rows <= self._max_num_seqs or request.beams is not None:
            return
        siblings, request.siblings = request.siblings, ()
        for one in siblings:
            one.keys = None if request.keys is None else request.keys.copy()
            one.num_cached_tokens = 0  # what is found is found at an attempt of its own
            self._queues.waiting.add(one)
            self._tenants.queue(one)

    def _start(self, request: Request) -> None:
        self._queues.waiting.remove(request)
        self._leave_queue(request)
        request.running = True
        self._queues.running.add(request)
        self._queues.num_rows += request.num_rows
        self._tenants.start(request)

    def _preempt(self, request: Request) -> None:
        if request.beams is not None:
            self._preempt_beams(request.beams)
            return
        self._held.note_swapped(request, request.num_computed_tokens)
        self._yield_row(request)
        request.num_preemptions += 1
        self._queues.waiting.add(request)
        self.num_preemptions += 1

    def _preempt_beams(self, beams: BeamGroup) -> None:
        """All beams of a search yield; what they have in common waits for all of them."""
        first = beams.slots[0]
        num_computed = first.num_computed_tokens
        for slot in beams.running:
            self._yield_row(slot)
        beams.give_up()
        first.siblings = beams.slots[1:]
        if first.keys is not None:
            first.keys = first.keys.first(len(first.tokens))
            self._held.note_swapped(first, min(num_computed, len(first.tokens)))
        first.num_preemptions += 1
        self._queues.waiting.add(first)
        self.num_preemptions += 1

    def _yield_row(self, request: Request) -> None:
        """A sequence gives up its row and all that it has computed."""
        self._held.release(request)
        self._queues.running.remove(request)
        self._queues.num_rows -= request.num_rows
        request.running = request.forked = False
        request.num_computed_tokens = request.num_owed_tokens = 0

    def _leave_queue(self, request: Request) -> None:
        """A waiting request starts, goes on or ends."""
        if not request.num_preemptions:
            self._tenants.leave_queue(request)
        else:
            self._held.forget_swapped(request)

    def _fork(self, request: Request) -> None:
        """Let the siblings of a request go on from its prompt."""
        siblings, request.siblings = request.siblings, ()
        request.forked = True
        for one in siblings:
            self._held.fork(one, request)
            one.forked = True
            one.running = True
            self._queues.running.add(one)
