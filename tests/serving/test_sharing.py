"""Shared blocks: prefix hits, prefixes in flight, forks; exact rows and block ids."""

import pytest

from onnxport.kv.table import Found
from tests.serving.bench import Bench, names, rows

PREFIX = list(range(100, 112))  # three blocks


def served(bench: Bench, name: str, tokens: list[int], **options: object) -> None:
    """Run a request to its first token and end it; its full blocks stay cached."""
    bench.submit(name, tokens, cached=True, **options)
    while bench.requests[name].num_computed_tokens < len(tokens):
        bench.step()
    bench.finish(name)


def test_a_hit_goes_on_after_the_cached_blocks() -> None:
    bench = Bench(num_blocks=8)
    served(bench, "a", [*PREFIX, 1])
    assert bench.pool.blank_blocks() == (3, 4, 5, 6, 7)
    bench.submit("b", [*PREFIX, 2, 3], cached=True)
    plan = bench.step()
    assert rows(plan) == [("b", 12, 2)]
    assert plan.shared == {0: Found(3, ((0, 1, 2),))}
    assert bench.blocks("b") == [0, 1, 2, 3]
    assert bench.requests["b"].num_cached_tokens == 12
    assert (bench.scheduler.hit_counts.looked_up, bench.scheduler.hit_counts.found) == (13 + 14, 12)


def test_a_hit_ends_where_the_tokens_part() -> None:
    bench = Bench(num_blocks=8)
    served(bench, "a", [*PREFIX, 1])
    bench.submit("b", [*PREFIX[:6], 9, *PREFIX[7:]], cached=True)
    plan = bench.step()
    assert rows(plan) == [("b", 4, 8)]
    assert bench.blocks("b") == [0, 3, 4]


def test_the_last_token_is_always_computed() -> None:
    bench = Bench(num_blocks=8)
    served(bench, "a", PREFIX)
    bench.submit("b", PREFIX, cached=True)
    plan = bench.step()
    assert rows(plan) == [("b", 8, 4)]
    assert bench.blocks("b") == [0, 1, 3]
    bench.finish("b")
    assert 2 in bench.pool.blank_blocks()  # the copy that was used is the one that is known
    assert 3 not in bench.pool.blank_blocks()


def test_the_first_copy_of_a_block_stays_known_while_it_is_used() -> None:
    bench = Bench(num_blocks=8)
    bench.submit("a", PREFIX, cached=True)
    bench.step()
    bench.submit("b", PREFIX, cached=True)
    bench.step()
    assert (bench.blocks("a")[2], bench.blocks("b")[2]) == (2, 4)
    bench.finish("b")
    bench.finish("a")
    assert 4 in bench.pool.blank_blocks()
    assert 2 not in bench.pool.blank_blocks()


def test_a_hit_on_blocks_in_use_takes_none() -> None:
    bench = Bench(num_blocks=5)
    bench.submit("a", [*PREFIX, 1], cached=True)
    bench.step()
    bench.submit("b", [*PREFIX, 2], cached=True)  # four blocks, one of which is new
    plan = bench.step()
    assert rows(plan) == [("a", 13, 1), ("b", 12, 1)]
    assert bench.blocks("b") == [0, 1, 2, 4]


def test_hits_count_against_the_free_blocks_that_they_use_up() -> None:
    bench = Bench(num_blocks=5)
    served(bench, "a", [*PREFIX, 1])  # three of the free blocks are cached
    bench.submit("c", list(range(5)))  # takes the two blank ones
    bench.submit("b", [*PREFIX, 2], cached=True)
    plan = bench.step()
    assert rows(plan) == [("c", 0, 5)]  # b's four blocks are not there: three would be its hits
    bench.finish("c")
    assert rows(bench.step()) == [("b", 12, 1)]


def test_two_that_hit_the_same_free_blocks_use_them_up_once() -> None:
    bench = Bench(num_blocks=5)
    served(bench, "a", [*PREFIX, 1])
    bench.submit("b", [*PREFIX, 2], cached=True)
    bench.submit("c", [*PREFIX, 3], cached=True)
    assert rows(bench.step()) == [("b", 12, 1), ("c", 12, 1)]
    assert (bench.blocks("b"), bench.blocks("c")) == ([0, 1, 2, 3], [0, 1, 2, 4])


def test_what_was_generated_is_found_too() -> None:
    bench = Bench(num_blocks=8)
    bench.submit("a", PREFIX[:7], cached=True)
    for _ in range(6):
        bench.step()
    bench.finish("a")
    answer = [7] * 6
    bench.submit("b", [*PREFIX[:7], *answer, 1, 2], cached=True)  # the next turn of a chat
    assert rows(bench.step()) == [("b", 12, 3)]


