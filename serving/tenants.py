"""Whose requests are unfinished and queued, and who is charged for what of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count

from onnxport.serving.config import SchedulingPolicy
from onnxport.serving.params import RequestOptions
from onnxport.serving.queues import Queues
from onnxport.serving.request import Request
from onnxport.serving.shares import Shares
from onnxport.serving.step_plan import StepPlan


class Tenants:
    """Counts the requests of each tenant, and keeps their turns in the scheduler's queues."""

    __slots__ = ("_policy", "_queued", "_queues", "_starts", "_unfinished")

    def __init__(self, queues: Queues, policy: SchedulingPolicy) -> None:
        """Begin without requests.

        Args:
            queues: the scheduler's.
            policy: whose turn it is.
        """
        self._queues = queues
        self._policy = policy
        self._starts = count(1)
        self._unfinished: Counter[str] = Counter()
        self._queued: Counter[str] = Counter()  # requests that were never started

    def __len__(self) -> int:
        """How many have unfinished requests."""
        return len(self._unfinished)

    @property
    def num_queued(self) -> int:
        """Requests that were never started."""
        return self._queued.total()

    def of(self, options: RequestOptions) -> str:
        """Whose request counts as whose: all are one tenant's, but for the policy "fair"."""
        return options.tenant if self._policy == "fair" else ""

    def room(self, tenant: str, limit: int, coming: Mapping[str, int]) -> int:
        """How many more requests `tenant` may queue when at most `limit` may wait in all.

        Under "fair" there is always room for one more tenant: with k of them unfinished, each may
        fill a part in k + 1 of the queue. Reading it from another thread is harmless.

        Args:
            tenant: whose requests.
            limit: how many may wait, everybody's.
            coming: of each tenant, how many more were taken that the scheduler was not given yet.
        """
        room = limit - self.num_queued - sum(coming.values())
        if self._policy != "fair":
            return room
        others = sum(one not in self._unfinished for one in {*coming, tenant})
        share = max(1, limit // (len(self._unfinished) + others + 1))
        return min(room, share - self._queued[tenant] - coming.get(tenant, 0))

    def add(self, request: Request) -> None:
        """A sequence is accepted."""
        request.tenant = self.of(request.options)
        self._unfinished[request.tenant] += 1

    def queue(self, request: Request) -> None:
        """A request, which was never started, waits."""
        self._queued[request.tenant] += 1

    def leave_queue(self, request: Request) -> None:
        """A request that was never started starts or ends."""
        self._queued[request.tenant] -= 1

    def start(self, request: Request) -> None:
        """A request starts, or goes on."""
        self._queues.last_start[request.tenant] = next(self._starts)

    def end(self, request: Request) -> None:
        """A sequence ends; who has no other is forgotten."""
        tenant = request.tenant
        self._unfinished[tenant] -= 1
        if self._unfinished[tenant]:
            return
        del self._unfinished[tenant]
        del self._queued[tenant]
        self._queues.last_start.pop(tenant, None)
        for level, shares in list(self._queues.shares.items()):
            shares.forget(tenant)
            if shares.empty:
                del self._queues.shares[level]

    def settle(self, plan: StepPlan) -> None:
        """Keep the turns of a step, and charge who decoded while somebody else waited."""
        if self._policy != "fair":
            return
        for level, turns in plan.turns.items():
            self._queues.shares.setdefault(level, Shares(self._queues.quantum)).commit(turns)
        decodes = Counter(
            (request.rank[0], request.tenant) for request in plan.requests[: plan.num_decodes]
        )
        for (level, tenant), num_tokens in decodes.items():
            lanes = self._queues.waiting.lanes(level)
            if len(lanes) > (tenant in lanes):
                shares = self._queues.shares.setdefault(level, Shares(self._queues.quantum))
                shares.charge(tenant, num_tokens)
