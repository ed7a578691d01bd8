"""Sweeps: one question, many small runs; each returns lines to draw."""

from __future__ import annotations

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
from benchmarks.simulate.scenarios import chat, contention, flood, mixed, uncached
from onnxport.serving.config import EngineConfig, SchedulingPolicy

Line = dict[float, float]  # x -> y
Lines = dict[str, Line]  # by what the legend says
POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
RATES = (0.5, 1.0, 1.5, 1.75, 2.0, 2.25, 2.5)  # requests a second
FLOOD_RATES = (1.0, 2.0, 3.0, 3.5, 4.0, 6.0)
QUEUES = (16, 64, 256, 1024, 4096)  # requests
POOLS = (256, 512, 1024, 2048, 4096, 8192)  # blocks
PROMPTS = (50, 500, 1000, 1500, 2000, 3000, 4000)  # tokens


def load(size: int, seed: int) -> dict[str, Lines]:
    """Latency of short requests beside long ones, by load and policy."""
    ttft: Lines = {}
    gaps: Lines = {}
    for policy in POLICIES:
        runs = {rate: simulate(mixed(rate, policy), size, seed) for rate in RATES}
        times = {rate: run.tenants["chat"].ttft_s for rate, run in runs.items()}
        ttft[f"{policy}, p50"] = {rate: one.p50 for rate, one in times.items()}
        ttft[f"{policy}, p99"] = {rate: one.p99 for rate, one in times.items()}
        gaps[f"{policy}, p50"] = {rate: run.inter_token_s.p50 for rate, run in runs.items()}
        gaps[f"{policy}, p99"] = {rate: run.inter_token_s.p99 for rate, run in runs.items()}
    return {"ttft": ttft, "inter-token": gaps}


def cache(size: int, seed: int) -> dict[str, Lines]:
    """What prefix caching brings to chats, by the size of the pool."""
    hits: Lines = {}
    ttft: Lines = {}
    for name in ("on", "off"):
        runs: dict[float, Figures] = {}
        for num_blocks in POOLS:
            scenario = replace(chat(), num_blocks=num_blocks, max_model_len=3072)
            scenario = scenario if name == "on" else uncached(scenario)
            runs[num_blocks * scenario.block_size] = simulate(scenario, size, seed)
        hits[name] = {tokens: run.hit_rate for tokens, run in runs.items()}
        ttft[f"{name}, p50"] = {tokens: run.ttft_s.p50 for tokens, run in runs.items()}
        ttft[f"{name}, p99"] = {tokens: run.ttft_s.p99 for tokens, run in runs.items()}
    return {"hits": hits, "ttft": ttft}


def fairness(size: int, seed: int) -> dict[str, Lines]:
    """Light tenants beside a flood; shares of tenants that all want more than theirs."""
    ttft: Lines = {}
    jain: Lines = {}
    policies: tuple[SchedulingPolicy, ...] = ("fcfs", "fair")
    for policy in policies:
        runs = {rate: simulate(flood(policy, rate), size, seed) for rate in FLOOD_RATES}
        light = {
            rate: [one.ttft_s for name, one in run.tenants.items() if name != "flood"]
            for rate, run in runs.items()
        }
        ttft[f"{policy}, p50"] = {rate: max(one.p50 for one in light[rate]) for rate in light}
        ttft[f"{policy}, p99"] = {rate: max(one.p99 for one in light[rate]) for rate in light}
        jain[policy] = {}
        for queued in QUEUES:
            config = EngineConfig(scheduling_policy=policy, max_queued_requests=queued)
            scenario = replace(contention(policy), config=config)
            jain[policy][queued] = simulate(scenario, size, seed).jain
    return {"ttft": ttft, "jain": jain}


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