def test_salts_and_adapters_have_nothing_in_common() -> None:
    bench = Bench(num_blocks=32)
    options = [{}, {"cache_salt": "x"}, {"adapter": "x"}, {"adapter": "x", "cache_salt": "y"}]
    for index, option in enumerate(options):
        served(bench, f"a{index}", [*PREFIX, 1], **option)
    assert bench.scheduler.hit_counts.found == 0
    for index, option in enumerate(options):
        served(bench, f"b{index}", [*PREFIX, 1], **option)
    assert bench.scheduler.hit_counts.found == 4 * 12


def test_a_request_without_keys_neither_finds_nor_leaves_anything() -> None:
    bench = Bench(num_blocks=8)
    served(bench, "a", [*PREFIX, 1])
    bench.submit("b", [*PREFIX, 1])
    assert rows(bench.step()) == [("b", 0, 13)]
    bench.finish("b")
    assert bench.pool.num_cached == 3


def test_after_a_reset_nothing_is_found() -> None:
    bench = Bench(num_blocks=8)
    served(bench, "a", [*PREFIX, 1])
    bench.pool.reset_cache()
    bench.submit("b", [*PREFIX, 1], cached=True)
    assert rows(bench.step()) == [("b", 0, 13)]


# In flight.


def test_one_prefix_of_sixteen_requests_is_planned_once() -> None:
    bench = Bench(num_blocks=64, rows=16, budget=16)
    prefix = list(range(100, 124))  # six blocks: two steps
    for index in range(16):
        bench.submit(f"r{index}", [*prefix, index, index], cached=True)
    assert rows(bench.step()) == [("r0", 0, 16)]
    plan = bench.step()  # r0 is still at it: nobody else can go on
    assert rows(plan) == [("r0", 16, 10)]
    plan = bench.step()
    assert rows(plan) == [("r0", 26, 1)] + [(f"r{i}", 24, 2) for i in range(1, 8)] + [("r8", 24, 1)]
    assert all(bench.blocks(f"r{i}")[:6] == [0, 1, 2, 3, 4, 5] for i in range(9))
    while bench.scheduler.num_running < 16:
        bench.step()
    assert [bench.requests[f"r{i}"].num_cached_tokens for i in range(16)] == [0] + [24] * 15
    assert bench.scheduler.hit_counts.found == 15 * 24


def test_followers_join_deeper_and_deeper_branches() -> None:
    bench = Bench(num_blocks=64, budget=64)
    bench.submit("a", [*PREFIX, 1, 1, 1, 1, 1], cached=True)
    bench.submit("b", [*PREFIX, 2, 2, 2, 2, 2], cached=True)
    bench.submit("c", [*PREFIX, 2, 2, 2, 2, 3], cached=True)
    bench.submit("d", [*PREFIX[:4], 9], cached=True)
    assert rows(bench.step()) == [("a", 0, 17)]
    assert rows(bench.step()) == [("a", 17, 1), ("b", 12, 5), ("d", 4, 1)]
    assert rows(bench.step())[-1] == ("c", 16, 1)


def test_others_go_past_followers() -> None:
    bench = Bench(num_blocks=64, budget=32)
    bench.submit("a", [*PREFIX, 1], cached=True)
    bench.submit("b", [*PREFIX, 2], cached=True)
    bench.submit("c", [1, 2, 3], cached=True)
    assert rows(bench.step()) == [("a", 0, 13), ("c", 0, 3)]
    assert rows(bench.step()) == [("a", 13, 1), ("c", 3, 1), ("b", 12, 1)]


def test_a_follower_keeps_its_row() -> None:
    bench = Bench(num_blocks=64, rows=2, budget=32)
    bench.submit("a", [*PREFIX, 1], cached=True)
    bench.submit("b", [*PREFIX, 2], cached=True)
    bench.submit("c", [1, 2, 3], cached=True)
    assert rows(bench.step()) == [("a", 0, 13)]
    assert rows(bench.step()) == [("a", 13, 1), ("b", 12, 1)]


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_the_next_one_takes_over_where_a_leader_ended(how: str) -> None:
    bench = Bench(num_blocks=64, budget=8)
    for name in "abc":
        bench.submit(name, [*PREFIX, *PREFIX, ord(name)], cached=True)
    assert rows(bench.step()) == [("a", 0, 8)]
    if how == "fail":
        assert rows(bench.fail()) == [("a", 8, 8)]
    bench.finish("a")
    assert rows(bench.step()) == [("b", 8, 8)]  # in the very next step, and what a did is not lost
    assert rows(bench.step()) == [("b", 16, 8)]
    assert rows(bench.step()) == [("b", 24, 1), ("c", 24, 1)]


