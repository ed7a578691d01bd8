"""Everything at once: random requests, clients, faults, for thousands of steps.

A run is decided by its seed, which is printed, but for what the disk has written in time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import onnxport.kv.disk_folder as disk_folder
import onnxport.serving.sampling as sampling_module
from onnxport.errors import OverloadedError
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.worker import AsyncEngine
from tests.serving.helpers import Clock, alone, checked_step, null_engine, null_model, submit
from tests.serving.watch import Watch
from tests.waiting import until

STEPS = 5_000  # of each run
SAMPLE = 4  # the tokens of every fourth request are checked
PREFIXES = [[random.Random(seed).randrange(512) for _ in range(70)] for seed in range(4)]
DRAIN_STEPS = 3_000


class Faults:
    """Now and then something fails, sometimes for a while."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.active = True
        self.counts: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()

    def strikes(self, what: str, chance: float, longest: int = 4) -> bool:
        if not self.active:
            return False
        if not self._broken[what] and self.dice.random() < chance:
            self._broken[what] = self.dice.randint(1, longest)
        if self._broken[what]:
            self._broken[what] -= 1
            self.counts[what] += 1
            return True
        return False


def any_prompt(dice: random.Random) -> list[int]:
    prefix = dice.choice(PREFIXES)[: dice.choice([0, 8, 16, 33, 64, 70])]
    return [*prefix, *(dice.randrange(512) for _ in range(dice.choice([1, 2, 5, 20])))]


def any_params(dice: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=dice.choice([0.0, 1.0]),
        seed=dice.randrange(100),
        max_tokens=dice.choice([1, 2, 8, 30]),
        n=dice.choice([1, 1, 1, 2, 4]),
    )


def any_options(dice: random.Random) -> dict[str, Any]:
    return {
        "priority": dice.choice([0, 0, 1, 5]),
        "tenant": dice.choice(["", "a", "b", "c"]),
        "cache_salt": dice.choice([None, None, "x"]),
        "timeout_s": dice.choice([None, None, None, 0.5, 2.0]),
    }


@pytest.fixture
def faulty_disk(monkeypatch: pytest.MonkeyPatch) -> list[Faults]:
    """Reads and writes of the disk tier fail as the first of the faults in the list says."""
    faults: list[Faults] = []
    read, write = disk_folder.DiskFolder.get, disk_folder.DiskFolder.put

    def get(self: Any, key: bytes) -> Any:
        return None if faults and faults[0].strikes("disk read", 0.05) else read(self, key)

    def put(self: Any, *arguments: Any) -> Any:
        # In the writer's thread: dice of its own, so that the rest is decided by the seed.
        return None if arguments[0][0] % 20 == 0 else write(self, *arguments)

    monkeypatch.setattr(disk_folder.DiskFolder, "get", get)
    monkeypatch.setattr(disk_folder.DiskFolder, "put", put)
    return faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "policy", "num_blocks", "windows"),
    [
        (1, "fcfs", 72, (None,)),
        (2, "fair", 72, (None,)),
        (3, "fcfs", 120, (None, 24, 24)),
        (4, "fair", 30, (20,)),
    ],
)
def test_thousands_of_steps_of_faults(
    seed: int,
    policy: Any,
    num_blocks: int,
    windows: tuple[int | None, ...],
    tmp_path: Path,
    faulty_disk: list[Faults],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    print(f"seed {seed}")
    dice = random.Random(f"{seed} {policy}")
    faults = Faults(dice)
    # How often the disk is read depends on its writer's thread; the rest is decided by the seed.
    disk_faults = Faults(random.Random(f"{seed} disk"))
    faulty_disk.append(disk_faults)
    clock = Clock(tick_s=0.0005)
    engine = null_engine(
        num_blocks=num_blocks,
        windows=windows,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        max_queued_requests=20,
        scheduling_policy=policy,
        preemption=dice.choice(["swap", "recompute"]),
        kv_host_memory=100 * 64,
        kv_disk=tmp_path,
        clock=clock,
        fails=lambda run: faults.strikes("run", 0.02),
        transfer_fails=lambda transfer: faults.strikes("transfer", 0.05),
    )
    sample = sampling_module.sample_positions

    def sampled(*arguments: Any) -> Any:
        if faults.strikes("sample", 0.01):
            raise ZeroDivisionError("sampling")
        return sample(*arguments)

    monkeypatch.setattr(sampling_module, "sample_positions", sampled)
    watch = Watch(engine)
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    found: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], str] = {}
    refused = 0

    def take(deltas: list[CompletionDelta]) -> None:
        for delta in deltas:
            name = (delta.request_id, delta.index)
            assert name not in reasons, f"{name}: a delta after the last one"
            found[name] += delta.token_ids
            if delta.finish_reason is not None:
                reasons[name] = delta.finish_reason

    for _ in range(STEPS):
        while dice.random() < 0.35:
            name, prompt, params = str(len(requests)), any_prompt(dice), any_params(dice)
            options = any_options(dice)
            if policy == "fcfs":
                options["priority"] = 0
            try:
                submit(engine, name, prompt, params, **options)
            except OverloadedError:
                refused += 1
            else:
                requests[name] = (prompt, params)
                found |= {(name, index): [] for index in range(params.n)}
        if requests and dice.random() < 0.05:
            take(engine.abort(str(max(0, len(requests) - dice.randint(1, 30)))))
        if dice.random() < 0.002:
            engine.reset_prefix_cache()
        if dice.random() < 0.01:
            clock.now_s += 1.0
        take(checked_step(engine))
    faults.active = disk_faults.active = False
    for _ in range(DRAIN_STEPS):
        if not engine.has_work:
            break
        take(checked_step(engine))
    assert not engine.has_work, f"work is left {DRAIN_STEPS} steps after the last request"

    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert not list(engine._sequences)
    assert not engine._scheduler._held._swapped
    assert not engine._scheduler._tenants
    watch.check_all_ended()
    assert reasons.keys() == found.keys() == watch.events.keys()
    ends = Counter(reasons.values())
    assert ends == {reason: count for reason, count in stats.finished.items() if count}
    counts = faults.counts + disk_faults.counts
    print(f"{len(requests)} requests, {refused} refused, {ends}, {counts}, {stats}")
    assert ends.keys() == {"length", "abort", "error", "timeout"}
    assert ends["length"] > 300
    assert min(stats.num_preemptions, stats.num_blocks_loaded, stats.num_failed_steps, refused) > 10
    assert min(counts[what] for what in ("run", "sample", "transfer", "disk read")) > 10
    for (name, index), tokens in found.items():
        if int(name) % SAMPLE:
            continue
        expected = alone(*requests[name], index, windows)
        whole = reasons[name, index] == "length"
        assert tokens == (expected if whole else expected[: len(tokens)]), f"{name}-{index}"
    engine.close()
    assert null_model(engine).closed


