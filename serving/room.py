"""Who yields: running requests of lower priorities, to waiting ones that start in their place."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from onnxport.kv.pool import BlockPool
from onnxport.serving.beams import together
from onnxport.serving.draft import Draft
from onnxport.serving.hits import Hits
from onnxport.serving.line import in_line
from onnxport.serving.queues import Queues
from onnxport.serving.request import Request


@dataclass(frozen=True, slots=True)
class Room:
    """Who yields, and who is to start then."""

    yielding: tuple[Request, ...] = ()  # the last in rank first
    starting: tuple[Request, ...] = ()  # in the order in which they take rows


NO_ROOM = Room()


class RoomMaker:
    """Chooses who yields. Nothing is changed by it."""

    __slots__ = ("_hits", "_pool", "_queues")

    def __init__(self, pool: BlockPool, queues: Queues, hits: Hits) -> None:
        """Look at a pool and queues that somebody else changes."""
        self._pool = pool
        self._queues = queues
        self._hits = hits

    def room(self, draft: Draft, loading: Collection[Request], most: int | None = None) -> Room:
        """Choose who yields to waiting requests of higher priorities, so that these may start.

        These are taken as `Planner` admits them: in the order in which they take rows, up to the
        first that has to wait. Others yield for as little as possible, and not at all to one that
        would have to wait all the same.

        Args:
            draft: an empty one, which is used up.
            loading: waiting requests that keep their place, and room for it, and do not start.
            most: how many are to start at most; None: any number.
        """
        running, waiting = self._queues.running, self._queues.waiting
        if not running or not waiting or running[-1].rank[0] <= waiting.levels[0]:
            return NO_ROOM
        counts = _Counts(self._pool, self._hits, draft, running, self._queues.quantum)
        num_yielding = 0
        starting: list[Request] = []
        for request in self._line(counts):
            if len(starting) == most or not self._may_yield(draft, request):
                break
            if request in loading:
                counts.keep(request)
            elif not self._hits.look_up(draft, request):
                if not counts.keep_rows(request):
                    break
            else:
                while not counts.fits(request) and self._may_yield(draft, request):
                    counts.yields(running[-1 - len(draft.preempted)])
                if not counts.fits(request):
                    break
                counts.start(request)
                starting.append(request)
                num_yielding = len(draft.preempted)
        return Room(tuple(draft.preempted[:num_yielding]), tuple(starting))

    def _line(self, counts: _Counts) -> Iterator[Request]:
        """The waiting requests in the order in which they may take rows, as tokens are left."""
        for level in self._queues.waiting.levels:
            counts.begin(level)
            if not counts.has_tokens():
                return
            yield from in_line(self._queues, level, lambda tenant: not counts.has_tokens(tenant))

    def _may_yield(self, draft: Draft, request: Request) -> bool:
        """Whether anybody is left who may yield to a request."""
        running, num_yielding = self._queues.running, len(draft.preempted)
        return num_yielding < len(running) and running[-1 - num_yielding].rank[0] > request.rank[0]


class _Counts:
    """What running requests and those in line take of a draft's rows, blocks and tokens."""

    __slots__ = (
        "_block_size",
        "_claimed",
        "_column",
        "_decoding",
        "_draft",
        "_hits",
        "_quantum",
        "_rows",
        "_running",
        "_shares",
        "_starts",
        "_tenants",
        "_tokens",
    )

    def __init__(
        self,
        pool: BlockPool,
        hits: Hits,
        draft: Draft,
        running: Collection[Request],
        quantum: int,
    ) -> None:
        self._draft = draft
        self._hits = hits
        self._block_size = pool.block_size
        self._column = len(pool.groups)
        self._running = deque(running)  # those of priorities that come later
        self._rows = 0  # that those in line take or keep
        # Running ones by request: sequences of one request copy blocks that they share.
        self._decoding: dict[str, list[Request]] = {}
        for one in running:
            if one.decodes:
                self._decoding.setdefault(one.request_id, []).append(one)
        self._claimed = sum(draft.claim(one) for one in running)
        self._claimed += sum(map(self._takes, self._decoding))
        self._tokens = 0  # that go to decoding and to prompts of higher priorities
        self._tenants: Counter[str] = Counter()  # tokens of each one's prompts of this priority
        self._quantum = quantum
        self._shares = 0  # of these, those of one turn of each
        self._starts = False  # whether anybody of this priority does

    def begin(self, level: int) -> None:
        """Go on with a lower priority; whoever may yield to it is thought to have yielded."""
        self._tokens += self._tenants.total()
        self._tenants.clear()
        self._shares, self._starts = 0, False
        while self._running and self._running[0].rank[0] <= level:
            request = self._running.popleft()
            if request in self._draft.yielding:
                continue
            num_left = len(request.tokens) - request.num_computed_tokens
            if num_left <= 1 + request.num_owed_tokens:  # 0: it waits for other beams
                self._tokens += num_left
                continue
            self._hits.look_up(self._draft, request)
            if request.rank[0] == level:
                self._add(request)
            else:
                self._tokens += self._num_left(request)

    def has_tokens(self, tenant: str | None = None) -> bool:
        """Whether tokens are left, for one more prompt of a tenant if one is named.

        Turns of others leave none where they are enough for the step, but to the first in line: who
        has prompts all the time would keep it from starting.
        """
        if tenant is None:
            return self._tokens < self._draft.budget
        taken = self._tenants[tenant]
        if self._starts:
            turn = min(self._quantum, taken)
            taken = max(taken, self._shares - turn)
        return self._tokens + taken < self._draft.budget

    def keep(self, request: Request) -> None:
        """Keep rows and blocks for a request that does not start yet."""
        self._rows += request.num_rows
        self._claimed += self._draft.pending(request)

    def keep_rows(self, request: Request) -> bool:
        """Keep rows for one that waits for a block which another one computes, if they are free."""
        self._rows += request.num_rows
        return self._rows <= self._draft.rows

    def fits(self, request: Request) -> bool:
        """Whether there is room for a request beside what is counted."""
        draft, shared = self._draft, self._draft.found[request]
        needed = self._claimed + draft.num_taken(shared) + draft.needed(request, shared)
        return self._rows + request.num_rows <= draft.rows and needed <= draft.free

    def start(self, request: Request) -> None:
        """Give a request its room."""
        shared = self._draft.found[request]
        self._rows += request.num_rows
        self._claimed += self._draft.needed(request, shared)
        self._draft.take(shared)
        self._add(request)
        self._starts = True

    def yields(self, request: Request) -> None:
        """Let a running request yield, and the beams beside it, which are next to it in rank."""
        name, draft = request.request_id, self._draft
        before = self._takes(name)
        for one in together(request):
            self._claimed -= draft.claim(one)
            draft.preempt(one)
        decoding = self._decoding.get(name, ())
        self._decoding[name] = [one for one in decoding if one not in draft.yielding]
        self._claimed += self._takes(name) - before

    def _add(self, request: Request) -> None:
        """Count what a prompt of this priority has to compute."""
        before = self._tenants[request.tenant]
        after = self._tenants[request.tenant] = before + self._num_left(request)
        self._shares += min(self._quantum, after) - min(self._quantum, before)

    def _num_left(self, request: Request) -> int:
        """How many tokens of a prompt are to compute."""
        num_cached = len(self._draft.found[request]) * self._block_size
        return len(request.tokens) - request.num_computed_tokens - num_cached

    def _takes(self, name: str) -> int:
        """How many blocks the sequences of a request that decode take now, copies included."""
        return self._draft.columns_for(self._decoding.get(name, ())) * self._column