def test_a_leader_that_is_preempted_is_no_leader() -> None:
    bench = Bench(num_blocks=7, budget=5)
    bench.submit("old", [1, 2, 3])
    bench.step()
    for name in "ab":
        bench.submit(name, [*PREFIX, *PREFIX[:8], ord(name)], cached=True)
    assert rows(bench.step()) == [("old", 3, 1), ("a", 0, 4)]
    for past in range(4, 8):
        assert rows(bench.step())[0] == ("old", past, 1)
    plan = bench.step()  # old needs a third block, and a has the rest
    assert rows(plan) == [("old", 8, 1)]
    assert names(plan.preempted) == ["a"]
    bench.finish("a", "old")
    assert rows(bench.step())[0][0] == "b"


def test_a_leader_that_does_not_reach_a_whole_block_goes_on_before_its_followers() -> None:
    bench = Bench(num_blocks=64, budget=6)
    bench.submit("a", [*PREFIX, 1], cached=True)
    bench.submit("b", [*PREFIX, 2], cached=True)
    assert rows(bench.step()) == [("a", 0, 6)]
    assert rows(bench.step()) == [("a", 6, 6)]  # b finds one block, and a is computing the second
    assert rows(bench.step()) == [("a", 12, 1), ("b", 12, 1)]


def test_a_running_prompt_joins_what_another_has_computed_meanwhile() -> None:
    bench = Bench(num_blocks=64, rows=3, budget=8)
    bench.submit("a", PREFIX, cached=True)
    bench.step()  # a has eight tokens
    bench.pool.reset_cache()  # so b does not find them
    bench.submit("b", [*PREFIX, 1, 2, 3, 4, 5], cached=True)
    plan = bench.step()
    assert rows(plan) == [("a", 8, 4), ("b", 0, 4)]
    bench.step()
    assert bench.requests["b"].num_computed_tokens == 11
    served = bench.step()
    assert rows(served)[-1] == ("b", 11, 6)


def test_a_running_prompt_at_the_end_of_a_block_shares_the_next_one() -> None:
    bench = Bench(num_blocks=64, budget=4)
    bench.submit("b", [*PREFIX, 1, 2], cached=True)
    assert rows(bench.step()) == [("b", 0, 4)]
    bench.pool.reset_cache()
    bench.submit("a", [*PREFIX, 3], cached=True)
    plan = bench.step(only=["a"])
    assert rows(plan) == [("a", 0, 4)]
    for past in (4, 8):
        assert rows(bench.step(only=["a"])) == [("a", past, 4)]
    plan = bench.step()
    assert rows(plan) == [("a", 12, 1), ("b", 12, 2)]
    assert bench.blocks("b")[1:3] == bench.blocks("a")[1:3]
    assert bench.blocks("b")[0] != bench.blocks("a")[0]
    assert bench.requests["b"].num_cached_tokens == 8


def test_blocks_that_a_running_prompt_shares_are_no_longer_claimed() -> None:
    bench = Bench(num_blocks=7, budget=4)
    bench.submit("b", [*PREFIX, 1], cached=True)
    assert rows(bench.step()) == [("b", 0, 4)]  # three blocks are to come
    bench.pool.reset_cache()
    bench.scheduler._planner._max_num_batched_tokens = 16
    bench.submit("a", PREFIX, cached=True)
    plan = bench.scheduler.plan([bench.requests["a"]])
    bench.scheduler.commit(plan, bench.scheduler.reserve(plan))
    bench.requests["a"].tokens.append(7)
    bench.submit("c", 3)
    started = [*rows(bench.step()), *rows(bench.step())]
    assert started[:2] == [("a", 12, 1), ("b", 12, 1)]
    assert ("c", 0, 3) in started  # in this step, or in the next one at the latest


# Forks.


def test_completions_share_the_prompt_and_the_last_owner_writes_in_place() -> None:
    bench = Bench(num_blocks=12)
    bench.submit("a", 6, n=3)
    plan = bench.step()
    assert rows(plan) == [("a", 0, 6)]
    assert [bench.blocks(name) for name in ("a", "a1", "a2")] == [[0, 1]] * 3
    assert (bench.pool.ref_count(0), bench.pool.ref_count(1)) == (3, 3)
    plan = bench.scheduler.plan()
    assert plan.copied == {0, 1}
    reservation = bench.scheduler.reserve(plan)
    assert reservation.copies == ((1, 2), (1, 3))
    bench.scheduler.rollback(plan, reservation)
    plan = bench.step()
    assert rows(plan) == [("a", 6, 1), ("a1", 6, 1), ("a2", 6, 1)]
    assert [bench.blocks(name) for name in ("a", "a1", "a2")] == [[0, 3], [0, 2], [0, 1]]
    assert bench.step().copied == frozenset()


