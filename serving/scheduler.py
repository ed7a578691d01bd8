"""Continuous batching: which requests compute how many tokens in the next step.

A step is a transaction. `plan` looks and changes nothing; `reserve` takes the blocks; then comes
`commit`, or `rollback`, after which no request has computed anything and no block is held for it.

The policy:

* One rule, `num_new = num_tokens - num_computed_tokens`, covers prefill, chunked prefill,
  decoding and starting over after a preemption.
* Requests that need a single token go first, oldest first; what is left of the token budget goes
  to the longer ones, oldest first, and then to waiting requests, in the order of arrival. As
  every running request holds one of `max_num_seqs` rows, a prefill always gets at least
  `max_num_batched_tokens - max_num_seqs + 1` tokens a step: decoding cannot starve it.
* A waiting request is admitted when free blocks hold all its tokens beside what the running
  prefills have still to take, so blocks run out only by decoding.
* When they do, the newest running request is preempted: its blocks are released, its tokens kept,
  and it waits, before all others, to compute them again. The oldest running request is never
  preempted and, as `submit` accepts only what fits the whole pool, always gets on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from onnxport.kv.pool import BlockPool
from onnxport.kv.table import Reservation, blocks_for, release_tail, reserve, rollback
from onnxport.serving.outputs import FinishReason
from onnxport.serving.request import Request


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does; row `i` of the batch is `requests[i]`."""

    requests: tuple[Request, ...]
    num_past: tuple[int, ...]  # tokens of each row that are in the cache already
    num_new: tuple[int, ...]  # tokens of each row to compute, >= 1
    num_new_blocks: tuple[int, ...]  # blocks each row takes for them
    sampled: tuple[int, ...]  # rows that reach their last token, and so sample the next one
    preempted: tuple[Request, ...]  # running requests that give their blocks back, newest first

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_new)


class _Draft:
    """A plan being made: columns that grow and numbers that count down; no request is touched."""

    __slots__ = ("budget", "free", "num_new", "num_new_blocks", "preempted", "requests", "sampled")

    def __init__(self, budget_tokens: int, free_blocks: int) -> None:
        self.budget = budget_tokens
        self.free = free_blocks
        self.requests: list[Request] = []
        self.num_new: list[int] = []
        self.num_new_blocks: list[int] = []
        self.sampled: list[int] = []
        self.preempted: list[Request] = []

    def add(self, request: Request, num_new: int, num_blocks: int, *, sampled: bool) -> None:
        if sampled:
            self.sampled.append(len(self.requests))
        self.requests.append(request)
        self.num_new.append(num_new)
        self.num_new_blocks.append(num_blocks)
        self.budget -= num_new
        self.free -= num_blocks

    def freeze(self) -> StepPlan:
        return StepPlan(
            requests=tuple(self.requests),
            num_past=tuple([request.num_computed_tokens for request in self.requests]),
            num_new=tuple(self.num_new),
            num_new_blocks=tuple(self.num_new_blocks),
            sampled=tuple(self.sampled),
            preempted=tuple(self.preempted),
        )


def fit_chunk(
    num_past: int, pending: int, budget: int, held_blocks: int, free_blocks: int, block_size: int
) -> int:
    """How many of `pending` tokens fit both the token budget and the blocks, held and free."""
    room = (held_blocks + free_blocks) * block_size - num_past
    return min(pending, budget, room)


