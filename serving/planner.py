"""Planning: which requests compute how many tokens in the next step. Nothing is changed here.

The policy:

* One rule, `num_new = num_tokens - num_computed_tokens`, covers prefill, chunked prefill, prefix
  hits, decoding and starting over after a preemption.
* Running requests that need a single token come first: every one of them, in every step. What is
  left of the token budget goes to prompts: by priority, then tenant by tenant in turns, then by
  deadline, then in the order of arrival; under "fcfs" in the order of arrival alone. As every
  running request holds one of `max_num_seqs` rows, prompts get at least `max_num_batched_tokens -
  max_num_seqs + 1` tokens a step; where the model has states, less what wrong guesses of the step
  before made due again, which had what prompts left then. A row that is free goes to the tenant of
  the highest priority that holds the fewest.
* Whatever is in the cache is not computed. What another row is computing in this step is not
  computed either: a request whose next block is on its way lets this step pass, and finds it in
  the next one. Of requests with one next block that of the highest priority computes it. Nothing
  links the two requests: if the first one is gone, the second goes on.
* What is left of the budget and of the blocks when everybody has got theirs may go to drafts:
  tokens that are guessed to follow those of a row that decodes. They cost nobody anything but time.
* Where a model has states and guesses proved wrong, a request computes what it owes
  (`Request.num_owed_tokens`) with its next token, before prompts get theirs.
* A waiting request starts when free blocks hold all its tokens beside what prompts that have begun
  have still to take, so blocks run out only by decoding. Of layers with a window all is what the
  window sees: what is behind it is given up after each step. A request that has to wait for room
  keeps all that come after it waiting too.
* Where a model has states, a prompt stops for a step where its state is worth keeping
  (`Hits.stops`). What is in the cache ends at such a state. A prompt that begins as another one
  does which is being computed waits for it if that spares it enough (`hits.LEAST_SHARED`), and
  more than it costs (`hits.COST_OF_SHORT_STEP`), and that one stops where the two part. Nothing
  links them here, either: whoever comes first in the next plan computes what they have in common,
  so nobody waits for one that is gone or has passed by.
* A prompt stops for a step where its adapter begins to act (`Request.adapter_start`): a row has one
  slot for all of its tokens.
* The beams of a search start and yield together: what each of them needs next is known only when
  all have been computed as far.
* When blocks run out, the newest of the lowest-priority running requests yields: its blocks are
  released, its tokens kept, and it waits to go on. Running requests of a lower priority also
  yield to waiting ones that may start, in the order in which these take rows, when that makes room
  for them beside what those ahead of them keep (`serving/room.py`). Nobody yields to one that does
  not get its row in that step; its first tokens wait for its tenant's turn. The first in rank never
  yields and, as `submit` accepts only what fits the whole pool, always gets on.

What follows, for requests of one priority while nobody is preempted, with B tokens a step and R
rows. A running request gets a token every step, and no step has more than B tokens. From when a row
and blocks are free, and with P tokens of prompts ahead, a prompt of L tokens is computed after at
most (P + L) / (B - R + 1) steps, rounded up; each prompt ahead that begins with the same block may
cost one step more, and each stop of a prompt at a state. Under "fair", for a tenant that owes
nothing, P counts at most one quantum of every other tenant for each quantum, or part of one, of its
own prompt; and a tenant that holds no row gets the next one that becomes free, after those that
hold none either and began to wait before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Final

from onnxport.kv.pool import BlockPool
from onnxport.kv.states import StatePool
from onnxport.kv.table import NOTHING
from onnxport.serving.beams import BeamGroup, together
from onnxport.serving.draft import Draft
from onnxport.serving.hits import Hits
from onnxport.serving.line import in_line
from onnxport.serving.queues import Queues
from onnxport.serving.request import Request
from onnxport.serving.room import NO_ROOM, Room, RoomMaker
from onnxport.serving.step_plan import Guess, StepPlan

# Waiting requests that a plan looks at to let prompts stop for them, though they do not start in
# it: about as many as the next step or two may reach.
MOST_FORESEEN: Final = 64


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

    def fills(self, draft: Draft) -> bool:
        """Whether they can use up what is left of the budget, though they end at their stops."""
        if self.pending < draft.budget:
            return False
        return sum(draft.chunk(request) for request in self._requests) >= draft.budget

    def next(self) -> Request | None:
        """The next prompt, each once."""
        if self._next == len(self._requests):
            return None
        self._next += 1
        return self._requests[self._next - 1]


class Planner:
    """Chooses steps."""

    def __init__(
        self,
        pool: BlockPool,
        queues: Queues,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        states: StatePool | None = None,
    ) -> None:
        """Look at pools and queues that somebody else changes."""
        self._pool = pool
        self._queues = queues
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._hits = Hits(pool, states)
        self._rooms = RoomMaker(pool, queues, self._hits)

    @property
    def hits(self) -> Hits:
        """What looks up which blocks of requests are cached."""
        return self._hits

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
        draft = self._choose(budget, only, loading)
        if guess is not None and draft.num_decodes and draft.budget:
            drafts = guess(draft.due(), draft.budget)
            for row in range(draft.num_decodes):
                if guessed := drafts.get(draft.requests[row]):
                    draft.add_draft(row, guessed)
        stuck = not draft.requests and self._queues.has_work and only is None and not loading
        assert not stuck, "unfinished requests, and none can go on"
        return draft.freeze()

    def _choose(
        self, budget: int, only: Collection[Request] | None, loading: Collection[Request]
    ) -> Draft:
        """Plan what is to be computed, and who yields for it, without drafts."""
        if only is not None:
            return self._fill(budget, NO_ROOM, only, loading)
        room = self._rooms.room(self._draft(budget), loading)
        draft = self._fill(budget, room, None, loading)
        while room.yielding and not draft.starting.issuperset(room.starting):
            # Something else keeps some of them from it, as few tokens: nobody yields in vain.
            most = sum(request in draft.starting for request in room.starting)
            room = self._rooms.room(self._draft(budget), loading, most) if most else NO_ROOM
            draft = self._fill(budget, room, None, loading)
        return draft

    def _fill(
        self,
        budget: int,
        room: Room,
        only: Collection[Request] | None,
        loading: Collection[Request],
    ) -> Draft:
        """Plan what is to be computed once some have yielded."""
        draft = self._draft(budget)
        for request in room.yielding:
            draft.preempt(request)
        prefills = self._plan_decodes(draft, only)
        if prefills or self._queues.waiting:
            self._plan_prompts(draft, prefills, only, loading)
        return draft

    def _draft(self, budget: int) -> Draft:
        rows = self._max_num_seqs - self._queues.num_rows
        return Draft(self._pool, budget, rows)

    def _plan_decodes(self, draft: Draft, only: Collection[Request] | None) -> list[Request]:
        """Plan the running requests that need one token, and what they owe; returns the others.

        Blocks that are missing come from the last in rank, which may be the very one that needs
        them. What is owed gets what the budget has beside a token for each running request; where
        that is too little, some of it has to wait for the next step.
        """
        block_size, column = self._pool.block_size, len(self._pool.groups)
        prefills: list[Request] = []
        spare = max(0, draft.budget - len(self._queues.running if only is None else only))
        last_first = reversed(self._queues.running)
        beams: BeamGroup | None = None  # whose rows there is room for
        for request in self._queues.running:
            num_past = request.num_computed_tokens
            num_new = len(request.tokens) - num_past
            if num_new > 1 + request.num_owed_tokens:
                prefills.append(request)
                continue
            if only is not None and request not in only:
                continue
            if not num_new:  # it waits for the other beams
                continue
            if request.beams is not None and request.beams is not beams:
                beams = request.beams
                self._make_room_for_beams(draft, beams, last_first, only)
            blocks = request.table.blocks
            is_full = num_past == len(blocks) * block_size
            missing = int(is_full)
            if num_new > 1:
                num_new = min(num_new, 1 + spare)
                spare -= num_new - 1
                missing = draft.missing(request, num_past + num_new)
            copies = request.forked and not is_full and draft.must_copy(blocks[-1])
            while (missing + copies) * column > draft.free and request not in draft.yielding:
                draft.closed = True
                victim = next(last_first)
                if victim not in draft.yielding:
                    for one in together(victim):
                        draft.preempt(one)
                    copies = copies and draft.must_copy(blocks[-1])
            if draft.yielding and request in draft.yielding:
                break  # all that follow are behind it, so they have yielded too
            draft.add_decode(request, missing + copies, copies=copies, num_new=num_new)
        return [request for request in prefills if request not in draft.yielding]

    def _make_room_for_beams(
        self,
        draft: Draft,
        beams: BeamGroup,
        last_first: Iterator[Request],
        only: Collection[Request] | None,
    ) -> None:
        """Let others yield until all beams of a search find blocks; it may yield itself."""
        due = [one for one in beams.running if one.decodes and (only is None or one in only)]
        column = len(self._pool.groups)
        while draft.columns_for(due) * column > draft.free and due[0] not in draft.yielding:
            draft.closed = True
            victim = next(last_first)
            if victim not in draft.yielding:
                for one in together(victim):
                    draft.preempt(one)

    def _plan_prompts(
        self,
        draft: Draft,
        prefills: list[Request],
        only: Collection[Request] | None,
        loading: Collection[Request],
    ) -> None:
        """Share what is left of the budget between running prompts and waiting ones."""
        draft.claimed = sum(draft.claim(request) for request in prefills)
        draft.prompt_budget = max(1, draft.budget)
        if only is not None:
            prefills = [request for request in prefills if request in only]
        starting = len(self._queues.waiting) > 0 and not draft.closed and draft.rows > 0
        levels = {request.rank[0] for request in prefills}
        for level in sorted(levels.union(self._queues.waiting.levels if starting else ())):
            lanes: dict[str, _Lane] = {}
            for request in prefills:
                if request.rank[0] == level:
                    self._hits.look_up(draft, request)
                    num_cached = len(draft.found[request]) * self._pool.block_size
                    lanes.setdefault(request.tenant, _Lane()).add(request, num_cached)
            if starting and draft.budget:
                self._admit(draft, level, lanes, only, loading)
            if only is None:
                self._foresee(draft, level)
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

        def is_busy(tenant: str) -> bool:
            if tenant not in lanes or not lanes[tenant].fills(draft):
                return False
            if only is None:  # where they stop for others, more of these may start
                self._foresee(draft, level)
            return lanes[tenant].fills(draft)

        for request in in_line(self._queues, level, is_busy):
            if draft.closed or not draft.rows:
                break
            if only is not None and request not in only:
                continue
            if request.num_rows > draft.rows:
                draft.closed = True
                break
            if request in loading:
                draft.claimed += draft.pending(request)  # what is loaded is free until it starts
            if request in loading or not self._hits.look_up(draft, request):
                draft.rows -= request.num_rows  # the next steps keep them for it
                continue
            shared = draft.found[request]
            needed = draft.needed(request, shared)
            if draft.num_taken(shared) + needed > draft.free - draft.claimed:
                self._hits.withdraw(draft, request)
                draft.closed = True
                break
            draft.take(shared)
            draft.claimed += needed
            draft.rows -= request.num_rows
            draft.starting.add(request)
            num_cached = len(shared) * self._pool.block_size
            lanes.setdefault(request.tenant, _Lane()).add(request, num_cached)

    def _foresee(self, draft: Draft, level: int) -> None:
        """Let prompts stop for waiting ones of their priority, or of one before it."""
        if not draft.ahead or not draft.budget:
            return
        if draft.upcoming is None:
            unseen = (one for one in self.next_in_line() if one not in draft.found)
            draft.upcoming = deque(islice(unseen, MOST_FORESEEN))
        seen: list[Request] = []
        while draft.upcoming and draft.upcoming[0].rank[0] <= level:
            seen.append(draft.upcoming.popleft())
        if seen:
            self._hits.foresee(draft, [one for one in seen if one not in draft.found])

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
            key = self._hits.key_at(request, num_past)
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
