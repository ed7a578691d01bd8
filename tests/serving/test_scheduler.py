"""The scheduler by itself: exact rows, chunks and block ids, no model."""

import pytest

from onnxport.serving.draft import fit_chunk
from tests.serving.bench import Bench, names, rows


@pytest.mark.parametrize(
    ("past", "pending", "budget", "held", "free", "expected"),
    [
        (0, 10, 16, 0, 9, 10),  # everything fits
        (0, 10, 6, 0, 9, 6),  # the budget ends first
        (0, 10, 16, 0, 2, 8),  # the blocks end first
        (5, 9, 16, 2, 0, 3),  # what is left of the last block held
        (8, 1, 16, 2, 0, 0),  # nothing
    ],
)
def test_fit_chunk(
    past: int, pending: int, budget: int, held: int, free: int, expected: int
) -> None:
    assert fit_chunk(past, pending, budget, held, free, block_size=4) == expected


def test_prefill_then_decode_takes_a_block_only_when_one_is_full() -> None:
    bench = Bench(num_blocks=4)
    bench.submit("a", 7)
    plan = bench.step()
    assert rows(plan) == [("a", 0, 7)]
    assert plan.sampled == (0,)
    assert bench.blocks("a") == [0, 1]
    assert rows(bench.step()) == [("a", 7, 1)]
    assert bench.blocks("a") == [0, 1]
    assert rows(bench.step()) == [("a", 8, 1)]
    assert bench.blocks("a") == [0, 1, 2]
    bench.finish("a")
    assert bench.pool.free_blocks() == (0, 1, 2, 3)


def test_a_long_prompt_is_chunked_and_sampled_once() -> None:
    bench = Bench(num_blocks=10, budget=16)
    bench.submit("a", 35)
    plans = [bench.step() for _ in range(4)]
    assert [rows(plan) for plan in plans] == [
        [("a", 0, 16)],
        [("a", 16, 16)],
        [("a", 32, 3)],
        [("a", 35, 1)],
    ]
    assert [plan.sampled for plan in plans] == [(), (), (0,), (0,)]


def test_decodes_go_first_and_a_prefill_gets_the_rest() -> None:
    bench = Bench(num_blocks=40, budget=8)
    bench.submit("a", 2)
    bench.submit("b", 2)
    bench.step()
    bench.submit("c", 20)
    bench.submit("d", 3)
    assert rows(bench.step()) == [("a", 2, 1), ("b", 2, 1), ("c", 0, 6)]
    assert rows(bench.step()) == [("a", 3, 1), ("b", 3, 1), ("c", 6, 6)]
    bench.step()
    assert rows(bench.step()) == [("a", 5, 1), ("b", 5, 1), ("c", 18, 2), ("d", 0, 3)]


def test_prefill_cannot_starve_under_full_rows_of_decodes() -> None:
    bench = Bench(num_blocks=100, rows=4, budget=4)
    for name in "abc":
        bench.submit(name, 1)
    bench.step()
    bench.submit("long", 30)
    steps = 0
    while bench.requests["long"].num_computed_tokens < 30:
        plan = bench.step()
        assert plan.num_tokens == 4  # three decodes, and the rest goes to the prefill
        steps += 1
    assert steps == 30


def test_rows_are_limited_and_waiting_is_in_order() -> None:
    bench = Bench(num_blocks=40, rows=2)
    for name in "abc":
        bench.submit(name, 3)
    assert rows(bench.step()) == [("a", 0, 3), ("b", 0, 3)]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    bench.finish("a")
    assert rows(bench.step()) == [("b", 3, 1), ("c", 0, 3)]


def test_a_request_waits_until_all_its_blocks_are_free_beside_the_claims_of_others() -> None:
    bench = Bench(num_blocks=8, budget=8)
    bench.submit("a", 20)  # five blocks, two in the first step
    bench.submit("b", 16)  # four blocks: only three are not claimed
    bench.submit("c", 1)  # would fit, and does not overtake
    assert rows(bench.step()) == [("a", 0, 8)]
    assert bench.blocks("a") == [0, 1]
    assert rows(bench.step()) == [("a", 8, 8)]
    assert rows(bench.step()) == [("a", 16, 4)]
    assert bench.scheduler.num_running == 1
    bench.finish("a")
    assert rows(bench.step()) == [("b", 0, 8)]