class Scheduler:
    """Owns the waiting and the running requests and their blocks."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert 1 <= max_num_seqs <= max_num_batched_tokens
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: OrderedDict[str, Request] = OrderedDict()  # in order of admission
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet, or none any more."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running or self._waiting)

    def requests(self) -> Iterator[Request]:
        """Every unfinished request, the running ones first."""
        yield from self._running.values()
        yield from self._waiting.values()

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of this id."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def submit(self, request: Request) -> None:
        """Queue a request; the caller has checked that the pool can hold it and its id is new."""
        assert self.find(request.request_id) is None, f"{request.request_id} is here already"
        self._waiting[request.request_id] = request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and free its blocks; the one place where requests end."""
        assert request.finish_reason is None, f"{request.request_id} has ended already"
        request.finish_reason = reason
        queue = self._running if request.request_id in self._running else self._waiting
        del queue[request.request_id]
        release_tail(self._pool, request.table)

    def plan(self) -> StepPlan:
        """Choose the next step; changes nothing. No requests: there is nothing to do."""
        draft = _Draft(self._max_num_batched_tokens, self._pool.num_free)
        prefills = self._plan_decodes(draft)
        claimed_blocks = self._plan_prefills(draft, prefills)
        if self._waiting and not draft.preempted:
            self._plan_admissions(draft, claimed_blocks)
        assert draft.requests or not self.has_work, "unfinished requests, and none can go on"
        return draft.freeze()

    def reserve(self, plan: StepPlan) -> Reservation:
        """Preempt as planned and take the step's blocks.

        A preemption stays even if the step is rolled back: others may have overwritten its blocks.
        """
        for request in plan.preempted:
            release_tail(self._pool, request.table)
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            del self._running[request.request_id]
            self._waiting[request.request_id] = request
            self._waiting.move_to_end(request.request_id, last=False)
        self.num_preemptions += len(plan.preempted)
        tables = [request.table for request in plan.requests]
        return reserve(self._pool, tables, plan.num_new_blocks)

    def rollback(self, reservation: Reservation) -> None:
        """Give the step's blocks back; its requests are where they were."""
        rollback(self._pool, reservation)

    def commit(self, plan: StepPlan) -> None:
        """The step's tokens are in the cache now; requests it started are running."""
        for request, num_new in zip(plan.requests, plan.num_new, strict=True):
            if not request.num_computed_tokens and request.request_id in self._waiting:
                self._running[request.request_id] = self._waiting.pop(request.request_id)
            request.num_computed_tokens += num_new

    def check(self) -> None:
        """Assert the invariants of requests and blocks (for tests; linear in everything)."""
        self._pool.check(request.table.blocks for request in self.requests())
        assert len(self._running) <= self._max_num_seqs
        for request in self.requests():
            assert request.finish_reason is None
            assert 0 <= request.num_computed_tokens < len(request.tokens)
            needed = blocks_for(request.num_computed_tokens, self._pool.block_size)
            assert len(request.table) == needed, f"{request.request_id}: {len(request.table)}"
        assert all(not request.num_computed_tokens for request in self._waiting.values())

    def _plan_decodes(self, draft: _Draft) -> list[Request]:
        """Plan the running requests that need one token; returns the others.

        Blocks that are missing come from the newest running request, which may be the very one
        that needs them.
        """
        block_size = self._pool.block_size
        prefills: list[Request] = []
        newest_first = reversed(self._running.values())
        preempted: set[Request] = set()
        for request in self._running.values():
            num_past = request.num_computed_tokens
            if len(request.tokens) - num_past > 1:
                prefills.append(request)
                continue
            missing = int(num_past == len(request.table.blocks) * block_size)
            while missing > draft.free and request not in preempted:
                victim = next(newest_first)
                preempted.add(victim)
                draft.preempted.append(victim)
                draft.free += len(victim.table)
            if preempted and request in preempted:
                break  # all that follow are newer, so they have been preempted too
            draft.add(request, 1, missing, sampled=True)
        return [request for request in prefills if request not in preempted]

    def _plan_prefills(self, draft: _Draft, prefills: list[Request]) -> int:
        """Plan the running requests that need several tokens.

        Returns how many blocks they have still to take after this step. A prefill takes what
        blocks there are and preempts nobody: admission left room for all of it, and what decodes
        have taken of that since, they give back when they end.
        """
        block_size = self._pool.block_size
        claimed_blocks = 0
        for request in prefills:
            num_past = request.num_computed_tokens
            pending = len(request.tokens) - num_past
            held = len(request.table)
            num_new = fit_chunk(num_past, pending, draft.budget, held, draft.free, block_size)
            taken = max(0, blocks_for(num_past + num_new, block_size) - held)
            if num_new:
                draft.add(request, num_new, taken, sampled=num_new == pending)
            claimed_blocks += blocks_for(len(request.tokens), block_size) - held - taken
        return claimed_blocks

    def _plan_admissions(self, draft: _Draft, claimed_blocks: int) -> None:
        """Plan waiting requests, in order, while there are rows, tokens and blocks for them."""
        block_size = self._pool.block_size
        rows = self._max_num_seqs - len(self._running)
        for request in self._waiting.values():
            needed = blocks_for(len(request.tokens), block_size)
            if rows == 0 or draft.budget == 0 or needed > draft.free - claimed_blocks:
                break
            num_new = min(len(request.tokens), draft.budget)  # a part of it takes all that is left
            taken = blocks_for(num_new, block_size)
            draft.add(request, num_new, taken, sampled=num_new == len(request.tokens))
            rows -= 1
