"""Who goes first: priorities, deadlines, tenants, suspects, loading; exact rows, no model."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.config import SchedulingPolicy
from onnxport.serving.room import NO_ROOM
from onnxport.serving.step_plan import StepPlan
from onnxport.serving.waiting import NO_BARS, Bars
from tests.serving.bench import Bench, group, make_request, name_of, names, rows
from tests.tiers import examples

PREFIX = list(range(100, 112))


# Priorities.


def test_lower_priority_numbers_start_first() -> None:
    bench = Bench(num_blocks=40, rows=3, policy="priority")
    for name, priority in (("c", 5), ("a", -1), ("d", 5), ("b", 0)):
        bench.submit(name, 3, priority=priority)
    assert names(bench.step().requests) == ["a", "b", "c"]


def test_priorities_mean_nothing_to_other_policies() -> None:
    bench = Bench(num_blocks=40, policy="fcfs")
    bench.submit("a", 3, priority=9)
    bench.submit("b", 3, priority=0)
    assert names(bench.step().requests) == ["a", "b"]


def test_a_prompt_of_a_higher_priority_gets_the_tokens_before_one_that_has_begun() -> None:
    bench = Bench(num_blocks=40, budget=8, policy="priority")
    bench.submit("low", 20, priority=1)
    assert rows(bench.step()) == [("low", 0, 8)]
    bench.submit("high", 10, priority=0)
    assert rows(bench.step()) == [("high", 0, 8)]
    assert rows(bench.step()) == [("high", 8, 2), ("low", 8, 6)]


def test_lower_priorities_yield_for_a_row() -> None:
    bench = Bench(num_blocks=40, rows=2, policy="priority")
    bench.submit("low", 3, priority=2)
    bench.submit("lower", 3, priority=3)
    bench.step()
    bench.submit("high", 3, priority=0)
    plan = bench.step()
    assert names(plan.preempted) == ["lower"]
    assert rows(plan) == [("low", 3, 1), ("high", 0, 3)]
    bench.submit("same", 3, priority=2)
    plan = bench.step()  # equals do not yield
    assert (names(plan.preempted), len(rows(plan))) == ([], 2)


def test_the_newest_of_the_lowest_yield_for_blocks_and_no_more_than_needed() -> None:
    bench = Bench(num_blocks=6, policy="priority")
    for name in ("a", "b", "c"):
        bench.submit(name, 7, priority=1)
    bench.step()
    bench.submit("high", 10, priority=0)  # three blocks: two requests have to yield
    plan = bench.step()
    assert names(plan.preempted) == ["c", "b"]
    assert rows(plan) == [("a", 7, 1), ("high", 0, 10)]
    assert names(list(bench.scheduler.requests())) == ["high", "a", "b", "c"]


def test_copies_of_shared_blocks_leave_less_room() -> None:
    bench = Bench(num_blocks=10, policy="priority")
    bench.submit("n", 6, n=4, priority=0)  # of its two blocks the last one is copied three times
    bench.submit("low", 7, priority=1)
    bench.step()
    bench.submit("high", 16, priority=0)  # four of six blocks that are free now
    plan = bench.step()
    assert names(plan.preempted) == ["low"]
    assert rows(plan) == [("n", 6, 1), ("n1", 6, 1), ("n2", 6, 1), ("n3", 6, 1), ("high", 0, 12)]


def test_who_yields_copies_nothing() -> None:
    bench = Bench(num_blocks=6, policy="priority")
    bench.submit("n", 6, n=4, priority=1)
    bench.step()
    bench.submit("high", 12, priority=0)
    plan = bench.step()
    assert names(plan.preempted) == ["n3", "n2"]
    assert (len(plan.copied), rows(plan)[-1]) == (1, ("high", 0, 12))


def test_nobody_yields_where_it_does_not_help() -> None:
    bench = Bench(num_blocks=6, budget=32, policy="priority")
    bench.submit("first", 15, priority=0)  # four of six blocks
    bench.submit("low", 7, priority=1)
    bench.step()
    bench.submit("high", 11, priority=0)  # three blocks: with those of `low` there would be two
    plan = bench.step()
    assert names(plan.preempted) == []
    assert rows(plan) == [("first", 15, 1), ("low", 7, 1)]


def test_nobody_yields_when_a_decode_takes_what_they_would_give() -> None:
    bench = Bench(num_blocks=6, budget=32, policy="priority")
    bench.submit("first", 4, priority=0)  # its block is full: the next token takes another
    bench.submit("low", 14, priority=1)  # four blocks
    bench.step()
    bench.submit("high", 20, priority=0)  # five blocks, of which four would be left
    plan = bench.step()
    assert names(plan.preempted) == []
    assert rows(plan) == [("first", 4, 1), ("low", 14, 1)]
    bench.finish("first")
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == (["low"], [("high", 0, 20)])


def test_nobody_yields_for_blocks_that_are_shared() -> None:
    bench = Bench(num_blocks=5, policy="priority")
    bench.submit("low", [*PREFIX, 1], priority=1, cached=True)
    bench.step()
    bench.submit("high", [*PREFIX, 2], priority=0, cached=True)
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == ([], [("low", 13, 1), ("high", 12, 1)])


def test_what_yields_leaves_its_blocks_to_be_shared() -> None:
    bench = Bench(num_blocks=4, rows=1, policy="priority")
    bench.submit("low", [*PREFIX, 1], priority=1, cached=True)
    bench.step()
    bench.submit("high", [*PREFIX, 2], priority=0, cached=True)
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == (["low"], [("high", 12, 1)])
    assert bench.blocks("high") == [0, 1, 2, 3]
    bench.finish("high")
    assert rows(bench.step()) == [("low", 12, 2)]


def test_a_decode_takes_blocks_of_lower_priorities() -> None:
    bench = Bench(num_blocks=2, policy="priority")
    bench.submit("low", 4, priority=1)
    bench.submit("high", 4, priority=0)
    assert rows(bench.step()) == [("high", 0, 4), ("low", 0, 4)]
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == (["low"], [("high", 4, 1)])


# Deadlines.


def test_an_earlier_deadline_goes_first_within_a_priority() -> None:
    bench = Bench(num_blocks=40, rows=3, policy="priority")
    bench.submit("none", 3)
    bench.submit("late", 3, timeout_s=20)
    bench.submit("soon", 3, timeout_s=5, arrival_s=10.0)
    bench.submit("low", 3, timeout_s=1, priority=1)
    assert names(bench.step().requests) == ["soon", "late", "none"]


# Tenants.


def shares_of(plan: StepPlan) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for request, tokens in zip(plan.requests, plan.num_new, strict=True):
        counts[request.options.tenant] += tokens
    return dict(counts)


def test_tenants_take_turns_of_a_quarter_of_the_budget() -> None:
    bench = Bench(num_blocks=90, budget=16, policy="fair")
    for index in range(3):
        bench.submit(f"a{index}", 30, tenant="a")
    bench.submit("b", 60, tenant="b")
    assert rows(bench.step()) == [("a0", 0, 8), ("b", 0, 8)]
    assert rows(bench.step()) == [("a0", 8, 8), ("b", 8, 8)]
    bench.submit("c", 20, tenant="c")
    totals: Counter[str] = Counter()
    for _ in range(3):
        totals.update(shares_of(bench.step()))
    assert totals == {"a": 16, "b": 16, "c": 16}


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    bench = Bench(num_blocks=200, rows=8, budget=16, policy="fair")
    for index in range(5):
        bench.submit(f"a{index}", 64, tenant="a")
    bench.step()
    bench.submit("b", 8, tenant="b")
    assert shares_of(bench.step()) == {"a": 8, "b": 8}
    other = Bench(num_blocks=200, rows=8, budget=16, policy="fcfs")
    for index in range(5):
        other.submit(f"a{index}", 64, tenant="a")
    other.step()
    other.submit("b", 8, tenant="b")
    assert shares_of(other.step()) == {"a": 16}


def test_one_tenant_alone_is_not_limited() -> None:
    bench = Bench(num_blocks=40, budget=16, policy="fair")
    bench.submit("a", 40, tenant="a")
    assert rows(bench.step()) == [("a", 0, 16)]


def test_who_decodes_while_others_wait_pays_for_it() -> None:
    bench = Bench(num_blocks=200, rows=2, budget=8, policy="fair")
    bench.submit("a", 2, tenant="a")
    bench.submit("a'", 2, tenant="a")
    bench.step()
    bench.submit("b", 40, tenant="b")  # no row is free
    for _ in range(6):
        assert shares_of(bench.step()) == {"a": 2}
    bench.finish("a")  # twelve tokens of debt
    bench.submit("a2", 40, tenant="a")
    bench.finish("a'")
    served: Counter[str] = Counter({"a": 12})
    for _ in range(4):
        served.update(shares_of(bench.step()))
    assert abs(served["a"] - served["b"]) <= 2 + 4  # a quantum, and what is decoded meanwhile


def test_debts_are_forgotten_with_the_tenant_s_last_request() -> None:
    bench = Bench(num_blocks=200, rows=1, budget=8, policy="fair")
    bench.submit("a", 2, tenant="a")
    bench.step()
    bench.submit("b", 2, tenant="b")
    bench.step()
    assert not bench.scheduler._queues.shares[0].empty
    bench.finish("a", "b")
    assert not bench.scheduler._queues.shares
    assert not bench.scheduler._tenants


def test_priorities_come_before_tenants() -> None:
    bench = Bench(num_blocks=90, budget=16, policy="fair")
    bench.submit("a", 30, tenant="a", priority=1)
    bench.submit("b", 10, tenant="b", priority=0)
    bench.submit("c", 30, tenant="c", priority=1)
    assert rows(bench.step()) == [("b", 0, 10), ("a", 0, 4), ("c", 0, 2)]


@settings(max_examples=examples(30), deadline=None)
@given(
    budget=st.integers(8, 40),
    rest=st.lists(st.tuples(st.integers(1, 40), st.sampled_from("cd")), max_size=12),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=6),
)
def test_two_tenants_that_always_have_prompts_get_the_same(
    budget: int, rest: list[tuple[int, str]], lengths: list[int]
) -> None:
    """Whatever others ask for, with rows for all, the difference is at most a quantum.

    A prompt's last token, when it is left for a step of its own, is charged after the fact.
    """
    bench = Bench(num_blocks=1000, rows=64, budget=max(64, budget), policy="fair")
    bench.scheduler._planner._max_num_batched_tokens = budget
    bench.scheduler._queues.quantum = quantum = budget // 4
    served: Counter[str] = Counter()
    submitted: Counter[str] = Counter()
    unfinished: Counter[str] = Counter()
    for step in range(16):
        for tenant in "ab":
            while unfinished[tenant] < 50:
                length = lengths[(submitted[tenant] + ord(tenant)) % len(lengths)]
                bench.submit(f"{tenant}{submitted[tenant]}", length, tenant=tenant)
                submitted[tenant] += 1
                unfinished[tenant] += length
        if step < len(rest):
            bench.submit(f"{rest[step][1]}{step}", rest[step][0], tenant=rest[step][1])
        plan = bench.step()
        assert plan.num_tokens == budget
        for tenant, tokens in shares_of(plan).items():
            served[tenant] += tokens
            unfinished[tenant] -= tokens
        bench.finish(*(name_of(plan.requests[row]) for row in plan.sampled))
        assert abs(served["a"] - served["b"]) <= quantum + 2


# Suspects of a failed step, and requests whose blocks are on their way.


def test_only_those_that_are_named_take_part() -> None:
    bench = Bench(num_blocks=40)
    for name in "ab":
        bench.submit(name, 3)
    bench.step()
    for name in "cd":
        bench.submit(name, 3)
    assert rows(bench.step(only=["b", "d"])) == [("b", 3, 1), ("d", 0, 3)]
    assert rows(bench.step(only=["c"])) == [("c", 0, 3)]
    assert bench.step(only=[]).requests == ()
    assert rows(bench.step()) == [("a", 3, 1), ("b", 4, 1), ("c", 3, 1), ("d", 3, 1)]


def test_a_suspect_takes_no_blocks_that_others_have_a_claim_to() -> None:
    bench = Bench(num_blocks=8, budget=8)
    bench.submit("a", 20)
    bench.step()
    bench.submit("b", 16)
    assert bench.step(only=["b"]).requests == ()


def test_a_request_whose_blocks_are_loading_keeps_its_row_and_lets_others_pass() -> None:
    bench = Bench(num_blocks=40, rows=2)
    for name in "abc":
        bench.submit(name, 3)
    assert rows(bench.step(loading=["a"])) == [("b", 0, 3)]
    assert rows(bench.step(loading=["a"])) == [("b", 3, 1)]
    assert rows(bench.step()) == [("b", 4, 1), ("a", 0, 3)]


def test_nobody_yields_to_a_request_whose_blocks_are_loading() -> None:
    bench = Bench(num_blocks=40, rows=1, policy="priority")
    bench.submit("low", 3, priority=1)
    bench.step()
    bench.submit("high", 3, priority=0)
    assert rows(bench.step(loading=["high"])) == [("low", 3, 1)]
    assert names(bench.step().preempted) == ["low"]


def test_nobody_yields_for_room_that_another_one_keeps() -> None:
    bench = Bench(num_blocks=8, policy="fair")
    bench.submit("low", 8, priority=1, tenant="y")  # two blocks, and the next token takes one
    bench.step()
    bench.submit("high", 22, priority=0, tenant="y")  # six blocks
    bench.submit("loads", 18, priority=0, tenant="z")  # five; z holds no row: its turn is before
    plan = bench.step(loading=["loads"])
    assert (names(plan.preempted), rows(plan)) == ([], [("low", 8, 1)])
    bench.finish("loads")
    assert names(bench.step().preempted) == ["low"]


def test_nobody_yields_for_rows_that_another_one_keeps() -> None:
    bench = Bench(num_blocks=40, rows=2, policy="fair")
    bench.submit("low", 3, priority=1, tenant="y")
    bench.step()
    bench.submit("high", 3, priority=0, tenant="y", n=2)
    bench.submit("loads", 3, priority=0, tenant="z")
    plan = bench.step(loading=["loads"])
    assert (names(plan.preempted), rows(plan)) == ([], [("low", 3, 1)])


def test_others_yield_to_the_next_one_that_may_start() -> None:
    bench = Bench(num_blocks=40, rows=3, policy="priority")
    for name in ("low", "lower", "lowest"):
        bench.submit(name, 3, priority=5)
    bench.step()
    bench.submit("loads", 3, priority=0)
    bench.submit("high", 3, priority=1)
    bench.submit("also loads", 3, priority=2)  # behind: what it keeps is no matter
    plan = bench.step(loading=["loads", "also loads"])
    assert names(plan.preempted) == ["lowest", "lower"]  # one row is kept for the first
    assert rows(plan) == [("low", 3, 1), ("high", 0, 3)]
    assert rows(bench.step(loading=["also loads"]))[-1] == ("loads", 0, 3)


@pytest.mark.parametrize("rows_", [1, 2])
def test_nobody_yields_for_a_row_that_one_ahead_keeps(rows_: int) -> None:
    bench = Bench(num_blocks=40, rows=rows_, policy="priority")
    bench.submit("low", 3, priority=1)
    bench.step()
    bench.submit("loads", 3, priority=0)
    bench.submit("high", 3, priority=0, n=rows_)
    plan = bench.step(loading=["loads"])
    assert (names(plan.preempted), rows(plan)) == ([], [("low", 3, 1)])


def test_nobody_yields_for_blocks_that_one_ahead_keeps() -> None:
    bench = Bench(num_blocks=8, policy="priority")
    bench.submit("low", 8, priority=1)
    bench.step()
    bench.submit("loads", 18, priority=0)  # five blocks
    bench.submit("high", 14, priority=0)  # four
    plan = bench.step(loading=["loads"])
    assert (names(plan.preempted), rows(plan)) == ([], [("low", 8, 1)])


def test_those_that_run_go_on_where_nobody_would_start_in_their_place() -> None:
    bench = Bench(num_blocks=40, rows=2, policy="fair")
    for name in ("low", "lower"):
        bench.submit(name, 3, priority=1, tenant="x")
    bench.step()
    bench.submit("loads", 3, priority=0, tenant="y")
    bench.submit("high", 3, priority=0, tenant="y")
    bench.submit("wide", 3, priority=0, tenant="z", n=2)  # its turn is before, and one row kept
    for past in (3, 4):
        plan = bench.step(loading=["loads"])
        assert names(plan.preempted) == []
        assert rows(plan) == [("low", past, 1), ("lower", past, 1)]


def test_nobody_yields_where_the_turn_is_of_one_that_does_not_fit() -> None:
    bench = Bench(num_blocks=40, rows=2, policy="fair")
    bench.submit("equal", 3, priority=0, tenant="x")
    bench.submit("low", 3, priority=1, tenant="x")
    bench.step()
    bench.submit("wide", 3, priority=0, tenant="z", n=2)
    bench.submit("urgent", 3, priority=0, tenant="y", timeout_s=1)  # as many rows: it came later
    for past in (3, 4):
        plan = bench.step()
        assert (names(plan.preempted), rows(plan)) == (
            [],
            [("equal", past, 1), ("low", past, 1)],
        )
    bench.finish("equal")
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == (["low"], [("wide", 0, 3)])


def test_others_yield_to_the_one_whose_turn_it_is() -> None:
    bench = Bench(num_blocks=40, rows=3, policy="fair")
    bench.submit("equal", 3, priority=0, tenant="x")
    for name in ("low", "lower"):
        bench.submit(name, 3, priority=1, tenant="x")
    bench.step()
    bench.submit("wide", 3, priority=0, tenant="z", n=2)
    bench.submit("urgent", 3, priority=0, tenant="y", timeout_s=1)
    plan = bench.step()
    assert names(plan.preempted) == ["lower", "low"]
    assert rows(plan) == [("equal", 3, 1), ("wide", 0, 3)]


def test_others_yield_to_as_many_as_the_tokens_are_for_in_one_step() -> None:
    bench = Bench(num_blocks=40, rows=4, budget=10, policy="priority")
    for name in ("a", "b", "c", "d"):
        bench.submit(name, 2, priority=5)
    bench.step()
    for name, priority in (("one", 1), ("two", 1), ("three", 2), ("four", 3)):
        bench.submit(name, 4, priority=priority)
    plan = bench.step()
    assert names(plan.preempted) == ["d", "c", "b"]  # `four` would get no token
    assert rows(plan) == [("a", 2, 1), ("one", 0, 4), ("two", 0, 4), ("three", 0, 1)]
    plan = bench.step()
    assert names(plan.preempted) == ["a"]
    assert rows(plan)[-2:] == [("three", 1, 3), ("four", 0, 4)]


def test_nobody_yields_to_one_behind_one_that_has_to_wait() -> None:
    bench = Bench(num_blocks=8, rows=4, budget=40, policy="priority")
    bench.submit("first", 9, priority=0)  # three blocks of eight
    bench.submit("low", 2, priority=3)
    bench.submit("lower", 2, priority=4)
    bench.step()
    bench.submit("fits", 9, priority=1)  # the last three
    bench.submit("large", 16, priority=1)  # four, of which two would be there
    bench.submit("small", 2, priority=1)
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)[-1]) == ([], ("fits", 0, 9))
    assert names(bench.step().preempted) == []


def test_others_yield_for_no_row_of_one_that_waits_for_a_block() -> None:
    bench = Bench(num_blocks=40, rows=2, policy="priority")
    bench.submit("low", 3, priority=1)
    bench.submit("lower", 3, priority=1)
    bench.step()
    for name in ("one", "two"):
        bench.submit(name, [*PREFIX, ord(name[0])], priority=0, cached=True)
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == (["lower"], [("low", 3, 1), ("one", 0, 13)])
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == (["low"], [("one", 13, 1), ("two", 12, 1)])


def test_nobody_yields_to_one_behind_one_that_waits_for_a_block_without_a_row() -> None:
    bench = Bench(num_blocks=40, rows=3, policy="priority")
    for name in ("low", "lower", "lowest"):
        bench.submit(name, 3, priority=1)
    bench.step()
    for name in ("one", "two"):
        bench.submit(name, [*PREFIX, ord(name[0])], priority=0, cached=True)
    bench.submit("three", 1, priority=0)
    plan = bench.step()
    assert names(plan.preempted) == ["lowest"]
    assert rows(plan)[-1] == ("one", 0, 13)
    assert names(bench.step().preempted) == ["lower", "low"]


def test_nobody_yields_where_tokens_are_left_for_nobody() -> None:
    bench = Bench(num_blocks=40, rows=3, budget=4, policy="priority")
    for name in ("low", "lower"):
        bench.submit(name, 1, priority=5)
    bench.step()
    bench.submit("long", 7, priority=0)
    bench.step()
    bench.submit("high", 2, priority=1)
    for past in (2, 4):  # `long` takes what there is beside those that decode
        plan = bench.step()
        assert names(plan.preempted) == []
        assert rows(plan) == [
            ("low", past // 2 + 1, 1),
            ("lower", past // 2 + 1, 1),
            ("long", past, 2),
        ]
    plan = bench.step()
    assert names(plan.preempted) == ["lower"]
    assert rows(plan) == [("long", 6, 1), ("low", 4, 1), ("high", 0, 2)]


def test_a_higher_priority_does_not_wait_for_a_block_that_a_lower_one_is_to_compute() -> None:
    bench = Bench(num_blocks=40, rows=4, budget=4, policy="priority")
    bench.submit("low", [*PREFIX, 1], priority=2, cached=True)
    assert rows(bench.step()) == [("low", 0, 4)]
    bench.submit("other", 20, priority=1)  # it takes all tokens that a higher priority leaves
    bench.submit("high", [*PREFIX, 2], priority=0, cached=True)
    assert rows(bench.step()) == [("high", 4, 4)]
    assert rows(bench.step()) == [("high", 8, 4)]
    assert rows(bench.step())[0] == ("high", 12, 1)


def test_one_that_has_to_wait_holds_up_nobody_who_computes_a_block_that_it_needs() -> None:
    bench = Bench(num_blocks=60, rows=12, budget=16, policy="priority")
    bench.submit("equal", [1] * 130, priority=0)
    for _ in range(9):
        bench.step()
    bench.submit("low", [*range(100, 140), 7], priority=1, cached=True)
    bench.step()
    bench.submit("high", [*range(100, 140), *range(500, 590)], priority=0, cached=True)
    found = [rows(bench.step()) for _ in range(3)]
    assert [[row[0] for row in step] for step in found] == [["equal", "low"]] * 3, found
    assert found[-1][1][1] > found[0][1][1]


def test_others_yield_to_as_many_tenants_as_have_turns_in_the_step() -> None:
    bench = Bench(num_blocks=400, rows=8, budget=32, policy="fair")
    for number in range(8):
        bench.submit(f"low{number}", 2, priority=5, tenant="batch")
    bench.step()
    for number in range(8):
        bench.submit(f"high{number}", 40, priority=0, tenant=f"tenant{number}")
    plan = bench.step()
    started = [name for name in names(plan.requests) if name.startswith("high")]
    assert len(plan.preempted) == len(started) == 4, rows(plan)


def test_the_first_in_line_starts_beside_tenants_that_have_prompts_all_the_time() -> None:
    """Their turns take all tokens of each step, so others yield before there are any for it."""
    bench = Bench(num_blocks=2000, rows=8, budget=32, policy="fair")
    for number in range(4):
        bench.submit(f"low{number}", 2, priority=5, tenant="batch")
    bench.step()
    for number in range(4):
        bench.submit(f"busy{number}", 400, priority=0, tenant=f"tenant{number}")
    bench.step()
    bench.submit("new", 8, priority=0, tenant="new")
    started = [names(bench.step().requests) for _ in range(3)]
    assert any("new" in step for step in started), started


def test_a_prompt_yields_to_one_with_the_same_beginning() -> None:
    bench = Bench(num_blocks=40, rows=1, budget=4, policy="priority")
    bench.submit("low", [*PREFIX, 1], priority=1, cached=True)
    bench.step()
    bench.submit("high", [*PREFIX, 2], priority=0, cached=True)
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == (["low"], [("high", 4, 4)])


@settings(max_examples=examples(120), deadline=None)
@given(
    policy=st.sampled_from(["priority", "fair"]),
    num_blocks=st.integers(5, 14),
    rows_=st.integers(1, 5),
    spare=st.integers(0, 30),
    late=st.integers(1, 4),
    data=st.data(),
)
def test_somebody_starts_in_the_place_of_whoever_yields(
    policy: SchedulingPolicy,
    num_blocks: int,
    rows_: int,
    spare: int,
    late: int,
    data: st.DataObject,
) -> None:
    """Whatever waits: wide ones, some that load, common beginnings, turns of others."""
    bench = Bench(num_blocks=num_blocks, rows=rows_, budget=rows_ + spare, policy=policy)
    planner, longest = bench.scheduler.planner, num_blocks * 4 - 4
    limits: dict[str, int] = {}
    for step in range(20):
        for _ in range(data.draw(st.integers(0, 2))):
            name = f"{step}.{len(limits)}."
            tokens = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, longest - 1))
            bench.submit(
                name,
                tokens,
                n=data.draw(st.integers(1, rows_)),
                cached=data.draw(st.booleans()),
                priority=data.draw(st.integers(2, 3) if step < late else st.integers(0, 3)),
                tenant=data.draw(st.sampled_from("xyz")),
            )
            limits[name] = data.draw(st.integers(len(tokens) + 1, longest + 1))
        waiting = list(bench.scheduler.waiting)
        loading = [one for one in waiting if data.draw(st.integers(0, 5)) == 0]
        as_it_is = planner._fill(rows_ + spare, NO_ROOM, None, loading)
        chosen = planner._choose(rows_ + spare, None, loading)
        gained = chosen.starting - as_it_is.starting
        for one in chosen.preempted:
            if one not in as_it_is.preempted:
                assert gained
                assert one.rank > min(other.rank for other in gained)
        plan = bench.step(loading=names(loading))
        for row in plan.sampled:
            for one in group(plan.requests[row]):
                if len(one.tokens) >= limits[one.request_id]:
                    bench.finish(name_of(one))


# Requests whose adapters wait for a slot.


def using(bench: Bench, adapters: Mapping[str, int]) -> None:
    """Queue requests that use adapters, by number."""
    for name, number in adapters.items():
        request = make_request(name, range(3))
        request.adapter = Adapter(name, number, name, 1, Path(), None)
        bench.requests[name] = request
        bench.scheduler.submit(request)


def test_those_that_are_barred_are_passed_over_and_keep_no_room() -> None:
    bench = Bench(num_blocks=40, rows=3)
    using(bench, {"a": 1, "b": 2, "c": 1, "d": 2, "e": 3})
    place = bench.scheduler.waiting.place(bench.requests["b"])
    bench.scheduler.bar(Bars({2: place, 3: None}))
    assert names(list(bench.scheduler.planner.next_in_line())) == ["b", "e"]
    assert rows(bench.step()) == [("b", 0, 3), ("e", 0, 3)]
    bench.scheduler.bar(NO_BARS)
    assert rows(bench.step()) == [("b", 3, 1), ("e", 3, 1), ("a", 0, 3)]


def test_nobody_yields_to_a_request_that_is_barred() -> None:
    bench = Bench(num_blocks=40, rows=1, policy="priority")
    bench.submit("low", 3, priority=1)
    bench.step()
    using(bench, {"high": 1})
    bench.scheduler.bar(Bars({}))
    assert rows(bench.step()) == [("low", 3, 1)]
    bench.scheduler.bar(NO_BARS)
    assert names(bench.step().preempted) == ["low"]


def test_others_yield_to_the_first_that_is_not_barred() -> None:
    bench = Bench(num_blocks=40, rows=1, policy="priority")
    bench.submit("low", 3, priority=2)
    bench.step()
    using(bench, {"waits": 1})
    bench.submit("high", 3, priority=1)
    bench.scheduler.bar(Bars({}))
    plan = bench.step()
    assert (names(plan.preempted), rows(plan)) == (["low"], [("high", 0, 3)])


# Bounds and liveness.


@pytest.mark.parametrize(("rows_", "budget"), [(4, 4), (4, 12), (8, 32)])
def test_a_prompt_is_computed_within_the_bound_that_is_stated(rows_: int, budget: int) -> None:
    bench = Bench(num_blocks=2000, rows=rows_, budget=budget)
    for index in range(rows_ - 2):
        bench.submit(f"d{index}", 1)
    bench.step()
    bench.submit("ahead", 100)
    bench.submit("own", 70)
    steps = 0
    while bench.requests["own"].num_computed_tokens < 70:
        plan = bench.step()
        assert plan.num_tokens <= budget
        assert all(f"d{index}" in names(plan.requests) for index in range(rows_ - 2))
        steps += 1
    assert steps <= -(-170 // (budget - rows_ + 1))


@settings(max_examples=examples(120), deadline=None)
@given(
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    num_blocks=st.integers(4, 12),
    rows_=st.integers(1, 5),
    spare=st.integers(0, 12),
    data=st.data(),
)
def test_any_plan_can_be_kept_and_somebody_always_goes_on(
    policy: SchedulingPolicy, num_blocks: int, rows_: int, spare: int, data: st.DataObject
) -> None:
    """`plan` asserts that it is not stuck; here everything is submitted that can be, and ends."""
    bench = Bench(num_blocks=num_blocks, rows=rows_, budget=rows_ + spare, policy=policy)
    longest = num_blocks * 4 - 4
    total = data.draw(st.integers(1, 10))
    limits: dict[str, int] = {}
    fails = 5
    for steps in range(3000):
        if len(limits) < total and (steps == 0 or data.draw(st.booleans())):
            name = f"r{len(limits)}"
            tokens = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, longest - 1))
            bench.submit(
                name,
                tokens,
                n=data.draw(st.integers(1, min(3, rows_))),
                cached=data.draw(st.booleans()),
                priority=data.draw(st.integers(0, 2)),
                tenant=data.draw(st.sampled_from("xy")),
                timeout_s=data.draw(st.sampled_from([None, 5.0])),
            )
            limits[name] = data.draw(st.integers(len(tokens) + 1, longest + 1))
        if not bench.scheduler.has_work:
            break
        before, again = bench.scheduler.plan(), bench.scheduler.plan()
        assert (rows(before), before.shared) == (rows(again), again.shared)
        if fails and data.draw(st.integers(0, 9)) == 0:
            fails -= 1
            bench.fail()
            continue
        plan = bench.step()
        assert plan.requests
        assert 1 <= plan.num_tokens <= rows_ + spare
        assert len(plan.requests) <= rows_
        assert len(set(plan.requests)) == len(plan.requests)
        for row in plan.sampled:
            for one in group(plan.requests[row]):
                if len(one.tokens) >= limits[one.request_id]:
                    bench.finish(name_of(one))
    assert not bench.scheduler.has_work
    assert bench.pool.num_free == num_blocks
    assert not bench.scheduler._held._swapped
