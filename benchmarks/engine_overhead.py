"""Measure what the engine itself costs a step: planning, packing, sampling and delivering.

    python benchmarks/engine_overhead.py [--vocab 2048] [--steps 200]

Runs on the null provider, whose own time is measured and left out, in the state that matters most:
every request decoding, none ending. Times are of the thread's CPU, so neighbours do not show.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving import sampling
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams

PROMPT_TOKENS = 128
BLOCK_SIZE = 16
LIKELY = 30  # tokens that hold nearly all probability
ROWS = (1, 8, 64, 256)
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


if __name__ == "__main__":
    main()
