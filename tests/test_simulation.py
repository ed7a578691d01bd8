"""The engine under simulated load: every scenario in small, and the scheduler's stated bounds.

Time is virtual, so everything here is exact and the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from benchmarks.simulate.bounds import (
    Lab,
    decode_under_prompts,
    prefill_under_decode,
    prompt_beside_tenants,
    starts_before,
)
from benchmarks.simulate.cost import CostModel
from benchmarks.simulate.driver import simulate
from benchmarks.simulate.figures import Figures, entitled, jain
from benchmarks.simulate.plots import FIGURES, draw
from benchmarks.simulate.scenarios import SCENARIOS, chat, contention, flood, mixed, uncached
from benchmarks.simulate.traffic import Lengths, Stream, next_turns
from onnxport.serving.config import EngineConfig
from tests.tiers import every

REQUESTS = 200


# Scenarios. `simulate` itself checks the engine's invariants at the end, and that nobody is left.


@pytest.mark.parametrize("name", every(4, SCENARIOS))
def test_every_request_ends_once(name: str) -> None:
    scenario = SCENARIOS[name]
    run = simulate(scenario, REQUESTS)
    assert sum(run.finished.values()) + run.gave_up == REQUESTS
    assert set(run.finished) == {"length"}
    assert sum(tenant.finished for tenant in run.tenants.values()) == REQUESTS - run.gave_up
    assert 0 < run.most_step_tokens <= scenario.config.max_num_batched_tokens
    assert run.ttft_s.p50 <= run.ttft_s.p90 <= run.ttft_s.p99 <= run.ttft_s.most <= run.virtual_s


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures() -> None:
    def figures(seed: int) -> Figures:
        return replace(simulate(chat(), REQUESTS, seed), real_s=0.0)

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_an_idle_engine_takes_what_the_cost_model_says() -> None:
    stream = Stream(0.001, Lengths(100, 0.0), Lengths(3, 0.0))
    scenario = replace(chat(), streams=(stream,))
    cost = CostModel()
    prefill_s = cost.seconds(100, 1, 100, 100 * 101 // 2)
    run = simulate(scenario, 3)
    assert run.steps == 9
    assert run.ttft_s.most == pytest.approx(prefill_s, abs=1e-9)
    assert run.inter_token_s.most == pytest.approx(cost.seconds(1, 1, 102, 102), rel=1e-6)


def test_prefix_caching_computes_less_and_answers_sooner() -> None:
    cached = simulate(chat(), REQUESTS)
    plain = simulate(uncached(chat()), REQUESTS)
    assert cached.hit_rate > 0.7
    assert plain.hit_rate == 0.0
    for run in (cached, plain):
        hits = round(run.hit_rate * run.prompt_tokens)
        decoded = run.output_tokens - REQUESTS  # a last token is never computed
        assert run.computed_tokens == run.prompt_tokens + decoded - hits
    assert cached.ttft_s.p50 < plain.ttft_s.p50 / 2


def test_preempted_requests_are_swapped_or_computed_again() -> None:
    swap, recompute = (
        simulate(SCENARIOS[f"tight-{how}"], REQUESTS) for how in ("swap", "recompute")
    )
    assert swap.preemptions > 0
    assert swap.blocks_loaded > 0
    assert recompute.preemptions > 0
    assert recompute.blocks_loaded == 0
    assert recompute.computed_tokens > recompute.prompt_tokens + recompute.output_tokens
    assert swap.computed_tokens < recompute.computed_tokens


def test_refused_clients_try_again_until_their_patience_ends() -> None:
    scenario = replace(contention("fcfs"), config=EngineConfig(max_queued_requests=8))
    run = simulate(scenario, REQUESTS)
    assert run.refused > run.gave_up > 0
    assert sum(run.finished.values()) == REQUESTS - run.gave_up
    hasty = replace(scenario, streams=tuple(replace(one, patience=1) for one in scenario.streams))
    run = simulate(hasty, REQUESTS)
    assert run.refused == run.gave_up > 0


@pytest.mark.slow
def test_priorities_spare_short_requests_the_wait_behind_long_ones() -> None:
    fcfs, priority = (simulate(mixed(1.5, policy), 400) for policy in ("fcfs", "priority"))
    assert priority.tenants["chat"].ttft_s.p99 < fcfs.tenants["chat"].ttft_s.p99 / 2


@pytest.mark.slow
def test_fair_turns_spare_light_tenants_the_flood() -> None:
    for policy, spared in (("fcfs", False), ("fair", True)):
        run = simulate(flood(policy), 800)
        heavy = run.tenants["flood"].ttft_s.p50
        light = [run.tenants[f"light-{k}"].ttft_s.p99 for k in (1, 2, 3)]
        assert (max(light) < heavy / 4) == spared, (policy, light, heavy)


@pytest.mark.slow
def test_fair_turns_give_equal_shares_under_contention() -> None:
    fcfs, fair = (simulate(contention(policy), 1000).jain for policy in ("fcfs", "fair"))
    assert fair > 0.99
    assert fcfs < 0.9


# Traffic and figures.


def test_conversations_go_on_from_what_was_said() -> None:
    stream = replace(chat().streams[0], continues=1.0, branches=1.0)
    [first] = islice(stream.jobs(3), 1)
    turns = list(next_turns(first, 10.0, longest=8192))
    assert len(turns) == 2
    history = len(first.prompt) + first.output_tokens
    for turn in turns:
        assert turn.prompt[: len(first.prompt)] == first.prompt
        assert len(turn.prompt) > history
        assert turn.arrival_s > 10.0
    assert turns[0].prompt[:history] == turns[1].prompt[:history]
    assert turns[0].prompt != turns[1].prompt
    assert not list(next_turns(first, 10.0, longest=history))


def test_bursts_pause() -> None:
    stream = Stream(10.0, Lengths(1, 0.0), Lengths(1, 0.0), on_s=10.0, off_s=100.0)
    times = [job.arrival_s for job in islice(stream.jobs(0), 2000)]
    assert times == sorted(times)
    gaps = [after - before for before, after in pairwise(times)]
    assert sorted(gaps)[len(gaps) // 2] < 0.2
    assert sum(gap > 20.0 for gap in gaps) >= 5


def test_fairness_measures() -> None:
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert entitled([1.0, 100.0, 100.0], 21.0) == [1.0, 10.0, 10.0]
    assert entitled([1.0, 2.0], 10.0) == [1.0, 2.0]


# The bounds in the docstring of serving/planner.py.


@pytest.mark.parametrize(("rows", "budget_tokens"), [(64, 512), (60, 64), (8, 32), (1, 16)])
@pytest.mark.parametrize("length", every(3, [1, 15, 449, 450, 1500]))
def test_a_prompt_is_computed_in_time_while_all_others_decode(
    length: int, rows: int, budget_tokens: int
) -> None:
    measured = prefill_under_decode([length], rows, budget_tokens)
    assert measured.seen == measured.bound  # with every other row decoding nothing is to spare


@pytest.mark.parametrize("ahead", [[300, 100], [5000], [1] * 20, [37] * 9])
def test_prompts_ahead_cost_no_more_than_their_tokens(ahead: list[int]) -> None:
    for rows, budget_tokens in ((64, 512), (30, 32)):
        measured = prefill_under_decode([*ahead, 50], rows, budget_tokens)
        assert measured.seen <= measured.bound
        most = (sum(ahead) + 50) / (budget_tokens - rows + 1 + len(ahead))
        assert measured.seen >= math.floor(most)  # more prompts, fewer rows that decode


def test_each_prompt_ahead_with_a_common_beginning_may_cost_one_step_more() -> None:
    lab = Lab(rows=64, budget_tokens=512)
    for number in range(1, 11):  # each goes on by a block from where the one before it ends
        lab.submit(f"{number}", [*range(16 * number), 0], 1)
    assert lab.steps_to_first_token("10") == 10
    assert sum(record.num_tokens for record in lab.records) == 160 + 10


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("length", [30, 700, 5000])
def test_a_flood_of_prompts_delays_a_token_by_one_full_step_at_most(rows: int, length: int) -> None:
    measured, fewest, most_tokens = decode_under_prompts(length, rows, budget_tokens=256)
    assert fewest >= rows // 2  # each that decodes gets a token in each step
    assert most_tokens == min(256, rows // 2 * (length + 1))  # no more than are there
    assert measured.seen <= measured.bound
    assert measured.seen > measured.bound / 2 or most_tokens < 256


@pytest.mark.parametrize("num_others", [1, 2, 5])
@pytest.mark.parametrize("length", every(3, [1, 16, 17, 100]))
@pytest.mark.parametrize("warm_steps", every(2, [1, 2, 4, 7]))
def test_fair_turns_bound_a_prompt_beside_floods(
    num_others: int, length: int, warm_steps: int
) -> None:
    fair = prompt_beside_tenants(length, "fair", num_others, warm_steps=warm_steps)
    assert fair.seen <= fair.bound


@pytest.mark.slow
def test_without_fair_turns_a_prompt_waits_for_the_whole_flood() -> None:
    fcfs = prompt_beside_tenants(100, "fcfs")
    assert fcfs.seen > 10 * fcfs.bound


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(10, 10), (100, 20), (1000, 20)])
def test_a_tenant_without_a_row_gets_the_next_one(
    rows: int, prompt_tokens: int, output_tokens: int
) -> None:
    assert starts_before("fair", rows, prompt_tokens, output_tokens) == 0


def test_without_fair_turns_the_flood_takes_the_rows_first() -> None:
    assert starts_before("fcfs", 4, 100, 20) == 8  # all that were in the queue


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_a_study_is_drawn_as_a_small_svg(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the bench extra)")
    line = {1.0: 1.0, 2.0: 3.0}
    panels = FIGURES[name]
    draw(name, {panel.lines: {"a, seen": line, "a, bound": line} for panel in panels}, tmp_path)
    text = (tmp_path / f"{name}.svg").read_text()
    assert all(panel.title in text for panel in panels)
    assert "<image" not in text  # nothing is rasterised
    assert len(text) < 200_000