def test_completions_of_whole_blocks_copy_nothing() -> None:
    bench = Bench(num_blocks=12)
    bench.submit("a", 8, n=2)
    bench.step()
    plan = bench.step()
    assert (plan.copied, plan.num_new_columns) == (frozenset(), (1, 1))
    assert [bench.blocks(name) for name in ("a", "a1")] == [[0, 1, 2], [0, 1, 3]]


def test_completions_that_do_not_run_keep_the_block_from_being_written() -> None:
    bench = Bench(num_blocks=12)
    bench.submit("a", 6, n=2)
    bench.step()
    plan = bench.step(only=["a1"])
    assert (rows(plan), plan.copied) == ([("a1", 6, 1)], {0})
    assert (bench.blocks("a"), bench.blocks("a1")) == ([0, 1], [0, 2])
    plan = bench.step(only=["a"])
    assert plan.copied == frozenset()
    assert bench.blocks("a") == [0, 1]


def test_a_completion_that_ends_leaves_the_others_their_blocks() -> None:
    bench = Bench(num_blocks=12)
    bench.submit("a", 6, n=3)
    bench.step()
    bench.finish("a", "a2")
    plan = bench.step()
    assert (rows(plan), plan.copied) == ([("a1", 6, 1)], frozenset())
    bench.finish("a1")
    assert bench.pool.num_free == 12


def test_completions_wait_for_rows_for_all_of_them() -> None:
    bench = Bench(num_blocks=20, rows=4)
    bench.submit("a", 3)
    bench.submit("b", 3)
    bench.submit("c", 3, n=3)
    bench.submit("d", 3)  # does not overtake
    assert rows(bench.step()) == [("a", 0, 3), ("b", 0, 3)]
    bench.finish("a")
    assert rows(bench.step()) == [("b", 3, 1), ("c", 0, 3)]
    assert bench.scheduler.num_running == 4
    bench.finish("b")
    assert rows(bench.step())[-1] == ("d", 0, 3)


def test_completions_end_with_the_prompt_that_they_wait_for() -> None:
    bench = Bench(num_blocks=20, budget=8)
    bench.submit("a", 12, n=2)
    bench.step()
    bench.finish("a")
    assert bench.requests["a1"].finish_reason == "stop"
    assert not bench.scheduler.has_work


def test_a_preempted_prompt_keeps_its_completions() -> None:
    bench = Bench(num_blocks=4, budget=8, rows=4)
    bench.submit("old", 3)
    bench.step()
    bench.submit("a", 9, n=2)
    while not bench.requests["a"].num_preemptions:
        bench.step(only=["old", *(["a"] if bench.requests["a"].num_computed_tokens < 7 else [])])
    assert names(bench.requests["a"].siblings) == ["a1"]
    bench.finish("old")
    bench.step()
    bench.step()
    assert bench.scheduler.num_running == 2


def test_a_preempted_completion_goes_on_by_itself() -> None:
    bench = Bench(num_blocks=6, budget=16)
    bench.submit("a", 6, n=3, cached=True)
    bench.step()
    assert rows(bench.step()) == [("a", 6, 1), ("a1", 6, 1), ("a2", 6, 1)]
    assert rows(bench.step()) == [("a", 7, 1), ("a1", 7, 1), ("a2", 7, 1)]
    plan = bench.step()  # three blocks more, two are free
    assert (rows(plan), names(plan.preempted)) == ([("a", 8, 1), ("a1", 8, 1)], ["a2"])
    bench.finish("a")
    plan = bench.step()
    assert rows(plan) == [("a1", 9, 1), ("a2", 8, 1)]  # all that the first one leaves behind


def test_an_owner_that_yields_no_longer_keeps_a_block_from_being_written() -> None:
    """The pool holds the prompt and nothing else: the first completion must be able to go on."""
    bench = Bench(num_blocks=2)
    bench.submit("a", 6, n=2)
    bench.step()
    plan = bench.step()
    assert (rows(plan), names(plan.preempted)) == ([("a", 6, 1)], ["a1"])
    assert plan.copied == frozenset()
    assert bench.blocks("a") == [0, 1]
