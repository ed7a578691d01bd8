"""Clients and engine in one loop, in virtual time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from benchmarks.simulate.cost import CostModel, VirtualClock
from benchmarks.simulate.figures import Figures, Recorder, fairness
from benchmarks.simulate.model import VOCAB_SIZE, SimulatedModel
from benchmarks.simulate.scenarios import Scenario
from benchmarks.simulate.traffic import Job, next_turns
from onnxport.errors import OverloadedError
from onnxport.providers.null import NullOptions
from onnxport.serving.engine import Engine
from onnxport.serving.params import RequestOptions, SamplingParams


def make_engine(scenario: Scenario, clock: VirtualClock, cost: CostModel | None = None) -> Engine:
    """Return the scenario's engine, on a model that moves `clock`."""
    options = NullOptions(
        vocab_size=VOCAB_SIZE,
        num_blocks=scenario.num_blocks,
        block_size=scenario.block_size,
        max_model_len=scenario.max_model_len,
    )
    model = SimulatedModel(options, cost or CostModel(), clock)
    return Engine(model, config=scenario.config, clock=clock)


class _Clients:
    """Everything that will be sent, in the order of time."""

    def __init__(self, scenario: Scenario, num_requests: int, seed: int) -> None:
        self._longest = scenario.max_model_len
        self._left = num_requests
        self._heap: list[tuple[float, int, Job, Iterator[Job] | None]] = []
        self._serial = 0
        for stream in scenario.streams:
            jobs = stream.jobs(seed)
            first = next(jobs)
            self._push(first.arrival_s, first, jobs)

    @property
    def next_s(self) -> float | None:
        """When the next request is sent; None: no more are."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Job:
        """The next request."""
        _, _, job, jobs = heappop(self._heap)
        if job.tries == 0:
            self._left -= 1
            if self._left == 0:
                self._heap = [one for one in self._heap if one[2].tries]
                heapify(self._heap)
        if jobs is not None and self._left:
            following = next(jobs)
            self._push(following.arrival_s, following, jobs)
        return job

    def answered(self, job: Job, end_s: float) -> None:
        """The client may go on from its answer."""
        if self._left:
            for turn in next_turns(job, end_s, self._longest):
                self._push(turn.arrival_s, turn)

    def retry(self, job: Job, at_s: float) -> None:
        """The client tries again."""
        self._push(at_s, job)

    def _push(self, at_s: float, job: Job, jobs: Iterator[Job] | None = None) -> None:
        self._serial += 1
        heappush(self._heap, (at_s, self._serial, job, jobs))


def simulate(
    scenario: Scenario, num_requests: int, seed: int = 0, cost: CostModel | None = None
) -> Figures:
    """Send `num_requests` to the scenario's engine and serve all of them."""
    start = time.perf_counter()
    clock, recorder = VirtualClock(), Recorder()
    engine = make_engine(scenario, clock, cost)
    engine.add_listener(recorder)
    clients = _Clients(scenario, num_requests, seed)
    while engine.has_work or clients.next_s is not None:
        if not engine.has_work and clients.next_s is not None:
            clock.now_s = max(clock.now_s, clients.next_s)
        while clients.next_s is not None and clients.next_s <= clock.now_s:
            at_s = clients.next_s
            _send(engine, clock, recorder, clients, clients.pop(), at_s)
        engine.step()
        for job, end_s in recorder.ended:
            clients.answered(job, end_s)
        recorder.ended.clear()
    engine.check()
    return _figures(engine, recorder, num_requests, clock.now_s, time.perf_counter() - start)


def _send(
    engine: Engine,
    clock: VirtualClock,
    recorder: Recorder,
    clients: _Clients,
    job: Job,
    at_s: float,
) -> None:
    """Submit a request, which arrived `at_s`, while a step ran; the engine takes it after that."""
    stream = job.stream
    if job.tries == 0:
        recorder.on_sent(job)
    job.tries += 1
    now_s, clock.now_s = clock.now_s, at_s
    request = engine.prepare(
        job.name,
        job.prompt,
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.output_tokens),
        RequestOptions(priority=stream.priority, tenant=stream.tenant),
    )
    clock.now_s = now_s
    try:
        engine.submit(request)
    except OverloadedError as error:
        recorder.on_refused(job, gave_up=job.tries >= stream.patience)
        if job.tries < stream.patience:
            clients.retry(job, now_s + error.retry_after_s)
    else:
        recorder.jobs[job.name] = job


def _figures(
    engine: Engine, recorder: Recorder, num_requests: int, virtual_s: float, real_s: float
) -> Figures:
    stats, tenants = engine.stats(), recorder.tenants(virtual_s)
    assert not recorder.jobs, f"{len(recorder.jobs)} requests never ended"
    assert stats.num_free_blocks == stats.num_blocks, "blocks are held and nobody runs"
    ttft_s, inter_token_s, queue_s = recorder.percentiles()
    return Figures(
        requests=num_requests,
        finished={reason: count for reason, count in stats.finished.items() if count},
        refused=sum(tenant.refused for tenant in tenants.values()),
        gave_up=sum(tenant.gave_up for tenant in tenants.values()),
        virtual_s=virtual_s,
        real_s=real_s,
        steps=stats.num_steps,
        preemptions=stats.num_preemptions,
        blocks_loaded=stats.num_blocks_loaded,
        prompt_tokens=recorder.prompt_tokens,
        output_tokens=recorder.output_tokens,
        computed_tokens=recorder.computed_tokens,
        hit_rate=recorder.cached_tokens / max(1, recorder.prompt_tokens),
        output_tokens_per_s=recorder.output_tokens / virtual_s,
        most_step_tokens=recorder.most_step_tokens,
        ttft_s=ttft_s,
        inter_token_s=inter_token_s,
        queue_s=queue_s,
        jain=fairness(tenants),
        tenants=tenants,
    )
