"""Sweeps: one question, many small runs; each returns lines to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import get_args

from benchmarks.simulate.bounds import (
    Measured,
    decode_under_prompts,
    prefill_under_decode,
    prompt_beside_tenants,
)
from benchmarks.simulate.driver import simulate
from benchmarks.simulate.figures import Figures
from benchmarks.simulate.scenarios import Scenario, chat, flood, mixed
from onnxport.serving.config import SchedulingPolicy

Line = dict[float, float]  # x -> y
Lines = dict[str, Line]  # by what the legend says
POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
RATES = (0.5, 1.0, 1.5, 1.75, 2.0, 2.25, 2.5)  # requests a second
FLOOD_RATES = (1.0, 2.0, 3.0, 3.5, 4.0, 6.0)
POOLS = (256, 512, 1024, 2048, 4096, 8192)  # blocks
PROMPTS = (50, 500, 1000, 1500, 2000, 3000, 4000)  # tokens


def _sweep(
    scenario: Callable[[float], Scenario], values: Iterable[float], size: int, seed: int
) -> dict[float, Figures]:
    return {value: simulate(scenario(value), size, seed) for value in values}


def _line(runs: dict[float, Figures], figure: Callable[[Figures], float]) -> Line:
    return {value: figure(run) for value, run in runs.items()}


def load(size: int, seed: int) -> dict[str, Lines]:
    """Latency of short requests beside long ones, by load and policy."""
    ttft: Lines = {}
    gaps: Lines = {}
    for policy in POLICIES:
        runs = _sweep(lambda rate, policy=policy: mixed(rate, policy), RATES, size, seed)
        ttft[f"{policy}, p50"] = _line(runs, lambda run: run.tenants["chat"].ttft_s.p50)
        ttft[f"{policy}, p99"] = _line(runs, lambda run: run.tenants["chat"].ttft_s.p99)
        gaps[f"{policy}, p50"] = _line(runs, lambda run: run.inter_token_s.p50)
        gaps[f"{policy}, p99"] = _line(runs, lambda run: run.inter_token_s.p99)
    return {"ttft": ttft, "inter-token": gaps}


def cache(size: int, seed: int) -> dict[str, Lines]:
    """What prefix caching brings to chats, by the size of the pool."""

    def sized(num_blocks: float) -> Scenario:
        return replace(chat(), num_blocks=int(num_blocks), max_model_len=3072)

    cached = _sweep(sized, POOLS, size, seed)
    plain = _sweep(
        lambda blocks: sized(blocks).configured(enable_prefix_caching=False), POOLS, size, seed
    )
    tokens = {int(16 * blocks): blocks for blocks in POOLS}
    hits = {float(count): cached[blocks].hit_rate for count, blocks in tokens.items()}
    ttft: Lines = {}
    for name, runs in (("on", cached), ("off", plain)):
        for level in ("p50", "p99"):
            ttft[f"{name}, {level}"] = {
                float(count): getattr(runs[blocks].ttft_s, level)
                for count, blocks in tokens.items()
            }
    return {"hits": {"hit rate": hits}, "ttft": ttft}


def fairness(size: int, seed: int) -> dict[str, Lines]:
    """What becomes of tenants that send little while another one floods."""
    ttft: Lines = {}
    refused: Lines = {}

    def light(run: Figures, level: str) -> float:
        return max(
            getattr(figures.ttft_s, level)
            for name, figures in run.tenants.items()
            if name != "flood"
        )

    for policy in ("fcfs", "fair"):
        runs = _sweep(lambda rate, policy=policy: flood(policy, rate), FLOOD_RATES, size, seed)
        ttft[f"{policy}, p50"] = _line(runs, lambda run: light(run, "p50"))
        ttft[f"{policy}, p99"] = _line(runs, lambda run: light(run, "p99"))
        refused[policy] = _line(runs, lambda run: run.refused)
    return {"ttft": ttft, "refused": refused}


def bounds() -> dict[str, Lines]:
    """The bounds of the scheduler, and what was seen in their worst cases."""
    prefill: Lines = {}
    for rows in (64, 256, 448):
        _add(prefill, f"{rows} rows", {n: prefill_under_decode([n], rows, 512) for n in PROMPTS})
    gaps: Lines = {}
    for rows in (64, 256):
        points = {n: decode_under_prompts(n, rows, 512)[0] for n in PROMPTS}
        _add(gaps, f"{rows} rows", points)
    turns: Lines = {}
    numbers = range(1, 9)
    fair = {n: prompt_beside_tenants(100, "fair", n) for n in numbers}
    fcfs = {float(n): prompt_beside_tenants(100, "fcfs", n).seen for n in numbers}
    _add(turns, "fair", fair)
    turns["fcfs, seen"] = fcfs
    return {"prefill": prefill, "inter-token": gaps, "turns": turns}


def _add(lines: Lines, name: str, points: dict[int, Measured]) -> None:
    lines[f"{name}, seen"] = {float(x): point.seen for x, point in points.items()}
    lines[f"{name}, bound"] = {float(x): point.bound for x, point in points.items()}
