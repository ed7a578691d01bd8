"""A scheduler without a model, and the shortest names for what tests look at."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence

from onnxport.kv.pool import BlockPool
from onnxport.kv.prefix import KeyChain, root_key
from onnxport.kv.states import StatePool
from onnxport.serving.config import SchedulingPolicy
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.step_plan import Guess, StepPlan

BLOCK_SIZE = 4


def make_request(
    name: str,
    tokens: Sequence[int],
    *,
    n: int = 1,
    cached: bool = False,
    arrival_s: float = 0.0,
    **options: object,
) -> Request:
    """A request as the intake makes it; with content keys if it is `cached`."""
    chosen = RequestOptions(**options)  # type: ignore[arg-type]
    params = SamplingParams(n=n)
    keys = KeyChain(root_key(chosen.adapter, chosen.cache_salt), BLOCK_SIZE) if cached else None
    if keys is not None:
        keys.extend(array("q", tokens))

    def sequence(index: int) -> Request:
        return Request(
            name,
            array("q", tokens),
            params,
            max_total_tokens=1000,
            options=chosen,
            index=index,
            arrival_time_s=arrival_s,
            keys=None if index else keys,
        )

    first = sequence(0)
    first.siblings = tuple(map(sequence, range(1, n)))
    return first


class Bench:
    """Requests by name; sibling 1 of "a" is "a1"."""

    def __init__(
        self,
        num_blocks: int,
        *,
        rows: int = 8,
        budget: int = 16,
        policy: SchedulingPolicy = "fcfs",
        windows: Sequence[int | None] = (None,),
        states: StatePool | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, windows)
        self.states = states
        self.scheduler = Scheduler(self.pool, min(rows, budget), budget, policy, states)
        self.requests: dict[str, Request] = {}

    def submit(self, name: str, tokens: int | Sequence[int], **options: object) -> None:
        """Queue a request of these tokens, or of as many, without or with content keys."""
        given = range(tokens) if isinstance(tokens, int) else tokens
        request = make_request(name, given, **options)  # type: ignore[arg-type]
        for one in (request, *request.siblings):
            self.requests[one.request_id + (str(one.index) if one.index else "")] = one
        self.scheduler.submit(request)

    def step(self, only: Collection[str] | None = None, loading: Collection[str] = ()) -> StepPlan:
        """Plan, reserve, commit, and sample token 7 where a row reaches its end."""
        chosen = None if only is None else [self.requests[name] for name in only]
        plan = self.scheduler.plan(chosen, [self.requests[name] for name in loading])
        ends = [one for row in plan.sampled for one in group(plan.requests[row])]
        self.scheduler.commit(plan, self.scheduler.reserve(plan))
        for one in ends:
            one.tokens.append(7)
        self.scheduler.check()
        return plan

    def fail(self) -> StepPlan:
        """Plan, reserve and roll back."""
        plan = self.scheduler.plan()
        self.scheduler.rollback(plan, self.scheduler.reserve(plan))
        self.scheduler.check()
        return plan

    def finish(self, *names: str) -> None:
        for name in names:
            self.scheduler.finish(self.requests[name], "stop")
        self.scheduler.check()

    def blocks(self, name: str) -> list[int]:
        return list(self.requests[name].table.blocks)


def group(request: Request) -> tuple[Request, ...]:
    return (request, *request.siblings)


def name_of(request: Request) -> str:
    return request.request_id + (str(request.index) if request.index else "")


def saying(drafts: Mapping[Request, Sequence[int]]) -> Guess:
    """Guesses these tokens, whatever is asked for."""
    return lambda *_: drafts


def rows(plan: StepPlan) -> list[tuple[str, int, int]]:
    """Name, past and new of each row."""
    return list(zip(names(plan.requests), plan.num_past, plan.num_new, strict=True))


def names(requests: Sequence[Request]) -> list[str]:
    return [name_of(request) for request in requests]