def test_the_newest_is_preempted_keeps_its_tokens_and_comes_back_first() -> None:
    bench = Bench(num_blocks=4)
    bench.submit("a", 8)
    bench.submit("b", 8)
    bench.step()
    bench.submit("c", 1)
    assert bench.blocks("a") == [0, 1]
    assert bench.blocks("b") == [2, 3]
    plan = bench.step()  # both need a block and there is none
    assert rows(plan) == [("a", 8, 1)]
    assert names(plan.preempted) == ["b"]
    assert bench.blocks("a") == [0, 1, 2]
    b = bench.requests["b"]
    assert (b.num_computed_tokens, len(b.tokens), b.num_preemptions) == (0, 9, 1)
    assert names(list(bench.scheduler.requests())) == ["a", "b", "c"]
    bench.finish("a")
    assert rows(bench.step()) == [("b", 0, 9), ("c", 0, 1)]
    assert bench.requests["b"].num_computed_tokens == 9


def test_the_one_that_lacks_a_block_may_be_the_newest_itself() -> None:
    bench = Bench(num_blocks=3)
    bench.submit("a", 5)
    bench.submit("b", 4)
    bench.step()
    plan = bench.step()
    assert rows(plan) == [("a", 5, 1)]
    assert names(plan.preempted) == ["b"]


def test_no_more_are_preempted_than_blocks_are_needed() -> None:
    bench = Bench(num_blocks=5)
    for name, num_tokens in (("a", 4), ("b", 4), ("c", 3), ("d", 2), ("e", 1)):
        bench.submit(name, num_tokens)
    bench.step()
    plan = bench.step()
    assert rows(plan) == [("a", 4, 1), ("b", 4, 1), ("c", 3, 1)]
    assert names(plan.preempted) == ["e", "d"]
    assert (bench.blocks("a"), bench.blocks("b")) == ([0, 3], [1, 4])


def test_a_prefill_is_preempted_for_an_older_decode() -> None:
    bench = Bench(num_blocks=6, budget=8)
    bench.submit("a", 4)
    bench.step()
    bench.submit("b", 18)  # five blocks
    assert rows(bench.step()) == [("a", 4, 1)]  # its new block leaves b four, so b waits
    bench = Bench(num_blocks=6, budget=8)
    bench.submit("a", 3)
    bench.submit("b", 18)
    bench.step()
    assert (bench.blocks("a"), bench.blocks("b")) == ([0], [1, 2])
    assert rows(bench.step()) == [("a", 3, 1), ("b", 5, 7)]
    assert rows(bench.step()) == [("a", 4, 1), ("b", 12, 4)]  # a took the block of b's end
    for past in (5, 6, 7):
        assert rows(bench.step()) == [("a", past, 1)]  # b waits, with what it has computed
    plan = bench.step()
    assert rows(plan) == [("a", 8, 1)]
    assert names(plan.preempted) == ["b"]


def test_planning_changes_nothing() -> None:
    bench = Bench(num_blocks=4)
    bench.submit("a", 8)
    bench.submit("b", 8)
    bench.step()
    assert bench.scheduler.plan() == bench.scheduler.plan()
    assert bench.scheduler.plan().preempted
    assert bench.scheduler.num_running == 2
    bench.scheduler.check()


def test_a_rolled_back_step_leaves_requests_where_they_were() -> None:
    bench = Bench(num_blocks=8)
    bench.submit("a", 4)
    bench.step()
    bench.submit("b", 6)
    plan = bench.scheduler.plan()
    assert rows(plan) == [("a", 4, 1), ("b", 0, 6)]
    free = set(bench.pool.free_blocks())
    bench.scheduler.rollback(plan, bench.scheduler.reserve(plan))
    assert set(bench.pool.free_blocks()) == free
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    bench.scheduler.check()
    assert rows(bench.scheduler.plan()) == rows(plan)


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert Bench(num_blocks=4).scheduler.plan().requests == ()
