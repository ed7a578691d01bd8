"""The scheduler: requests and their blocks, from one step to the next.

A step is a transaction. `plan` looks and changes nothing, by the policy of `serving/planner.py`;
`reserve` takes the blocks; then comes `commit`, or `rollback`, after which no request has computed
anything and no block is held for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from onnxport.kv import table as kv
from onnxport.kv.pool import BlockPool
from onnxport.kv.states import StatePool
from onnxport.kv.table import NOTHING, BlockTable, Claim, Reservation, blocks_for
from onnxport.serving.beams import BeamGroup, together
from onnxport.serving.config import SchedulingPolicy
from onnxport.serving.draft import Guess, StepPlan
from onnxport.serving.following import following
from onnxport.serving.held_states import HeldStates
from onnxport.serving.outputs import FinishReason
from onnxport.serving.params import RequestOptions
from onnxport.serving.planner import Planner
from onnxport.serving.queues import Queues
from onnxport.serving.request import Request
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
        assert 1 <= max_num_seqs <= max_num_batched_tokens
        assert states is None or max_num_seqs <= states.num_sequences
        self._pool = pool
        self._states = HeldStates(states, pool.block_size)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._policy = policy
        waiting = WaitingQueue(by_arrival if policy == "fcfs" else by_deadline)
        self._queues = Queues(max(1, max_num_batched_tokens // QUANTA), waiting)
        self._planner = Planner(pool, self._queues, max_num_seqs, max_num_batched_tokens, states)
        self._arrivals = count()
        self._tenants = Tenants(self._queues, policy)
        self._last: StepPlan | None = None  # the plan since whose commit nothing has changed
        self._ahead: tuple[StepPlan, StepPlan | None] | None = None  # a plan, and what follows it
        self._swapped: set[bytes] = set()  # keys of the blocks of preempted requests
        self.num_preemptions = 0
        self.num_looked_up = 0  # tokens of started requests
        self.num_found = 0  # those of them that were in the cache

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet, or none any more."""
        return len(self._queues.waiting)

    @property
    def num_queued(self) -> int:
        """Requests that were never started."""
        return self._tenants.num_queued

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
    def planner(self) -> Planner:
        """What looks at requests and blocks, and changes nothing."""
        return self._planner

    def requests(self) -> Iterator[Request]:
        """Every unfinished request, the running ones first; siblings that wait are left out."""
        yield from self._queues.running
        yield from self._queues.waiting

    def is_swapped(self, key: bytes) -> bool:
        """Whether the block of this key was a request's that has yielded and waits to go on."""
        return key in self._swapped

    def bar(self, bars: Bars) -> None:
        """Let some of the waiting requests not start, until the next call."""
        self._queues.bars = bars

    @property
    def waiting(self) -> WaitingQueue:
        """The requests that wait."""
        return self._queues.waiting

    def tenant_of(self, options: RequestOptions) -> str:
        """Whose request counts as whose: all are one tenant's, but for the policy "fair"."""
        return self._tenants.of(options)

    def queue_room(self, tenant: str, limit: int, coming: Mapping[str, int]) -> int:
        """How many more requests `tenant` may queue when at most `limit` may wait in all.

        Under "fair" there is always room for one more tenant: with k of them unfinished, each may
        fill a part in k + 1 of the queue. Reading it from another thread is harmless.

        Args:
            tenant: whose requests.
            limit: how many may wait, everybody's.
            coming: of each tenant, how many more were taken that `submit` was not given yet.
        """
        return self._tenants.room(tenant, limit, coming)

    def submit(self, request: Request) -> None:
        """Queue a request; the caller has checked that the pool can hold it."""
        self._last = None
        priority = 0 if self._policy == "fcfs" else request.options.priority
        arrival = next(self._arrivals)
        for one in (request, *request.siblings):
            one.rank = (priority, arrival, one.index)
            self._tenants.add(one)
            one.table = BlockTable(len(self._pool.groups))
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
        assert 1 <= max_num_seqs <= max_num_batched_tokens
        assert states is None or max_num_seqs <= states.num_sequences
        self._last = self._ahead = None
        yielded = list(self._queues.running)
        for request in yielded:
            if request.running:  # its other beams took it with them, if not
                self._preempt(request)
        self._swapped.clear()
        self._pool, self._max_num_seqs = pool, max_num_seqs
        self._states = HeldStates(states, pool.block_size)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._planner = Planner(pool, self._queues, max_num_seqs, max_num_batched_tokens, states)
        for request in list(self._queues.waiting):
            request.name_blocks(pool.block_size)
            for one in (request, *request.siblings):
                one.table = BlockTable(len(pool.groups))
                one.kept = None  # its slot is another one's now
            self._fit_rows(request)
        return yielded

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, and siblings that wait for it, and free its blocks and its state.

        The one place where requests end.
        """
        self._last = self._ahead = None
        if request.running:
            self._queues.running.remove(request)
            self._queues.num_rows -= request.num_rows
        else:
            self._queues.waiting.remove(request)
            self._leave_queue(request)
        self._release(request)
        self._states.settle(request)
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
        self._last = self._ahead = None
        first = beams.slots[0]
        moved = {
            slot: (
                kv.fork(self._pool, parent.table),
                self._states.share(parent),
                parent.num_computed_tokens,
                None if parent.keys is None else parent.keys.copy(),
            )
            for slot, parent in parents.items()
            if slot is not parent
        }
        for slot in beams.slots:
            if slot in moved or slot not in parents:
                self._release(slot)
            if slot in moved:
                slot.table, slot.state, slot.num_computed_tokens, slot.keys = moved[slot]
            if slot in parents:
                slot.forked = True
                if not slot.running:
                    slot.running = True
                    self._queues.running.add(slot)
            elif slot.running:
                slot.running = slot.forked = False
                slot.num_computed_tokens = 0
                self._queues.running.remove(slot)
        first.siblings = tuple([slot for slot in beams.slots if slot not in parents])

    def distrust(self, request: Request) -> None:
        """Hide what a request has computed from others; its K/V may be wrong."""
        kv.hide(self._pool, request.table, request.keys)
        self._states.hide(request.keys)

    def plan(
        self,
        only: Collection[Request] | None = None,
        loading: Collection[Request] = (),
        budget_tokens: int | None = None,
        guess: Guess | None = None,
    ) -> StepPlan:
        """See `Planner.plan`; a step that follows from the last one is not looked for again."""
        plan = None
        if self._last is not None and only is None:
            plan = self._following(self._last)
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
        self._ahead = (plan, following(plan, self._queues, self._pool))

    def _following(self, last: StepPlan) -> StepPlan | None:
        """Return what follows the last step, worked out already or now."""
        ahead = self._ahead
        if ahead is not None and ahead[0] is last:
            return ahead[1]
        return following(last, self._queues, self._pool)

    def reserve(self, plan: StepPlan) -> Reservation:
        """Preempt as planned and take the step's blocks, and a state to write for each row.

        A preemption stays even if the step is rolled back: others may have overwritten its blocks.
        """
        self._last = None
        claims = []
        for row, (request, num_new) in enumerate(
            zip(plan.requests, plan.num_new_columns, strict=True)
        ):
            if num_new or row in plan.shared or row in plan.copied:
                shared = plan.shared.get(row, NOTHING)
                claims.append(Claim(request.table, shared, num_new, row in plan.copied))
        kv.share(self._pool, claims)
        found = self._states.find(plan)
        for request in plan.preempted:
            if request.running:  # its other beams took it with them, if not
                self._preempt(request)
        reservation = kv.reserve(self._pool, claims)
        states = self._states.reserve(plan, found)
        return reservation if states is None else replace(reservation, states=states)

    def rollback(self, plan: StepPlan, reservation: Reservation) -> list[Request]:
        """Give the step's blocks and states back; its requests are where they were.

        But nobody knows what is in a state that the step was to write in place. Who held it yields,
        and no step that it takes part in writes another one so.

        Returns:
            The requests that yielded, of a beam search all that ran.
        """
        kv.rollback(self._pool, reservation)
        states = reservation.states
        self._states.rollback(states)
        lost = [plan.requests[row] for row in states.in_place] if states is not None else []
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
        accepted = accepted or {}
        undone = self._undone(plan, accepted)
        kv.commit(self._pool, reservation)
        self._states.commit(plan, reservation.states, undone)
        block_size, gives_up = self._pool.block_size, bool(self._pool.groups.windowed)
        for row, request in enumerate(plan.requests):
            num_past, num_new = plan.num_past[row], plan.num_new[row]
            if row in plan.shared or not request.running:
                self._note_hits(request, num_past)
            if not request.running:
                self._start(request)
            total = num_past + num_new
            right: Sequence[int] = ()
            if row in plan.drafts:
                right = accepted.get(row, ())
                total -= len(plan.drafts[row]) - len(right)
                if row in undone:
                    request.num_owed_tokens, total = total - num_past, num_past
                kv.release_tail(self._pool, request.table, blocks_for(total, block_size))
            request.num_computed_tokens = total
            if request.num_owed_tokens and row not in undone:
                request.num_owed_tokens = max(0, request.num_owed_tokens - num_new)
            if total // block_size > num_past // block_size and request.keys is not None:
                self._register(request, num_past // block_size, total // block_size, right)
                self._states.keep(request, stopped=row in plan.stopped)
            if gives_up:
                kv.give_up(self._pool, request.table, total)
        for row in plan.sampled:
            if plan.requests[row].siblings and plan.requests[row].beams is None:
                self._fork(plan.requests[row])
        self._tenants.settle(plan)
        self._last = plan

    def check(self) -> None:
        """Assert the invariants of requests and blocks (for tests; linear in everything)."""
        groups = self._pool.groups
        self._pool.check([tuple(request.table.held()) for request in self.requests()])
        self._states.check(self.requests())
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
            needed = blocks_for(request.num_computed_tokens, self._pool.block_size)
            assert len(request.table) == needed, f"{request}: {len(request.table)} columns"
            for group, gone in enumerate(request.table.given_up):
                assert gone == groups.first_seen(group, request.num_computed_tokens), request
            assert not any(one.running or len(one.table) for one in request.siblings)
        assert all(request.running for request in self._queues.running)
        assert not any(one.running or one.num_computed_tokens for one in self._queues.waiting)
        if self._last is not None and (plan := self._following(self._last)) is not None:
            assert plan == self._planner.plan(), "what follows is not what would be planned"
        queued = sum(not one.num_preemptions for one in self._queues.waiting)
        assert self.num_queued == queued, f"{self.num_queued} counted, {queued} queued"

    def _undone(self, plan: StepPlan, accepted: Mapping[int, Sequence[int]]) -> Collection[int]:
        """Return the rows of a plan whose states are of wrong guesses."""
        if not self._states.are_there:
            return ()
        drafts = plan.drafts.items()
        return {row for row, draft in drafts if len(accepted.get(row, ())) < len(draft)}

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
        if request.keys is not None:
            full = request.num_computed_tokens // self._pool.block_size
            self._swapped.update(request.keys.key(index) for index in range(full))
        self._release(request)
        self._queues.running.remove(request)
        self._queues.num_rows -= request.num_rows
        request.running = False
        request.forked = False
        request.num_computed_tokens = request.num_owed_tokens = 0
        request.num_preemptions += 1
        self._queues.waiting.add(request)
        self.num_preemptions += 1

    def _preempt_beams(self, beams: BeamGroup) -> None:
        """All beams of a search yield; what they have in common waits for all of them."""
        first = beams.slots[0]
        num_computed = first.num_computed_tokens
        for slot in beams.running:
            self._release(slot)
            self._queues.running.remove(slot)
            self._queues.num_rows -= slot.num_rows
            slot.running = slot.forked = False
            slot.num_computed_tokens = 0
        beams.give_up()
        first.siblings = beams.slots[1:]
        if first.keys is not None:
            first.keys = first.keys.first(len(first.tokens))
            full = min(num_computed, len(first.tokens)) // self._pool.block_size
            self._swapped.update(first.keys.key(index) for index in range(full))
        first.num_preemptions += 1
        self._queues.waiting.add(first)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        """Free what a request holds of its computed tokens, to the last block and its state."""
        kv.release_tail(self._pool, request.table)
        self._states.release(request)

    def _leave_queue(self, request: Request) -> None:
        """A waiting request starts, goes on or ends: its blocks are like all others."""
        if not request.num_preemptions:
            self._tenants.leave_queue(request)
        elif request.keys is not None:
            self._swapped.difference_update(map(request.keys.key, range(len(request.keys))))

    def _note_hits(self, request: Request, num_past: int) -> None:
        """Count what the prefix cache was asked for and found, at a request's first attempt."""
        if request.num_preemptions or request.keys is None:
            return
        if request.params.skip_reading_prefix_cache:
            return
        if not request.running:
            self.num_looked_up += len(request.tokens)
        found = num_past - request.num_computed_tokens
        self.num_found += found
        for one in (request, *request.siblings):
            one.num_cached_tokens += found

    def _register(
        self, request: Request, start: int, stop: int, accepted: Sequence[int] = ()
    ) -> None:
        """Make columns `start` to `stop - 1` of a request findable; they are full.

        Args:
            request: whose columns.
            start: the first one.
            stop: the one after the last.
            accepted: tokens in them that are about to be appended to the request's own.
        """
        keys = request.keys
        assert keys is not None
        if len(keys) < stop:
            tokens = request.tokens
            keys.extend(tokens + array(tokens.typecode, accepted) if accepted else tokens)
        kv.register(self._pool, request.table, keys, start, stop)

    def _fork(self, request: Request) -> None:
        """Let the siblings of a request go on from its prompt."""
        siblings, request.siblings = request.siblings, ()
        request.forked = True
        for one in siblings:
            one.table = kv.fork(self._pool, request.table)
            one.state = self._states.share(request)
            one.keys = None if request.keys is None else request.keys.copy()
            one.num_computed_tokens = request.num_computed_tokens
            one.forked = True
            one.running = True
            self._queues.running.add(one)
