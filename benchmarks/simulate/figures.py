"""What a simulation yields: figures of what the engine told."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.simulate.traffic import Job
from onnxport.serving.events import RequestEvent, StepRecord
from onnxport.serving.outputs import FinishReason

WINDOW_S = 60.0  # over which served tokens are summed up


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of durations, in seconds; all 0 without any."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: array[float]) -> Percentiles:
        """Of `values`."""
        return cls(*np.percentile(values, (50, 90, 99, 100)).tolist()) if values else cls()


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What one tenant got."""

    finished: int
    refused: int  # tries
    gave_up: int
    ttft_s: Percentiles  # from the client's first try
    queue_s: Percentiles  # from the accepted try to the first step
    asked_tokens: int  # prompt and output, up to the last arrival
    served_tokens: int  # likewise, of requests that ended until then
    served_over_time: tuple[int, ...]  # tokens of requests that ended in each `WINDOW_S`


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Everything but `real_s` is the same for the same scenario, size and seed."""

    requests: int
    finished: Mapping[FinishReason, int]
    refused: int
    gave_up: int
    virtual_s: float
    real_s: float
    steps: int
    preemptions: int
    blocks_loaded: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    hit_rate: float  # of prompt tokens, how many were found in the cache
    output_tokens_per_s: float
    most_step_tokens: int
    ttft_s: Percentiles
    inter_token_s: Percentiles
    queue_s: Percentiles
    jain: float
    tenants: Mapping[str, TenantFigures]


@dataclass(slots=True)
class _Tenant:
    """Samples of one tenant."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    queue_s: array[float] = field(default_factory=lambda: array("d"))
    served: list[tuple[float, int]] = field(default_factory=list)  # when a request ended, tokens
    asked_tokens: int = 0
    refused: int = 0
    gave_up: int = 0


class Recorder:
    """Listens to the engine, and is told by the clients what the engine does not know."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}  # accepted and unfinished
        self.last_arrival_s = 0.0
        self.computed_tokens = self.most_step_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.ended: list[tuple[Job, float]] = []  # since somebody last took them
        self._gaps = array("f")
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)

    def on_request(self, event: RequestEvent) -> None:
        """Take what a finished request has to say; it says everything."""
        record = event.finished
        if record is None:
            return
        job = self.jobs.pop(event.request_id)
        tenant, times = self._tenants[job.stream.tenant], record.metrics
        if times.scheduled_time_s is not None:
            tenant.queue_s.append(times.scheduled_time_s - times.arrival_time_s)
        if times.first_token_time_s is not None:
            tenant.ttft_s.append(times.first_token_time_s - job.arrival_s)
        self.prompt_tokens += record.num_prompt_tokens
        self.cached_tokens += record.num_cached_tokens
        self.output_tokens += record.num_output_tokens
        tenant.served.append((event.time_s, record.num_prompt_tokens + record.num_output_tokens))
        self.ended.append((job, event.time_s))

    def on_step(self, record: StepRecord) -> None:
        """Count a step."""
        self.computed_tokens += record.num_tokens
        self.most_step_tokens = max(self.most_step_tokens, record.num_tokens)
        self._gaps.extend(record.inter_token_s)

    def on_sent(self, job: Job) -> None:
        """A client tries for the first time."""
        self.last_arrival_s = job.arrival_s
        self._tenants[job.stream.tenant].asked_tokens += len(job.prompt) + job.output_tokens

    def on_refused(self, job: Job, *, gave_up: bool) -> None:
        """The queue was full."""
        tenant = self._tenants[job.stream.tenant]
        tenant.refused += 1
        tenant.gave_up += gave_up

    def percentiles(self) -> tuple[Percentiles, Percentiles, Percentiles]:
        """TTFT, inter-token latency and time in the queue, of all tenants."""
        ttft_s, queue_s = array("d"), array("d")
        for tenant in self._tenants.values():
            ttft_s.extend(tenant.ttft_s)
            queue_s.extend(tenant.queue_s)
        return Percentiles.of(ttft_s), Percentiles.of(self._gaps), Percentiles.of(queue_s)

    def tenants(self, until_s: float) -> dict[str, TenantFigures]:
        """What each tenant got in the time up to `until_s`."""
        return {name: self._figures(self._tenants[name], until_s) for name in sorted(self._tenants)}

    def _figures(self, tenant: _Tenant, until_s: float) -> TenantFigures:
        windows = [0] * (int(until_s // WINDOW_S) + 1)
        for time_s, tokens in tenant.served:
            windows[int(time_s // WINDOW_S)] += tokens
        return TenantFigures(
            finished=len(tenant.served),
            refused=tenant.refused,
            gave_up=tenant.gave_up,
            ttft_s=Percentiles.of(tenant.ttft_s),
            queue_s=Percentiles.of(tenant.queue_s),
            asked_tokens=tenant.asked_tokens,
            served_tokens=sum(n for time_s, n in tenant.served if time_s <= self.last_arrival_s),
            served_over_time=tuple(windows),
        )


def jain(shares: Iterable[float]) -> float:
    """Jain's index: 1 if all shares are equal, 1 / n if one has everything.

    Jain, Chiu and Hawe, A Quantitative Measure of Fairness and Discrimination, DEC TR-301, 1984.
    """
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def entitled(asked: Sequence[float], total: float) -> list[float]:
    """Divide `total` so that nobody gets more than asked, and the rest equally (max-min)."""
    given = [0.0] * len(asked)
    order = sorted(range(len(asked)), key=lambda index: asked[index])
    for place, index in enumerate(order):
        given[index] = min(asked[index], total / (len(order) - place))
        total -= given[index]
    return given


def fairness(tenants: Mapping[str, TenantFigures]) -> float:
    """Jain's index of what tenants were served, each as a share of what it was entitled to."""
    served = [tenant.served_tokens for tenant in tenants.values()]
    due = entitled([tenant.asked_tokens for tenant in tenants.values()], sum(served))
    return jain(got / right for got, right in zip(served, due, strict=True) if right)