@pytest.mark.slow
async def test_hundreds_of_clients_that_come_and_go() -> None:
    dice = random.Random(11)
    faults = Faults(random.Random(12))
    engine = null_engine(
        num_blocks=72,
        max_num_batched_tokens=40,
        max_queued_requests=40,
        scheduling_policy="fair",
        preemption="swap",
        kv_host_memory=1 << 20,
        fails=lambda run: faults.strikes("run", 0.02),
        transfer_fails=lambda transfer: faults.strikes("transfer", 0.05),
    )
    watch = Watch(engine)
    ends: Counter[str] = Counter()

    async def client(
        prompt: list[int],
        params: SamplingParams,
        options: RequestOptions,
        delay_s: float,
        patience: int,
    ) -> None:
        """Asks again when it is refused; leaves after `patience` deltas."""
        await asyncio.sleep(delay_s)
        found: dict[int, list[int]] = {index: [] for index in range(params.n)}
        reasons: dict[int, str] = {}
        while True:
            try:
                stream = worker.stream(prompt, params, options=options)
                async for delta in stream:
                    assert delta.index not in reasons
                    found[delta.index] += delta.token_ids
                    if delta.finish_reason is not None:
                        reasons[delta.index] = delta.finish_reason
                    patience -= 1
                    if patience < 0:
                        await stream.aclose()
                        ends["left"] += 1
                        return
                break
            except OverloadedError:
                ends["refused"] += 1
                await asyncio.sleep(0.01)
        assert reasons.keys() == found.keys()
        ends.update(reasons.values())
        for index, tokens in found.items():
            expected = alone(prompt, params, index)
            whole = reasons[index] == "length"
            assert tokens == (expected if whole else expected[: len(tokens)])

    async with AsyncEngine(engine) as worker:
        tasks = []
        for _ in range(300):
            options = RequestOptions(**any_options(dice) | {"timeout_s": None})
            patience = dice.choice([0, 3, 1000, 1000, 1000])
            delay_s = dice.random() * 0.5
            tasks.append(
                asyncio.create_task(
                    client(any_prompt(dice), any_params(dice), options, delay_s, patience)
                )
            )
        await asyncio.sleep(0.3)
        for task in dice.sample(tasks, 40):
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        problems = [
            result
            for result in results
            if result is not None and not isinstance(result, asyncio.CancelledError)
        ]
        assert not problems, problems[0]
        await until(
            lambda: not worker.stats().num_requests_running + worker.stats().num_requests_waiting
        )
        stats = worker.stats()
        assert worker.healthy
        assert stats.num_free_blocks == stats.num_blocks
        assert not worker._streams
        assert engine.num_queued == 0
    watch.check_all_ended()
    assert ends["length"] > 50
    assert ends["left"] > 5
    assert stats.finished["abort"] > 0  # how many ended by themselves before is a matter of time
    assert not list(engine._sequences)
