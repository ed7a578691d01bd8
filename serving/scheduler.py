"""Continuous batching: which requests compute how many tokens in the next step.

A step is a transaction. `plan` looks and changes nothing; `reserve` takes the blocks; then comes
`commit`, or `rollback`, after which no request has computed anything and no block is held for it.

The policy:

* One rule, `num_new = num_tokens - num_computed_tokens`, covers prefill, chunked prefill, prefix
  hits, decoding and starting over after a preemption.
* Running requests that need a single token come first: every one of them, in every step. What is
  left of the token budget goes to prompts: by priority, then tenant by tenant in turns, then by
  deadline, then in the order of arrival. As every running request holds one of `max_num_seqs`
  rows, prompts get at least `max_num_batched_tokens - max_num_seqs + 1` tokens a step.
* Whatever is in the cache is not computed. What another row is computing in this step is not
  computed either: a request whose next block is on its way lets this step pass, and finds it in
  the next one. Nothing links the two requests: if the first one is gone, the second goes on.
* A waiting request starts when free blocks hold all its tokens beside what prompts that have begun
  have still to take, so blocks run out only by decoding. A request that has to wait for room
  keeps all that come after it waiting too.
* When blocks run out, the newest of the lowest-priority running requests yields: its blocks are
  released, its tokens kept, and it waits to go on. Running requests of a lower priority also
  yield to the first waiting request when that makes room for it. The first in rank never yields
  and, as `submit` accepts only what fits the whole pool, always gets on.

What follows, for requests of one priority while nobody is preempted, with B tokens a step and R
rows. A running request gets a token every step, and no step has more than B tokens. From when a row
and blocks are free, and with P tokens of prompts ahead, a prompt of L tokens is computed after at
most (P + L) / (B - R + 1) steps, rounded up; each prompt ahead that begins with the same block may
cost one step more. Under "fair", for a tenant that owes nothing, P counts at most one quantum of
every other tenant for each quantum, or part of one, of its own prompt; and a tenant that holds no
row gets the next one that becomes free, after those that hold none either and began to wait before.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import count

from sortedcontainers import SortedKeyList

from onnxport.kv import table as kv
from onnxport.kv.pool import BlockPool
from onnxport.kv.table import Claim, Reservation, blocks_for, release_tail
from onnxport.serving.config import SchedulingPolicy
from onnxport.serving.draft import Draft, StepPlan
from onnxport.serving.outputs import FinishReason
from onnxport.serving.params import RequestOptions
from onnxport.serving.request import Request
from onnxport.serving.shares import Shares
from onnxport.serving.waiting import WaitingQueue


class _Lane:
    """The prompts of one tenant and priority that may compute in a step, in order."""

    __slots__ = ("_next", "_requests", "pending", "row")

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._next = 0
        self.pending = 0  # tokens that they have to compute
        self.row: int | None = None  # of the prompt in hand

    def add(self, request: Request, num_cached: int) -> None:
        self._requests.append(request)
        self.pending += len(request.tokens) - request.num_computed_tokens - num_cached

    def next(self) -> Request | None:
        """The next prompt, each once."""
        if self._next == len(self._requests):
            return None
        self._next += 1
        return self._requests[self._next - 1]


class Scheduler:
    """Owns the waiting and the running requests and their blocks."""

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulingPolicy = "fcfs",
    ) -> None:
        assert 1 <= max_num_seqs <= max_num_batched_tokens
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._policy = policy
        self._arrivals = count()
        self._waiting = WaitingQueue()
        self._running: SortedKeyList[Request, tuple[int, int, int]]
        self._running = SortedKeyList(key=lambda request: request.rank)
        self._num_rows = 0  # that the running requests hold
        self._quantum = max(1, max_num_batched_tokens // 4)
        self._shares: dict[int, Shares] = {}  # by priority
        self._tenants: Counter[str] = Counter()  # their unfinished requests
        self._starts = count(1)
        self._last_start: dict[str, int] = {}  # tenant -> number of its latest start
        self._swapped: set[bytes] = set()  # keys of the blocks of preempted requests
        self._queued: Counter[str] = Counter()  # tenant -> requests that were never started
        self.num_preemptions = 0
        self.num_looked_up = 0  # tokens of started requests
        self.num_found = 0  # those of them that were in the cache

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet, or none any more."""
        return len(self._waiting)

    @property
    def num_queued(self) -> int:
        """Requests that were never started."""
        return self._queued.total()

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running or len(self._waiting))

    def requests(self) -> Iterator[Request]:
        """Every unfinished request, the running ones first; siblings that wait are left out."""
        yield from self._running
        yield from self._waiting

    def is_swapped(self, key: bytes) -> bool:
        """Whether the block of this key was a request's that has yielded and waits to go on."""
        return key in self._swapped

    def tenant_of(self, options: RequestOptions) -> str:
        """Whose request counts as whose: all are one tenant's, but for the policy "fair"."""
        return options.tenant if self._policy == "fair" else ""

    def queue_room(self, tenant: str, limit: int) -> int:
        """How many more requests `tenant` may queue when at most `limit` may wait in all.

        Under "fair" there is always room for one more tenant: with k of them unfinished, each may
        fill a part in k + 1 of the queue. Reading it from another thread is harmless.
        """
        room = limit - self.num_queued
        if self._policy != "fair":
            return room
        tenants = len(self._tenants) + (tenant not in self._tenants)
        return min(room, max(1, limit // (tenants + 1)) - self._queued[tenant])

    def submit(self, request: Request) -> None:
        """Queue a request; the caller has checked that the pool can hold it."""
        priority = 0 if self._policy == "fcfs" else request.options.priority
        arrival = next(self._arrivals)
        for one in (request, *request.siblings):
            one.rank = (priority, arrival, one.index)
            one.tenant = self.tenant_of(one.options)
            self._tenants[one.tenant] += 1
        self._waiting.add(request)
        self._queued[request.tenant] += 1

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, and siblings that wait for it, and free its blocks.

        The one place where requests end.
        """
        if request.running:
            self._running.remove(request)
            self._num_rows -= request.num_rows
        else:
            self._waiting.remove(request)
            self._leave_queue(request)
        release_tail(self._pool, request.table)
        for one in (request, *request.siblings):
            assert one.finish_reason is None, f"{one} has ended already"
            one.finish_reason = reason
            self._tenants[one.tenant] -= 1
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]
            self._forget_tenant(request.tenant)

    def distrust(self, request: Request) -> None:
        """Hide what a request has computed from others; its K/V may be wrong."""
        for block in request.table.blocks:
            self._pool.unregister(block)

    def next_in_line(self) -> Iterator[Request]:
        """The waiting requests that rows are free for, more or less in the order of their start."""
        rows = self._max_num_seqs - self._num_rows
        for request in self._waiting:
            rows -= request.num_rows
            if rows < 0:
                break
            yield request

    def hits(self, request: Request) -> tuple[int, ...]:
        """The cached blocks that hold the next tokens of `request`.

        At least one token is left to compute: the next one is sampled from its logits.
        """
        keys, block_size = request.keys, self._pool.block_size
        start, partial = divmod(request.num_computed_tokens, block_size)
        if keys is None or partial:
            return ()
        found = []
        for index in range(start, min(len(keys), (len(request.tokens) - 1) // block_size)):
            block = self._pool.find(keys.key(index))
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def plan(
        self, only: Collection[Request] | None = None, loading: Collection[Request] = ()
    ) -> StepPlan:
        """Choose the next step; changes nothing. No requests: there is nothing to do.

        Args:
            only: requests that may take part; None for all.
            loading: waiting requests whose K/V are on their way from elsewhere; they keep their
                place and do not start.
        """
        draft = self._make_room(loading) if only is None else self._draft()
        prefills = self._plan_decodes(draft, only)
        self._plan_prompts(draft, prefills, only, loading)
        stuck = not draft.requests and self.has_work and only is None and not loading
        assert not stuck, "unfinished requests, and none can go on"
        return draft.freeze()

    def reserve(self, plan: StepPlan) -> Reservation:
        """Preempt as planned and take the step's blocks.

        A preemption stays even if the step is rolled back: others may have overwritten its blocks.
        """
        claims = []
        for row, (request, num_new) in enumerate(
            zip(plan.requests, plan.num_new_blocks, strict=True)
        ):
            if num_new or row in plan.shared or row in plan.copied:
                shared = plan.shared.get(row, ())
                claims.append(Claim(request.table, shared, num_new, row in plan.copied))
        kv.share(self._pool, claims)
        for request in plan.preempted:
            self._preempt(request)
        return kv.reserve(self._pool, claims)

    def rollback(self, reservation: Reservation) -> None:
        """Give the step's blocks back; its requests are where they were."""
        kv.rollback(self._pool, reservation)

    def commit(self, plan: StepPlan, reservation: Reservation) -> None:
        """The step's tokens are in the cache now; requests it started are running."""
        kv.commit(self._pool, reservation)
        block_size = self._pool.block_size
        for row, request in enumerate(plan.requests):
            num_past, num_new = plan.num_past[row], plan.num_new[row]
            if row in plan.shared or not request.running:
                self._note_hits(request, num_past)
            if not request.running:
                self._start(request)
            total = num_past + num_new
            request.num_computed_tokens = total
            if total // block_size > num_past // block_size and request.keys is not None:
                self._register(request, num_past // block_size, total // block_size)
        for row in plan.sampled:
            if plan.requests[row].siblings:
                self._fork(plan.requests[row])
        if self._policy == "fair":
            self._settle(plan)

    def check(self) -> None:
        """Assert the invariants of requests and blocks (for tests; linear in everything)."""
        self._pool.check([request.table.blocks for request in self.requests()])
        assert self._num_rows == sum(request.num_rows for request in self._running)
        assert self._num_rows <= self._max_num_seqs
        for request in self.requests():
            assert request.finish_reason is None
            assert 0 <= request.num_computed_tokens < len(request.tokens)
            needed = blocks_for(request.num_computed_tokens, self._pool.block_size)
            assert len(request.table) == needed, f"{request}: {len(request.table)} blocks"
            assert not any(one.running or len(one.table) for one in request.siblings)
        assert all(request.running for request in self._running)
        assert not any(one.running or one.num_computed_tokens for one in self._waiting)
        queued = sum(not one.num_preemptions for one in self._waiting)
        assert self.num_queued == queued, f"{self.num_queued} counted, {queued} queued"

    # Planning.

    def _draft(self) -> Draft:
        rows = self._max_num_seqs - self._num_rows
        return Draft(self._pool, self._max_num_batched_tokens, rows)

    def _make_room(self, loading: Collection[Request]) -> Draft:
        """Begin a plan: lower priorities yield to the first waiting request if that lets it start.

        They yield for as little as possible, and not at all if it does not help.
        """
        draft = self._draft()
        first = self._waiting.first()
        if first is None or first in loading or not self._yields(first):
            return draft
        shared = self.hits(first)
        needed = blocks_for(len(first.tokens), self._pool.block_size) - len(shared)
        claimed = sum(self._claim(request) + self._takes(request) for request in self._running)
        for victim in reversed(self._running):
            room = draft.free - draft.num_taken(shared) - claimed
            if draft.rows >= first.num_rows and room >= needed:
                return draft
            if victim.rank[0] <= first.rank[0]:
                return self._draft()
            draft.preempt(victim)
            claimed -= self._claim(victim) + self._takes(victim)
        room = draft.free - draft.num_taken(shared) - claimed
        return draft if room >= needed else self._draft()

    def _yields(self, first: Request) -> bool:
        """Whether any running request has a lower priority than `first`."""
        return bool(self._running) and self._running[-1].rank[0] > first.rank[0]

    def _claim(self, request: Request) -> int:
        """How many blocks a running prompt has still to take; 0 for one that decodes."""
        if len(request.tokens) - request.num_computed_tokens <= 1:
            return 0
        return blocks_for(len(request.tokens), self._pool.block_size) - len(request.table)

    def _takes(self, request: Request) -> bool:
        """Whether a running request decodes and its blocks are full, so that it takes one now."""
        decodes = len(request.tokens) - request.num_computed_tokens == 1
        return decodes and (
            request.num_computed_tokens == len(request.table) * self._pool.block_size
        )

    def _plan_decodes(self, draft: Draft, only: Collection[Request] | None) -> list[Request]:
        """Plan the running requests that need one token; returns the others.

        Blocks that are missing come from the last in rank, which may be the very one that needs
        them.
        """
        block_size = self._pool.block_size
        prefills: list[Request] = []
        last_first = reversed(self._running)
        for request in self._running:
            num_past = request.num_computed_tokens
            if len(request.tokens) - num_past > 1:
                prefills.append(request)
                continue
            if only is not None and request not in only:
                continue
            blocks = request.table.blocks
            missing = int(num_past == len(blocks) * block_size)
            copies = request.forked and not missing and draft.must_copy(blocks[-1])
            while missing + copies > draft.free and request not in draft.yielding:
                draft.closed = True
                victim = next(last_first)
                if victim not in draft.yielding:
                    draft.preempt(victim)
                    copies = copies and draft.must_copy(blocks[-1])
            if draft.yielding and request in draft.yielding:
                break  # all that follow are behind it, so they have yielded too
            draft.add_decode(request, missing + copies, copies=copies)
        return [request for request in prefills if request not in draft.yielding]

    def _plan_prompts(
        self,
        draft: Draft,
        prefills: list[Request],
        only: Collection[Request] | None,
        loading: Collection[Request],
    ) -> None:
        """Share what is left of the budget between running prompts and waiting ones."""
        draft.claimed = sum(map(self._claim, prefills))
        if only is not None:
            prefills = [request for request in prefills if request in only]
        for request in prefills:
            self._look_up(draft, request)
        starting = len(self._waiting) > 0 and not draft.closed and draft.rows > 0
        levels = {request.rank[0] for request in prefills}
        for level in sorted(levels.union(self._waiting.levels if starting else ())):
            lanes: dict[str, _Lane] = {}
            for request in prefills:
                if request.rank[0] == level:
                    num_cached = len(draft.found[request]) * self._pool.block_size
                    lanes.setdefault(request.tenant, _Lane()).add(request, num_cached)
            if starting and draft.budget:
                self._admit(draft, level, lanes, only, loading)
            turns = self._shares_of(level).turns(lanes)
            while draft.budget and (tenant := turns.current()) is not None:
                taken = self._advance(draft, lanes[tenant], turns.allowance(draft.budget))
                if taken:
                    turns.spend(taken)
                else:
                    turns.leave()
            draft.turns[level] = turns

    def _admit(
        self,
        draft: Draft,
        level: int,
        lanes: dict[str, _Lane],
        only: Collection[Request] | None,
        loading: Collection[Request],
    ) -> None:
        """Add the waiting requests that may start to the lanes: there are rows and blocks for them.

        Those that the budget cannot reach are left out; they are as good as chosen, for the next
        step begins with the same ones.
        """
        for request in self._in_line(level, lanes, draft):
            if draft.closed:
                break
            if only is not None and request not in only:
                continue
            if request.num_rows > draft.rows:
                draft.closed = True
                break
            if request in loading or not self._look_up(draft, request):
                draft.rows -= request.num_rows  # the next steps keep them for it
                continue
            shared = draft.found[request]
            needed = blocks_for(len(request.tokens), self._pool.block_size) - len(shared)
            if draft.num_taken(shared) + needed > draft.free - draft.claimed:
                draft.closed = True
                break
            draft.take(shared)
            draft.claimed += needed
            draft.rows -= request.num_rows
            num_cached = len(shared) * self._pool.block_size
            lanes.setdefault(request.tenant, _Lane()).add(request, num_cached)

    def _in_line(self, level: int, lanes: Mapping[str, _Lane], draft: Draft) -> Iterator[Request]:
        """The waiting requests of one priority in the order in which they may take rows.

        A free row goes to the tenant that holds the fewest; of equals, to the one that has not
        been given one for longest, then by arrival. So nobody keeps all rows for long.
        """
        waiting = self._waiting.lanes(level)
        held: Counter[str] = Counter()
        if len(waiting) > 1:
            for request in self._running:
                held[request.tenant] += request.num_rows
        requests = {tenant: iter(lane) for tenant, lane in waiting.items()}
        line = [
            (held[tenant], self._last_start.get(tenant, 0), lane[0].rank, tenant)
            for tenant, lane in waiting.items()
        ]
        heapq.heapify(line)
        while line and draft.rows:
            rows, last_start, rank, tenant = heapq.heappop(line)
            computing = lanes.get(tenant)
            if computing is not None and computing.pending >= draft.budget:
                continue
            first = next(requests[tenant], None)
            if first is not None:
                heapq.heappush(line, (rows + first.num_rows, last_start, rank, tenant))
                yield first

    def _look_up(self, draft: Draft, request: Request) -> bool:
        """Find what is cached of a prompt; False if another row computes its next block already."""
        shared = self.hits(request)
        draft.found[request] = shared
        key = self._key_at(
            request, request.num_computed_tokens + len(shared) * self._pool.block_size
        )
        return key is None or draft.leading.setdefault(key, request) is request

    def _advance(self, draft: Draft, lane: _Lane, allowance: int) -> int:
        """Give up to `allowance` tokens to the first prompt that can go on; 0: there is none."""
        while True:
            if lane.row is not None:
                taken = draft.extend(lane.row, allowance)
                if taken:
                    return taken
                lane.row = None
            request = lane.next()
            if request is None:
                return 0
            lane.row = self._open(draft, request)

    def _open(self, draft: Draft, request: Request) -> int | None:
        """Open a row for a prompt; None if it cannot go on in this step."""
        shared = draft.found[request]
        block_size = self._pool.block_size
        num_past = request.num_computed_tokens + len(shared) * block_size
        if request.running:
            key = self._key_at(request, num_past)
            if key is not None and draft.leading[key] is not request:
                return None
            is_full = num_past == (len(request.table) + len(shared)) * block_size
            if draft.num_taken(shared) + is_full > draft.free:
                return None
            draft.take(shared)
            draft.claimed -= len(shared)
        return draft.open(request, num_past, shared)

    def _key_at(self, request: Request, num_past: int) -> bytes | None:
        """The key of the block that token number `num_past` goes to, if it is going to be full."""
        index = num_past // self._pool.block_size
        keys = request.keys
        return keys.key(index) if keys is not None and index < len(keys) else None

    # Changing.

    def _start(self, request: Request) -> None:
        self._waiting.remove(request)
        self._leave_queue(request)
        request.running = True
        self._running.add(request)
        self._num_rows += request.num_rows
        self._last_start[request.tenant] = next(self._starts)

    def _preempt(self, request: Request) -> None:
        if request.keys is not None:
            full = request.num_computed_tokens // self._pool.block_size
            self._swapped.update(request.keys.key(index) for index in range(full))
        release_tail(self._pool, request.table)
        self._running.remove(request)
        self._num_rows -= request.num_rows
        request.running = False
        request.forked = False
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.add(request)
        self.num_preemptions += 1

    def _leave_queue(self, request: Request) -> None:
        """A waiting request starts, goes on or ends: its blocks are like all others."""
        if not request.num_preemptions:
            self._queued[request.tenant] -= 1
        elif request.keys is not None:
            self._swapped.difference_update(map(request.keys.key, range(len(request.keys))))

    def _note_hits(self, request: Request, num_past: int) -> None:
        """Count what the prefix cache was asked for and found, at a request's first attempt."""
        if request.num_preemptions or request.keys is None:
            return
        if not request.running:
            self.num_looked_up += len(request.tokens)
        found = num_past - request.num_computed_tokens
        self.num_found += found
        for one in (request, *request.siblings):
            one.num_cached_tokens += found

    def _register(self, request: Request, start: int, stop: int) -> None:
        """Make blocks `start` to `stop - 1` of a request findable; they are full."""
        keys = request.keys
        assert keys is not None
        if len(keys) < stop:
            keys.extend(request.tokens)
        for index in range(start, stop):
            self._pool.register(request.table.blocks[index], keys.block(index))

    def _fork(self, request: Request) -> None:
        """Let the siblings of a request go on from its prompt."""
        siblings, request.siblings = request.siblings, ()
        request.forked = True
        for one in siblings:
            one.table = kv.fork(self._pool, request.table)
            one.keys = None if request.keys is None else request.keys.copy()
            one.num_computed_tokens = request.num_computed_tokens
            one.forked = True
            one.running = True
            self._running.add(one)

    def _shares_of(self, level: int) -> Shares:
        return self._shares.get(level) or Shares(self._quantum)

    def _forget_tenant(self, tenant: str) -> None:
        del self._queued[tenant]
        self._last_start.pop(tenant, None)
        for level, shares in list(self._shares.items()):
            shares.forget(tenant)
            if shares.empty:
                del self._shares[level]

    def _settle(self, plan: StepPlan) -> None:
        """Keep the tenants' turns, and charge who decoded while somebody else waited."""
        for level, turns in plan.turns.items():
            self._shares.setdefault(level, Shares(self._quantum)).commit(turns)
        decodes = Counter(
            (request.rank[0], request.tenant) for request in plan.requests[: plan.num_decodes]
        )
        for (level, tenant), num_tokens in decodes.items():
            lanes = self._waiting.lanes(level)
            if len(lanes) > (tenant in lanes):
                shares = self._shares.setdefault(level, Shares(self._quantum))
                shares.charge(tenant, num_tokens)
