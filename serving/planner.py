"""Planning: which requests compute how many tokens in the next step. Nothing is changed here.

The policy:

* One rule, `num_new = num_tokens - num_computed_tokens`, covers prefill, chunked prefill, prefix
  hits, decoding and starting over after a preemption.
* Running requests that need a single token come first: every one of them, in every step. What is
  left of the token budget goes to prompts: by priority, then tenant by tenant in turns, then by
  deadline, then in the order of arrival; under "fcfs" in the order of arrival alone. As every
  running request holds one of `max_num_seqs` rows, prompts get at least `max_num_batched_tokens -
  max_num_seqs + 1` tokens a step. A row that is free goes to the tenant of the highest priority
  that holds the fewest.
* Whatever is in the cache is not computed. What another row is computing in this step is not
  computed either: a request whose next block is on its way lets this step pass, and finds it in
  the next one. Nothing links the two requests: if the first one is gone, the second goes on.
* What is left of the budget and of the blocks when everybody has got theirs may go to drafts:
  tokens that are guessed to follow those of a row that decodes. They cost nobody anything but time.
* A waiting request starts when free blocks hold all its tokens beside what prompts that have begun
  have still to take, so blocks run out only by decoding. Of layers with a window all is what the
  window sees: what is behind it is given up after each step. A request that has to wait for room
  keeps all that come after it waiting too.
* The beams of a search start and yield together: what each of them needs next is known only when
  all have been computed as far.
* When blocks run out, the newest of the lowest-priority running requests yields: its blocks are
  released, its tokens kept, and it waits to go on. Running requests of a lower priority also
  yield to the first waiting request that may start, when that makes room for it beside what those
  ahead of it keep. The first in rank never yields and, as `submit` accepts only what fits the whole
  pool, always gets on.

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
from collections.abc import Collection, Iterator, Mapping, Sequence

from onnxport.kv.pool import BlockPool
from onnxport.kv.table import NOTHING, Found
from onnxport.serving.beams import BeamGroup
from onnxport.serving.draft import Draft, Guess, StepPlan
from onnxport.serving.queues import Queues
from onnxport.serving.request import Request


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


def _together(victim: Request) -> Sequence[Request]:
    """Return who yields with a running request: all beams of a search do, or none."""
    return (victim,) if victim.beams is None else victim.beams.running


class Planner:
    """Chooses steps."""

    def __init__(
        self, pool: BlockPool, queues: Queues, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        """Look at a pool and queues that somebody else changes."""
        self._pool = pool
        self._queues = queues
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def next_in_line(self) -> Iterator[Request]:
        """The waiting requests that rows are free for, more or less in the order of their start.

        Those that are barred from starting are left out.
        """
        rows = self._max_num_seqs - self._queues.num_rows
        for request in self._queues.waiting.startable(self._queues.bars):
            rows -= request.num_rows
            if rows < 0:
                break
            yield request

    def hits(self, request: Request) -> Found:
        """The cached blocks that hold the next tokens of `request`.

        At least one token is left to compute: the next one is sampled from its logits.
        """
        keys, groups, find = request.keys, self._pool.groups, self._pool.find
        if keys is None:
            return NOTHING
        columns = self.columns_ahead(request)
        end = groups.reach(columns, lambda column, group: find(keys.key(column), group) is not None)
        if end == columns.start:
            return NOTHING
        found = []
        for group in range(len(groups)):
            needed = groups.needed(group, columns.start, end)
            blocks = [find(keys.key(column), group) for column in needed]
            found.append(tuple([block for block in blocks if block is not None]))
        return Found(end - columns.start, tuple(found))

    def columns_ahead(self, request: Request) -> range:
        """The columns of a request that it would go on from if they were cached."""
        block_size = self._pool.block_size
        start, partial = divmod(request.num_computed_tokens, block_size)
        if request.keys is None or partial or request.params.skip_reading_prefix_cache:
            return range(start, start)
        return range(start, min(len(request.keys), (len(request.tokens) - 1) // block_size))

    def plan(
        self,
        only: Collection[Request] | None = None,
        loading: Collection[Request] = (),
        budget_tokens: int | None = None,
        guess: Guess | None = None,
    ) -> StepPlan:
        """Choose the next step; changes nothing. No requests: there is nothing to do.

        Args:
            only: requests that may take part; None for all.
            loading: waiting requests whose K/V are on their way from elsewhere; they keep their
                place and do not start.
            budget_tokens: most tokens, at least one for each request that may take part and can
                decode; None for `max_num_batched_tokens`.
            guess: asked for tokens that may follow those of the requests that decode, when it is
                known which do and what is left for them; None: nobody.
        """
        budget = budget_tokens or self._max_num_batched_tokens
        draft = self._make_room(loading, budget) if only is None else self._draft(budget)
        self._fill(draft, only, loading)
        if draft.yielding and not draft.requests:  # another one's turn was before, and has no room
            draft = self._draft(budget)
            self._fill(draft, only, loading)
        if guess is not None and draft.num_decodes and draft.budget:
            drafts = guess(draft.requests[: draft.num_decodes], draft.budget)
            for row in range(draft.num_decodes):
                if guessed := drafts.get(draft.requests[row]):
                    draft.add_draft(row, guessed)
        stuck = not draft.requests and self._queues.has_work and only is None and not loading
        assert not stuck, "unfinished requests, and none can go on"
        return draft.freeze()

    def _fill(
        self, draft: Draft, only: Collection[Request] | None, loading: Collection[Request]
    ) -> None:
        """Plan what is to be computed, without drafts."""
        prefills = self._plan_decodes(draft, only)
        if prefills or self._queues.waiting:
            self._plan_prompts(draft, prefills, only, loading)

    def _draft(self, budget: int) -> Draft:
        rows = self._max_num_seqs - self._queues.num_rows
        return Draft(self._pool, budget, rows)

    def _make_room(self, loading: Collection[Request], budget: int) -> Draft:
        """Begin a plan: lower priorities yield to the first waiting request if that lets it start.

        The first is the first that may start now. They yield for as little as possible, and not at
        all if it does not help, as where others whose turn may come before keep their room
        meanwhile.
        """
        draft = self._draft(budget)
        first = self._first_to_start(loading)
        if first is None:
            return draft
        shared = self.hits(first)
        needed = self._needed(draft, first, shared)
        running = self._queues.running
        claimed = sum(self._claim(draft, one) + self._takes(one) for one in running)
        others = [one for one in loading if self._may_precede(one, first)]
        claimed += sum(draft.pending(one) for one in others)
        rows = first.num_rows + sum(one.num_rows for one in others)
        for victim in reversed(running):
            if victim in draft.yielding:  # with a beam beside it
                continue
            room = draft.free - draft.num_taken(shared) - claimed
            if draft.rows >= rows and room >= needed:
                return draft
            if victim.rank[0] <= first.rank[0]:
                return self._draft(budget)
            for one in _together(victim):
                draft.preempt(one)
                claimed -= self._claim(draft, one) + self._takes(one)
        room = draft.free - draft.num_taken(shared) - claimed
        return draft if draft.rows >= rows and room >= needed else self._draft(budget)

    def _needed(self, draft: Draft, request: Request, shared: Found) -> int:
        """How many blocks must be left for a waiting request to start, beside those it shares.

        Beams that have yielded should not do so again as soon as they part.
        """
        needed = draft.pending(request, shared)
        if request.beams is None or not request.beams.behind:
            return needed
        more = request.beams.columns_behind(self._pool.block_size) * len(self._pool.groups)
        most = self._pool.num_blocks - draft.num_taken(shared)
        return max(needed, min(needed + more, most))

    def _first_to_start(self, loading: Collection[Request]) -> Request | None:
        """The first waiting request that may start, if any running one has a lower priority."""
        running, waiting = self._queues.running, self._queues.waiting
        if not running or not waiting or running[-1].rank[0] <= waiting.levels[0]:
            return None
        first = waiting.first(self._queues.bars, loading)
        return first if first is not None and running[-1].rank[0] > first.rank[0] else None

    def _may_precede(self, loading: Request, first: Request) -> bool:
        """Whether a request that keeps its room may take it ahead of the first that may start."""
        if loading.rank[0] == first.rank[0] and loading.tenant != first.tenant:
            return True
        place = self._queues.waiting.place
        return place(loading) < place(first)

    def _claim(self, draft: Draft, request: Request) -> int:
        """How many blocks a running prompt has still to take; 0 for one that decodes."""
        decodes = len(request.tokens) - request.num_computed_tokens <= 1
        return 0 if decodes else draft.pending(request)

    def _takes(self, request: Request) -> int:
        """How many blocks a running request takes now if it decodes: a column if its are full."""
        decodes = len(request.tokens) - request.num_computed_tokens == 1
        is_full = request.num_computed_tokens == len(request.table) * self._pool.block_size
        return len(self._pool.groups) if decodes and is_full else 0

    def _plan_decodes(self, draft: Draft, only: Collection[Request] | None) -> list[Request]:
        """Plan the running requests that need one token; returns the others.

        Blocks that are missing come from the last in rank, which may be the very one that needs
        them.
        """
        block_size, column = self._pool.block_size, len(self._pool.groups)
        prefills: list[Request] = []
        last_first = reversed(self._queues.running)
        beams: BeamGroup | None = None  # whose rows there is room for
        for request in self._queues.running:
            num_past = request.num_computed_tokens
            if len(request.tokens) - num_past > 1:
                prefills.append(request)
                continue
            if only is not None and request not in only:
                continue
            if num_past == len(request.tokens):  # it waits for the other beams
                continue
            if request.beams is not None and request.beams is not beams:
                beams = request.beams
                self._make_room_for_beams(draft, beams, last_first, only)
            blocks = request.table.blocks
            missing = int(num_past == len(blocks) * block_size)
            copies = request.forked and not missing and draft.must_copy(blocks[-1])
            while (missing + copies) * column > draft.free and request not in draft.yielding:
                draft.closed = True
                victim = next(last_first)
                if victim not in draft.yielding:
                    for one in _together(victim):
                        draft.preempt(one)
                    copies = copies and draft.must_copy(blocks[-1])
            if draft.yielding and request in draft.yielding:
                break  # all that follow are behind it, so they have yielded too
            draft.add_decode(request, missing + copies, copies=copies)
        return [request for request in prefills if request not in draft.yielding]

    def _make_room_for_beams(
        self,
        draft: Draft,
        beams: BeamGroup,
        last_first: Iterator[Request],
        only: Collection[Request] | None,
    ) -> None:
        """Let others yield until all beams of a search find blocks; it may yield itself."""
        due = [
            one
            for one in beams.running
            if len(one.tokens) - one.num_computed_tokens == 1 and (only is None or one in only)
        ]
        column = len(self._pool.groups)
        while draft.columns_for(due) * column > draft.free and due[0] not in draft.yielding:
            draft.closed = True
            victim = next(last_first)
            if victim not in draft.yielding:
                for one in _together(victim):
                    draft.preempt(one)

    def _plan_prompts(
        self,
        draft: Draft,
        prefills: list[Request],
        only: Collection[Request] | None,
        loading: Collection[Request],
    ) -> None:
        """Share what is left of the budget between running prompts and waiting ones."""
        draft.claimed = sum(self._claim(draft, request) for request in prefills)
        if only is not None:
            prefills = [request for request in prefills if request in only]
        for request in prefills:
            self._look_up(draft, request)
        starting = len(self._queues.waiting) > 0 and not draft.closed and draft.rows > 0
        levels = {request.rank[0] for request in prefills}
        for level in sorted(levels.union(self._queues.waiting.levels if starting else ())):
            lanes: dict[str, _Lane] = {}
            for request in prefills:
                if request.rank[0] == level:
                    num_cached = len(draft.found[request]) * self._pool.block_size
                    lanes.setdefault(request.tenant, _Lane()).add(request, num_cached)
            if starting and draft.budget:
                self._admit(draft, level, lanes, only, loading)
            turns = self._queues.shares_of(level).turns(lanes)
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
            if request in loading:
                draft.claimed += draft.pending(request)  # what is loaded is free until it starts
            if request in loading or not self._look_up(draft, request):
                draft.rows -= request.num_rows  # the next steps keep them for it
                continue
            shared = draft.found[request]
            needed = self._needed(draft, request, shared)
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
        waiting = self._queues.waiting.lanes(level)
        held: Counter[str] = Counter()
        if len(waiting) > 1:
            for request in self._queues.running:
                held[request.tenant] += request.num_rows
        requests = {tenant: lane.startable(self._queues.bars) for tenant, lane in waiting.items()}
        line = [
            (held[tenant], self._queues.last_start.get(tenant, 0), lane.first().rank, tenant)
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
        block_size, groups = self._pool.block_size, self._pool.groups
        num_past = request.num_computed_tokens + len(shared) * block_size
        if request.running:
            key = self._key_at(request, num_past)
            if key is not None and draft.leading[key] is not request:
                return None
            is_full = num_past == (len(request.table) + len(shared)) * block_size
            if draft.num_taken(shared) + is_full * len(groups) > draft.free:
                if not shared or not groups.windowed or len(groups) > draft.free:
                    return None
                # All of it at once may be more than the pool has, where windows see but a part.
                shared, num_past = NOTHING, request.num_computed_tokens
            before = draft.pending(request)
            draft.take(shared)
            draft.claimed += draft.pending(request, shared) - before
        elif len(groups) > draft.free:  # for this step others have taken more than they keep
            return None
        return draft.open(request, num_past, shared)

    def _key_at(self, request: Request, num_past: int) -> bytes | None:
        """The key of the block that token number `num_past` goes to, if it is going to be full.

        None of a request that would not read it either: it has no reason to wait for it.
        """
        if request.params.skip_reading_prefix_cache:
            return None
        index = num_past // self._pool.block_size
        keys = request.keys
        return keys.key(index) if keys is not None and index < len(keys) else None
