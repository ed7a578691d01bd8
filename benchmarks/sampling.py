"""Measure what sampling costs: by itself, or as a share of an engine's steps.

    python -m benchmarks.sampling [--vocab 151936] [--rows 1,8,32] [--threads 2] [--no-numpy]
    python -m benchmarks.sampling --artifact DIR [--rows 32] [--threads 2] [--provider cpu]

By itself: milliseconds of a call, the median of several, native and in NumPy, for logits as peaked
as a language model's and as flat as a random model's. With `--artifact`: a real engine decodes with
every request running, and the time of its sampling is compared with that of its steps.
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
from numpy.typing import NDArray

from onnxport.providers.base import LoadOptions
from onnxport.serving import numpy_sampler, sampling
from onnxport.serving.config import EngineConfig
from onnxport.serving.edits import RowEdits
from onnxport.serving.engine import Engine
from onnxport.serving.loading import open_engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import Adapting, RowParams, Thinning
from onnxport.serving.sampler import native_sampler

Floats = NDArray[np.float32]
NUM_PENALIZED = 500
PROMPT_TOKENS = 64
EVERYTHING = "everything"  # penalties, biases, bans, a mask, logprobs, min_p, top_k and top_p
MODES = {
    "greedy": RowParams(),
    "temperature": RowParams(1.0),
    "top_p": RowParams(1.0, None, 0.9),
    "top_k": RowParams(1.0, 50),
    "min_p": RowParams(1.0, min_p=0.05),
    "top_n_sigma": RowParams(1.0, thinning=Thinning(1.0)),
    "typical_p": RowParams(1.0, thinning=Thinning(typical_p=0.9)),
    "xtc": RowParams(1.0, thinning=Thinning(xtc_threshold=0.1)),
    "typical min_p": RowParams(1.0, min_p=0.05, thinning=Thinning(0.0, 0.9, 0.1)),
    "dynatemp": RowParams(1.5, adapting=Adapting(0.5)),
    "mirostat 1": RowParams(1.0, adapting=Adapting(mirostat=1, mu=10.0)),
    "mirostat 2": RowParams(1.0, adapting=Adapting(mirostat=2, mu=10.0)),
    "adaptive": RowParams(1.0, target=0.5),
    "adaptive min_p": RowParams(1.0, min_p=0.02, target=0.5),
    "logprobs": RowParams(num_logprobs=5),
    EVERYTHING: RowParams(1.0, 50, 0.9, num_logprobs=5, min_p=0.05),
}
ENGINE_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "typical_p": {"typical_p": 0.9},
    "xtc": {"xtc_probability": 1.0},
    "typical min_p": {"min_p": 0.05, "typical_p": 0.9, "xtc_probability": 1.0},
    "dynatemp": {"dynatemp_range": 0.5},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "adaptive": {"adaptive_target": 0.5},
    "adaptive min_p": {"adaptive_target": 0.5, "min_p": 0.02},
    "window": {"temperature": 0.0, "repetition_penalty": 1.1, "repeat_last_n": 64},
    "dry": {"temperature": 0.0, "dry_multiplier": 0.8, "dry_sequence_breakers": ()},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    EVERYTHING: {
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": dict.fromkeys(range(300), 1.0),
        "stop_token_ids": tuple(range(10)),
        "min_tokens": 20,
        "logprobs": 5,
    },
}


def make_logits(kind: str, rows: int, vocab: int) -> Floats:
    """Logits of which some tens of tokens hold nearly all probability, or of which none does."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (rows, vocab)).astype(np.float32)
    if kind == "peaked":
        logits[:, : vocab : vocab // 30] += 14.0
    return logits


def make_row(mode: str, number: int, vocab: int) -> RowParams:
    """The parameters of one row."""
    rng = np.random.default_rng(number)
    row = MODES[mode]._replace(uniform=float(rng.random()))
    if mode != EVERYTHING:
        return row
    tokens = rng.permutation(vocab)[: 2 * NUM_PENALIZED + 100].astype(np.int64)
    edits = RowEdits(
        bias_ids=tokens[:300],
        bias=np.ones(300, np.float32),
        banned=tokens[-100:],
        seen=tokens[300 : 300 + NUM_PENALIZED],
        counts=np.ones(NUM_PENALIZED, np.float32),
        repetition=1.1,
        presence=0.5,
        frequency=0.5,
    )
    mask = rng.integers(0, 1 << 32, -(-vocab // 32), np.uint32)  # allows half of the tokens
    return row._replace(edits=edits, mask=mask)


def measure(sample: Callable[..., Any], logits: Floats, rows: list[RowParams]) -> float:
    """Return the median milliseconds of a call, for at least half a second of them."""
    times: list[float] = []
    while sum(times) < 0.5 or len(times) < 3:
        start = time.perf_counter()
        sample(logits, rows)
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def measure_calls(options: argparse.Namespace) -> None:
    """Print the milliseconds of a call."""
    native = native_sampler(options.threads)
    samplers: dict[str, Any] = {"native": native} if native else {}
    if options.numpy or not native:
        samplers["NumPy"] = numpy_sampler
    if native:
        print(f"native: {native.isa}, {native.num_threads} threads")
    print(f"vocabulary {options.vocab}, median milliseconds of a call\n")
    print(f"{'logits':8}{'sampling':14}{'rows':>5}" + "".join(f"{name:>10}" for name in samplers))
    for kind in ("peaked", "flat"):
        logits = make_logits(kind, max(options.rows), options.vocab)
        for mode in MODES:
            for rows in options.rows:
                params = [make_row(mode, number, options.vocab) for number in range(rows)]
                cells = [measure(one.sample, logits[:rows], params) for one in samplers.values()]
                text = "".join(f"{cell:10.2f}" for cell in cells)
                print(f"{kind:8}{mode:14}{rows:5}{text}", flush=True)


class Clock:
    """Adds up the seconds that a function takes."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.seconds = 0.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function."""
        start = time.perf_counter()
        result = self.call(*args, **named)
        self.seconds += time.perf_counter() - start
        return result


def decode(engine: Engine, params: SamplingParams, rows: int, steps: int) -> tuple[float, float]:
    """Return the median seconds of a step with every row decoding, and of its sampling."""
    for index in range(rows):
        prompt = [(7 * index + i) % 1000 + 1000 for i in range(PROMPT_TOKENS)]
        engine.submit(engine.prepare(str(index), prompt, params))
    while len(engine.step()) < rows:  # until every request gets a token in one step
        pass
    clock = Clock(sampling.sample_step)
    sampling.sample_step = clock
    times, parts = [], []
    for _ in range(steps):
        clock.seconds = 0.0
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
        parts.append(clock.seconds)
    sampling.sample_step = clock.call
    for index in range(rows):
        engine.abort(str(index))
    return median(times), median(parts)


def measure_steps(options: argparse.Namespace) -> None:
    """Print the share that sampling has in the steps of an engine."""
    rows = max(options.rows)
    length = PROMPT_TOKENS + 3 * options.steps + 64
    load = LoadOptions(options.threads, kv_cache_tokens=2 * rows * length, max_model_len=length)
    engine = open_engine(
        options.artifact, options.provider, load, EngineConfig(rows, max(512, rows))
    )
    print(f"{options.artifact}, {rows} rows, medians of {options.steps} steps\n")
    print(f"{'sampling':14}{'step ms':>9}{'sample ms':>11}{'share':>8}")
    for mode, fields in ENGINE_MODES.items():
        params = SamplingParams(
            **{"seed": 0, **fields}, ignore_eos=True, max_tokens=2 * options.steps + 32
        )
        step, part = decode(engine, params, rows, options.steps)
        print(f"{mode:14}{1e3 * step:9.2f}{1e3 * part:11.2f}{100 * part / step:7.1f}%", flush=True)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--threads", type=int, help="of the model too; else the physical cores")
    parser.add_argument("--no-numpy", dest="numpy", action="store_false")
    parser.add_argument("--artifact", type=Path, help="measure an engine's steps with this model")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    options.rows = options.rows or ([32] if options.artifact else [1, 8, 32])
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    if options.artifact:
        measure_steps(options)
    else:
        measure_calls(options)


if __name__ == "__main__":
    main()
