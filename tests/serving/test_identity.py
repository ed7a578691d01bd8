"""Identical tokens, however a fixed set of requests is computed; on the null provider."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from tests.serving.helpers import alone, null_engine, reasons, run, submit, tokens
from tests.tiers import every

_random = random.Random(5)
SYSTEM = [_random.randrange(512) for _ in range(37)]
OTHER = [_random.randrange(512) for _ in range(18)]
PROMPTS = [
    SYSTEM,
    SYSTEM[:-1],
    [*SYSTEM, *OTHER],
    [*SYSTEM, *OTHER, 1, 2, 3],
    [*SYSTEM[:16], *OTHER],
    [*SYSTEM[:17], *OTHER],
    [*SYSTEM, *SYSTEM],
    [*OTHER, *SYSTEM],
    OTHER,
    [7],
    [7] * 40,
    [*OTHER[:3], *OTHER, 4],
]
MIXES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"min_p": 0.2, "presence_penalty": -1.5, "logit_bias": {3: 4.0, 7: -100}},
    {"allowed_token_ids": range(0, 512, 7), "frequency_penalty": 1.5},
    {"top_k": 40, "repetition_penalty": 0.8, "presence_penalty": 2.0},
    {"dry_multiplier": 2.0, "dry_sequence_breakers": (), "typical_p": 0.9, "xtc_probability": 0.5},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3, "frequency_penalty": 0.5},
    {"dynatemp_range": 0.7, "top_p": 0.9, "repetition_penalty": 1.3, "repeat_last_n": 6},
    {"adaptive_target": 0.3, "adaptive_decay": 0.7, "frequency_penalty": 0.5},
    {"mirostat": 1, "mirostat_tau": 4.0, "allowed_token_ids": range(0, 512, 3)},
]
PARAMS = [
    SamplingParams(
        **MIXES[index % len(MIXES)],
        temperature=[0.0, 1.0][index % 2],
        seed=index,
        max_tokens=[30, 9, 1][index % 3],
        n=[1, 1, 1, 3][index % 4],
    )
    for index in range(len(PROMPTS))
]
Completions = dict[str, list[list[int]]]


def submit_all(engine: Engine, prefix: str = "") -> None:
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        submit(engine, f"{prefix}{index}", prompt, params)


def check_all(engine: Engine, prefix: str = "") -> None:
    """Run what was submitted; every completion must be what it is alone."""
    deltas = run(engine)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        found = deltas[f"{prefix}{index}"]
        assert reasons(found) == ["length"] * params.n
        for number in range(params.n):
            assert tokens(found, number) == alone(prompt, params, number), (index, number)


FEW = (3, 7, 16, 64)
BUDGETS = [
    pytest.param(budget, marks=[] if budget in FEW else pytest.mark.slow)  # all: 20 s
    for budget in range(3, 65)
]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_step_size(budget: int, caching: bool) -> None:
    engine = null_engine(
        num_blocks=200,
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    submit_all(engine)
    check_all(engine)


@pytest.mark.parametrize("rows", [3, 8, 32])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 32])
def test_every_number_of_rows_and_size_of_blocks(rows: int, block_size: int) -> None:
    engine = null_engine(
        num_blocks=-(-400 // block_size),
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, 24),
    )
    submit_all(engine)
    check_all(engine)


TIERS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "no cache": {"enable_prefix_caching": False},
    "swap": {"preemption": "swap", "kv_host_memory": 1 << 20},
    "swap to little": {"preemption": "swap", "kv_host_memory": 1000},
    "recompute beside a tier": {"preemption": "recompute", "kv_host_memory": 1 << 20},
    "auto": {"kv_host_memory": 1 << 20},
}


@pytest.mark.parametrize("tiers", every(2, TIERS))
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize(
    "num_blocks", [27, *(pytest.param(more, marks=pytest.mark.slow) for more in (33, 45))]
)
def test_every_preemption_in_a_tiny_pool(num_blocks: int, policy: Any, tiers: str) -> None:
    engine = null_engine(num_blocks=num_blocks, scheduling_policy=policy, **TIERS[tiers])
    submit_all(engine)
    check_all(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    if tiers == "swap":
        assert stats.num_blocks_loaded > 0
    engine.close()


def test_cold_and_warm() -> None:
    engine = null_engine(num_blocks=400)
    for turn in "abc":
        submit_all(engine, turn)
        check_all(engine, turn)
    assert engine.stats().prefix_cache_hits > engine.stats().prefix_cache_queries // 2


@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_after_a_restart(tmp_path: Path, block_size: int) -> None:
    options: dict[str, Any] = {
        "num_blocks": 12,
        "kv_host_memory": 2000,
        "kv_disk": tmp_path,
        "preemption": "swap",
    }
    engine = null_engine(block_size=16, **options)
    submit_all(engine)
    check_all(engine)
    engine.close()
    engine = null_engine(block_size=block_size, **options | {"num_blocks": 9})
    submit_all(engine)
    check_all(engine)
    assert engine.stats().num_blocks_loaded > 0
    assert engine.stats().num_tier_errors == 0
    engine.close()
