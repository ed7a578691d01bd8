"""Layers that give up what is behind their window: what is held, found again, saved and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from onnxport.errors import CapacityError
from onnxport.kv.table import Found
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from tests.serving.bench import Bench, rows
from tests.serving.helpers import alone, checked_step, null_engine, null_model, run, submit, tokens
from tests.serving.watch import Watch

HALF = (None, 8)  # blocks of 4: of the second group a sequence holds three at most
MIB = 1 << 20
LONG = SamplingParams(temperature=0.0, max_tokens=40)


def tables(bench: Bench, name: str) -> list[list[int]]:
    return [list(blocks) for blocks in bench.requests[name].table.groups]


def test_blocks_behind_the_window_are_given_to_others() -> None:
    bench = Bench(num_blocks=20, windows=HALF)
    bench.submit("a", 11)
    bench.step()
    # The next token, the twelfth, sees from the fifth on.
    assert tables(bench, "a") == [[0, 1, 2], [0, 4, 5]]
    assert bench.requests["a"].table.given_up == [0, 1]
    assert bench.pool.num_free == 20 - 5
    for _ in range(5):
        bench.step()
    assert tables(bench, "a") == [[0, 1, 2, 3], [0, 0, 5, 6]]
    bench.finish("a")
    assert bench.pool.num_free == 20


def test_a_sequence_holds_less_than_all_its_tokens_take() -> None:
    bench = Bench(num_blocks=13, windows=HALF)  # for 24 tokens if nothing were given up
    bench.submit("a", 30)
    while bench.requests["a"].num_computed_tokens < 37:
        bench.step()
    assert len(bench.requests["a"].table) == 10
    assert bench.pool.num_free == 0


def test_a_chunk_is_cut_to_what_fits_at_once() -> None:
    bench = Bench(num_blocks=13, windows=HALF, budget=64)
    bench.submit("a", 38)
    assert rows(bench.step()) == [("a", 0, 24)]  # six columns of two blocks
    assert rows(bench.step()) == [("a", 24, 8)]  # beside six and two blocks that are held: two
    assert rows(bench.step()) == [("a", 32, 4)]
    assert rows(bench.step()) == [("a", 36, 2)]


def test_a_hit_needs_the_last_columns_of_a_window_alone() -> None:
    bench = Bench(num_blocks=40, windows=HALF)
    prefix = list(range(100, 120))  # five columns
    bench.submit("a", [*prefix, 1], cached=True)
    while bench.requests["a"].num_computed_tokens < 21:
        bench.step()
    full, windowed = tables(bench, "a")
    bench.finish("a")
    bench.submit("b", [*prefix, 2], cached=True)
    plan = bench.step()
    assert rows(plan) == [("b", 20, 1)]
    assert plan.shared == {0: Found(5, (tuple(full[:5]), tuple(windowed[3:5])))}
    assert bench.requests["b"].table.given_up == [0, 3]


def test_a_hit_ends_where_the_window_was_kept() -> None:
    bench = Bench(num_blocks=40, windows=HALF)
    prompt = list(range(100, 121))
    bench.submit("a", prompt, cached=True)
    while bench.requests["a"].num_computed_tokens < 21:
        bench.step()
    key = bench.requests["a"].keys
    assert key is not None
    bench.finish("a")
    bench.pool.hide(key.key(4), 1)  # as if it had been handed out again
    bench.submit("b", prompt, cached=True)
    assert rows(bench.step()) == [("b", 16, 5)]  # columns 2 and 3 are there
    bench.finish("b")
    bench.pool.hide(key.key(2), 1)
    bench.pool.hide(key.key(3), 1)
    bench.pool.hide(key.key(4), 1)
    bench.submit("c", prompt, cached=True)
    assert rows(bench.step()) == [("c", 8, 13)]
    bench.finish("c")
    bench.pool.hide(key.key(0), 0)
    bench.submit("d", prompt, cached=True)
    assert rows(bench.step()) == [("d", 0, 16)]


def test_siblings_share_and_give_up_each_for_itself() -> None:
    engine = null_engine(num_blocks=40, windows=HALF)
    params = SamplingParams(temperature=1.0, max_tokens=30, n=3, seed=5)
    submit(engine, "a", range(18), params)
    deltas = run(engine)["a"]
    for index in range(3):
        assert tokens(deltas, index) == alone(range(18), params, index, HALF)


def test_more_sequences_run_at_once_than_without() -> None:
    def most_rows(**options: Any) -> int:
        engine = null_engine(max_num_seqs=32, max_num_batched_tokens=128, **options)
        watch = Watch(engine)
        for number in range(16):
            submit(engine, str(number), [number] * 50, LONG)
        for name, deltas in run(engine).items():
            assert tokens(deltas) == alone([int(name)] * 50, LONG, 0, (None, 8, 8, 8))
        return max(step.num_rows for step in watch.steps)

    windows = (None, 8, 8, 8)  # as a model of four layers, of which three have a window
    given_up = most_rows(num_blocks=4 * 70, windows=windows)
    assert most_rows(num_blocks=70, windows=windows, one_table=True) == 5
    assert given_up > 2 * 5


def test_what_failed_is_hidden_even_behind_the_window() -> None:
    bench = Bench(num_blocks=40, windows=HALF)
    prompt = list(range(100, 121))
    bench.submit("a", prompt, cached=True)
    while bench.requests["a"].num_computed_tokens < 21:
        bench.step()
    bench.scheduler.distrust(bench.requests["a"])
    bench.finish("a")
    assert bench.pool.num_cached == 0
    bench.submit("b", prompt, cached=True)
    assert rows(bench.step()) == [("b", 0, 16)]


def test_what_does_not_fit_is_refused_by_what_is_held_at_once() -> None:
    engine = null_engine(num_blocks=13, windows=HALF)
    submit(engine, "fits", range(40), SamplingParams(max_tokens=1))
    with pytest.raises(CapacityError, match="need 14 KV blocks of 4 tokens, and the cache has 13"):
        submit(engine, "long", range(41), SamplingParams(max_tokens=1))
    run(engine)


def test_where_all_layers_have_the_window_a_sequence_may_outgrow_the_pool() -> None:
    engine = null_engine(num_blocks=4, windows=(8,))
    submit(engine, "a", range(60), LONG)
    assert tokens(run(engine)["a"]) == alone(range(60), LONG, 0, (8,))


@pytest.mark.parametrize("windows", [HALF, (None, 8, 8), (8,), (9, 3)])
def test_guessing_and_batching_give_the_same_tokens(windows: tuple[int | None, ...]) -> None:
    engine = null_engine(num_blocks=30 * len(windows), windows=windows, max_num_seqs=4)
    prompts = {
        name: [ord(name)] * length for name, length in zip("abcdef", range(5, 59, 9), strict=True)
    }
    for name, prompt in prompts.items():
        submit(engine, name, prompt, LONG)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == alone(prompt, LONG, 0, windows)


def crowd(engine: Engine, windows: Sequence[int | None]) -> None:
    """Three requests in a pool for less."""
    prompts = {name: [ord(name), *range(100, 123)] for name in "abc"}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, LONG)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == alone(prompt, LONG, 0, tuple(windows))
    assert engine.stats().num_preemptions > 0


def test_swapping_loads_what_the_window_sees_alone() -> None:
    options: dict[str, Any] = {"num_blocks": 38, "max_num_batched_tokens": 64, "windows": HALF}
    plain = null_engine(**options)
    watch = Watch(plain)
    crowd(plain, HALF)
    engine = null_engine(**options, preemption="swap", kv_host_memory=MIB)
    swapping = Watch(engine)
    crowd(engine, HALF)
    assert engine.stats().num_blocks_loaded > 0
    assert swapping.num_tokens < watch.num_tokens  # what was loaded was not computed again
    assert null_model(engine).num_written_blocks < null_model(engine).num_read_blocks + 2


def test_host_memory_gives_back_a_prefix_group_by_group() -> None:
    engine = null_engine(num_blocks=60, windows=HALF, kv_host_memory=MIB, preemption="swap")
    prefix = [(i * 7) % 500 for i in range(64)]
    submit(engine, "a", [*prefix, 1])
    run(engine)
    for number in range(6):  # overwrite the pool
        submit(engine, f"fill{number}", [300 + number] * 60, SamplingParams(max_tokens=1))
    run(engine)
    loaded = engine.stats().num_blocks_loaded
    submit(engine, "b", [*prefix, 2])
    deltas = run(engine)["b"]
    assert tokens(deltas) == alone([*prefix, 2], windows=HALF)
    assert deltas[0].num_cached_tokens == 64
    assert engine.stats().num_blocks_loaded - loaded == 16 + 2


def test_a_model_with_one_table_takes_over_and_back() -> None:
    """The tables are others then; requests go on from their tokens."""
    lost = [3, 9]

    def options(number: int, *, one_table: bool) -> NullOptions:
        return NullOptions(
            num_blocks=60,
            block_size=4,
            windows=HALF,
            one_table=one_table,
            max_model_len=512,
            lost_at=lambda operation: len(lost) > number and operation == lost[number],
        )

    models = [NullModel(options(1, one_table=True)), NullModel(options(2, one_table=False))]
    engine = null_engine(
        num_blocks=60, windows=HALF, lost_at=lambda operation: operation == 3, fallbacks=models
    )
    for name in "ab":
        submit(engine, name, [ord(name)] * 30, LONG)
    deltas = run(engine)
    for name in "ab":
        assert tokens(deltas[name]) == alone([ord(name)] * 30, LONG, 0, HALF)
    assert len(engine.losses) == 2


def test_the_packed_tables_are_those_of_the_groups() -> None:
    seen: list[tuple[list[list[int]], list[list[int]]]] = []

    class Seeing(NullModel):
        def run(self, inputs: Any) -> Any:
            [second] = inputs.more_block_tables
            seen.append((inputs.block_table.tolist(), second.tolist()))
            return super().run(inputs)

    engine = null_engine(num_blocks=40, windows=HALF, model_type=Seeing)
    submit(engine, "a", range(11), SamplingParams(temperature=0.0, max_tokens=4))
    while engine.has_work:
        checked_step(engine)
    assert seen[0] == ([[0, 1, 2]], [[3, 4, 5]])
    assert seen[1] == ([[0, 1, 2]], [[0, 4, 5]])
    assert len(seen[2][0][0]) == len(seen[2][1][0]) == 4
