"""Measure how much of the time a fast device is kept busy by the asynchronous engine.

    python -m benchmarks.overlap [--step-ms 5] [--tokens 200] [--rows 1 8 64 256]

The device only sleeps: it takes as long for a step as it is told, and none of the
processor's time. While it is not busy the engine does what it does between two steps, or waits for
the interpreter's lock, which the event loop that gets the tokens takes too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.worker import AsyncEngine

VOCAB = 2048
PROMPT_TOKENS = 64
BLOCK_SIZE = 16


class SleepingModel(NullModel):
    """Returns the same random logits after a fixed time."""

    def __init__(self, options: NullOptions, step_s: float) -> None:
        super().__init__(options)
        self._step_s = step_s
        self._logits: dict[int, NDArray[np.float32]] = {}
        self.busy_s = 0.0

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Sleep, and return logits."""
        start = time.perf_counter()
        rows = len(inputs.logits_indices)
        if rows not in self._logits:
            rng = np.random.default_rng(rows)
            self._logits[rows] = rng.standard_normal((rows, VOCAB), np.float32)
        time.sleep(self._step_s)
        self.busy_s += time.perf_counter() - start
        return self._logits[rows]


async def measure(rows: int, num_tokens: int, step_s: float) -> tuple[float, float]:
    """Return output tokens a second, and the share of the time that the device is busy."""
    longest = PROMPT_TOKENS + num_tokens + BLOCK_SIZE
    num_blocks = rows * (longest // BLOCK_SIZE + 1)
    model = SleepingModel(NullOptions(VOCAB, num_blocks, BLOCK_SIZE, max_model_len=longest), step_s)
    engine = Engine(model, config=EngineConfig(rows, max(2048, rows)))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    async def listen(worker: AsyncEngine, index: int) -> None:
        rng = np.random.default_rng(index)
        async for _ in worker.stream(rng.integers(0, VOCAB, PROMPT_TOKENS).tolist(), params):
            pass

    async with AsyncEngine(engine) as worker:
        start = time.perf_counter()
        await asyncio.gather(*(listen(worker, index) for index in range(rows)))
        elapsed = time.perf_counter() - start
    return rows * num_tokens / elapsed, model.busy_s / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{options.step_ms:g} ms a step\n\n{'rows':>5}{'tok/s':>10}{'busy':>8}")
    for rows in options.rows:
        speed, busy = asyncio.run(measure(rows, options.tokens, options.step_ms / 1e3))
        print(f"{rows:5}{speed:10.0f}{busy:8.2f}")


if __name__ == "__main__":
    main()
