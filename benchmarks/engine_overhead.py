"""Measure what the engine itself costs a step: planning, packing, sampling and delivering.

    python benchmarks/engine_overhead.py [--vocab 2048] [--steps 200]

Runs on the null provider, whose own time is measured and left out, in the state that matters most:
every request decoding, none ending. Times are of the thread's CPU, so neighbours do not show.
A second table is of a line of requests whose LoRA adapters wait for slots, with rows free.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from onnxport.graphs.lora import LoraAdapter, LoraDelta
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving import sampling
from onnxport.serving.adapters.peft import AdapterContent, fingerprint
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import RequestOptions, SamplingParams

PROMPT_TOKENS = 128
BLOCK_SIZE = 16
LIKELY = 30  # tokens that hold nearly all probability
ROWS = (1, 8, 64, 256)
WAITING = (250, 1000, 4000)
ADAPTERS, SLOTS, LINE_ROWS = 64, 4, 256
MODES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=100_000),
    "top_p": SamplingParams(top_p=0.9, seed=0, max_tokens=100_000),
    "temperature": SamplingParams(seed=0, max_tokens=100_000),
    "min_p": SamplingParams(min_p=0.05, seed=0, max_tokens=100_000),
    "everything": SamplingParams(
        top_p=0.9,
        top_k=50,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias=dict.fromkeys(range(300), 1.0),
        seed=0,
        max_tokens=100_000,
    ),
}


class Clock:
    """Sums up what calls take, by name, in seconds."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, its time added to `name`."""

        def run(*args: Any, **named: Any) -> Any:
            start = time.thread_time()
            result = call(*args, **named)
            self.spent[name] = self.spent.get(name, 0.0) + time.thread_time() - start
            return result

        return run


class CheapModel(NullModel):
    """Returns the same logits in every run: checking and hashing would hide the engine's part.

    They are peaked like a language model's: a nucleus of 0.9 has some tens of tokens.
    """

    def __init__(self, options: NullOptions) -> None:
        super().__init__(options)
        self._kept: dict[int, Any] = {}

    def run(self, inputs: Any) -> Any:
        """Return the logits of the first run with as many rows."""
        rows = len(inputs.logits_indices)
        if rows not in self._kept:
            self._kept[rows] = super().run(inputs)
            self._kept[rows][:, :LIKELY] += 8.0
        return self._kept[rows]


def make_engine(rows: int, vocab: int, steps: int) -> Engine:
    tokens = PROMPT_TOKENS + steps + 100_001
    model = CheapModel(
        NullOptions(vocab, rows * (-(-tokens // BLOCK_SIZE)), BLOCK_SIZE, max_model_len=tokens)
    )
    return Engine(model, config=EngineConfig(rows, max(512, rows)))


def measure(rows: int, params: SamplingParams, vocab: int, steps: int) -> dict[str, float]:
    """Return the median microseconds a step spends in each part."""
    engine = make_engine(rows, vocab, steps)
    for index in range(rows):
        prompt = [(index + i) % vocab for i in range(PROMPT_TOKENS)]
        engine.submit(engine.prepare(str(index), prompt, params))
    while len(engine.step()) < rows:  # until every request gets a token in one step
        pass
    clock = Clock()
    sample_step = sampling.sample_step
    for name, owner, method in (
        ("plan", engine._scheduler, "plan"),
        ("reserve", engine._scheduler, "reserve"),
        ("pack", engine._runtime.packer, "pack"),
        ("model", engine._runtime.model, "run"),
        ("sample", sampling, "sample_step"),
        ("commit", engine._scheduler, "commit"),
        ("deliver", engine._sequences, "deliver"),
    ):
        if hasattr(owner, "__dict__"):
            setattr(owner, method, clock.timed(name, getattr(owner, method)))
    samples: dict[str, list[float]] = {}
    for _ in range(steps):
        clock.spent.clear()
        start = time.thread_time()
        engine.step()
        clock.spent["total"] = time.thread_time() - start - clock.spent.pop("model")
        for name, seconds in clock.spent.items():
            samples.setdefault(name, []).append(1e6 * seconds)
    sampling.sample_step = sample_step
    return {name: median(values) for name, values in samples.items()}


def waiting_engine(waiting: int, policy: Any) -> Engine:
    """An engine of requests that run, and of others behind them that wait for slots."""
    model = CheapModel(
        NullOptions(512, 1 << 14, BLOCK_SIZE, max_model_len=8192, max_adapters=SLOTS)
    )
    engine = Engine(
        model,
        config=EngineConfig(
            LINE_ROWS,
            LINE_ROWS + 256,
            max_queued_requests=2 * waiting,
            scheduling_policy=policy,
            max_host_adapters=ADAPTERS,
        ),
    )
    for number in range(ADAPTERS):
        matrix = np.full((1, 1), number, np.float32)
        adapter = LoraAdapter({(0, "q_proj"): LoraDelta(matrix, matrix)})
        content = AdapterContent(adapter, fingerprint(adapter), Path(str(number)), None)
        engine.adapters.load(str(number), content)
    params = SamplingParams(temperature=0.0, max_tokens=4000)
    # The adapters that get slots have a request each, so that rows stay free.
    for number in range(waiting):
        adapter = number if number < SLOTS else SLOTS + number % (ADAPTERS - SLOTS)
        options = RequestOptions(adapter=str(adapter), tenant=f"tenant {number % 4}")
        engine.submit(engine.prepare(str(number), [1, 2, 3, number % 512], params, options))
    return engine


def measure_line(waiting: int, policy: Any, steps: int) -> dict[str, float]:
    """Return the median microseconds a step spends in giving slots and in planning."""
    engine = waiting_engine(waiting, policy)
    for _ in range(4):
        engine.step()
    assert engine.stats().num_requests_running == SLOTS
    clock = Clock()
    for name, owner, method in (
        ("slots", engine._runtime, "take_slots"),
        ("plan", engine._scheduler, "plan"),
    ):
        setattr(owner, method, clock.timed(name, getattr(owner, method)))
    samples: dict[str, list[float]] = {}
    for _ in range(steps):
        clock.spent.clear()
        engine.step()
        for name, seconds in clock.spent.items():
            samples.setdefault(name, []).append(1e6 * seconds)
    return {name: median(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    parts = ("plan", "reserve", "pack", "sample", "commit", "deliver", "total")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"vocabulary {options.vocab}, median CPU microseconds a step, model excluded\n")
    print(f"{'sampling':12}{'rows':>6}" + "".join(f"{part:>9}" for part in parts))
    for mode, params in MODES.items():
        for rows in ROWS:
            spent = measure(rows, params, options.vocab, options.steps)
            cells = "".join(f"{spent.get(part, 0.0):9.0f}" for part in parts)
            print(f"{mode:12}{rows:6}{cells}")
    print(f"\n{ADAPTERS} adapters over {SLOTS} slots, most of {LINE_ROWS} rows free\n")
    print(f"{'policy':12}{'line':>6}{'slots':>9}{'plan':>9}")
    for policy in ("fcfs", "priority", "fair"):
        for waiting in WAITING:
            spent = measure_line(waiting, policy, options.steps)
            print(f"{policy:12}{waiting:6}{spent['slots']:9.0f}{spent['plan']:9.0f}")


if __name__ == "__main__":
    main()
